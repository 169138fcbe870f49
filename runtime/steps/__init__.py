"""A step as the layers see it, and the record of what it took."""
