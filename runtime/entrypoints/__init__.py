"""The doors of Python: LLM, engines side by side, and answers as they come."""
