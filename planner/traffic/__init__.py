"""Live traffic: what a plan gives under it, and which plan is best for it."""
