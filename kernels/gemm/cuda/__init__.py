"""Products in CUDA C++: many rows of x on Hopper (rows_launch.py), few on cards before Ampere."""
