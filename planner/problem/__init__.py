"""From nouns to numbers: what a solver sees, and for how long; first file: problem.py."""
