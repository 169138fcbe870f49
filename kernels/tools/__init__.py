"""Commands for people who write kernels: time them, compare them with twins, read machine code."""
