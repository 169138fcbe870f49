"""From an assignment to the plan file, and its check, which shares no code with any solver."""
