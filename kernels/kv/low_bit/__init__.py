"""Packed keys and values of 8, 4 and 2 bits: parts of kernels, and the cache of CPUs."""
