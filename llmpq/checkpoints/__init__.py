"""Model files: config.json, GGUF, stored codes, the hub. No weight is read."""
