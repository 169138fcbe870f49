"""What kernels of products share: words to operands in registers, loads of x, sums."""
