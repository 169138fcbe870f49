"""A stage's process: what starts it, its place, survey, loading, calls; first: stage_worker.py."""
