"""From what was asked for (flags, files, this machine's devices) to a `Problem`."""
