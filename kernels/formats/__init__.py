"""How quantised bytes lie: weights of 3, 4 and 8 bits, codebooks, blocks of the KV cache.

Drawn, packed and unpacked here; nothing is multiplied. Start with `weight_layout.py`.
"""
