"""The cache in 8, 4 and 2 bits, one run of tokens a request; first file: low_bit_cache.py."""
