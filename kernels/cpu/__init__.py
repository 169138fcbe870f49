"""Products on the CPU: torch's packed operators where they win, else dequantise and multiply."""
