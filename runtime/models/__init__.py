"""The parts that decoder layers are wired from, and how: one wiring, by the model's spec."""
