"""What only evaluates: how long a plan takes, whether it fits, what a change would do."""
