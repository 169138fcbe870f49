"""Plans made without a planner, and what is added to a plan before it runs."""
