"""Shared by families: reading config.json key by key, rotary positions, mixtures."""
