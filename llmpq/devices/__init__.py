"""What devices are, and which ones this machine has."""
