"""Time against quality loss: the fastest plan within a budget, and the front of both."""
