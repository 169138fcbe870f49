"""Attention over the KV cache: append, pack, attend, combine, and how each step is launched.

`low_bit/low_bit_cache.py` is the way in for packed blocks, `plain_attend.py` for 16 bits.
"""
