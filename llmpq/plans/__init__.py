"""A plan and a topology as files, what is counted and asked of one, and what can run it."""
