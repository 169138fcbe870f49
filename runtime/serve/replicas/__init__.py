"""Several engines behind one port, each a child process."""
