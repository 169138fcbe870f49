"""Code that differs by device: layers, captured steps, memory, the arithmetic of a stage."""
