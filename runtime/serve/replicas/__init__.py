"""Several engines behind one port, kept by Ray Serve."""
