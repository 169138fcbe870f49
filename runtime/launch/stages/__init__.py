"""The worker of a stage: settings, place, loading, calls; first file: stage_worker.py."""
