"""Several engines behind one port, run by Ray Serve."""
