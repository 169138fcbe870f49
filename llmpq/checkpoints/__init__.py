"""What a model's files say of it: config.json and GGUF, without reading a weight."""
