"""Costs of layers, messages and stages' memory, measured or estimated; knows no plans."""
