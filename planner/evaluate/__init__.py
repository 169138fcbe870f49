"""What only evaluates: how long a plan takes, and whether it fits."""
