"""The scheduler and the loops of the stages: pure data, no transport, no device names."""
