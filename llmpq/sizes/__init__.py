"""Bytes beside the weights: temporaries, KV cache, the pool's blocks."""
