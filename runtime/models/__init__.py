"""The parts that decoder layers are wired from, and how: one wiring, told by the model's spec."""
