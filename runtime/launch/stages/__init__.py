"""A stage from its first line to its answers, whoever started it; first file: stage_worker.py."""
