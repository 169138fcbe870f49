"""What an engine is run with, as users and stages have it."""
