"""Work of the CPU: our own C++ (native_linear.py, native_layer.py), else torch's operators."""
