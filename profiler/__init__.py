"""A real device in, CostModel and Sensitivity out."""
