"""Operands of GEMM kernels: words to operands in registers, loads of x, sums."""
