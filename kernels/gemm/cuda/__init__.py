"""Many rows of x on Hopper in CUDA C++, tiles as x has rows; first file: rows_launch.py."""
