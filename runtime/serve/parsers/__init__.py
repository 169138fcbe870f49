"""Parses what a model writes: its thoughts, its text, its calls of tools. One file a form."""
