"""From nouns to numbers: what a solver sees; first file: problem.py."""
