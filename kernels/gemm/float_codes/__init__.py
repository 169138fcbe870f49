"""Products with codes that are floats or places in a table: E4M3, E2M1, NF4, IQ4."""
