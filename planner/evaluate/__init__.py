"""Evaluates plans: how long one takes, and whether it fits. No search."""
