"""What families share: reading config.json key by key, rotary positions, mixtures."""
