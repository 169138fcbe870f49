"""Products, layers and attention on the CPU: our own C++ (native_linear.py), else torch's operators."""
