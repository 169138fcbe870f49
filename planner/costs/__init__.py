"""Costs of layers and messages, measured or estimated; knows no plans."""
