"""Reports of runs, and their progress."""
