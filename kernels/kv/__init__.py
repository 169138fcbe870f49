"""Attention over the KV cache: append, pack, attend, combine, and how each step is launched.

`paged/` is the way in on GPUs, `low_bit/low_bit_cache.py` for packed blocks on CPUs.
"""
