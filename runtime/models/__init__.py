"""The parts that decoder layers are wired from, and one file of wiring per model family."""
