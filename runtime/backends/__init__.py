"""What differs from device to device: layers, captured steps, memory, the arithmetic of a stage."""
