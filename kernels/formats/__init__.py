"""How quantised bytes lie: weights of 3, 4 and 8 bits, Atom's weights, blocks of the KV cache.

Drawn, packed, unpacked and converted here; nothing is multiplied. Start with `weight_layout.py`.
"""
