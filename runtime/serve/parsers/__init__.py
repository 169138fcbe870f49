"""What a model writes, taken apart: its thoughts, its text, its calls of tools. One file a form."""
