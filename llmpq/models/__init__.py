"""What a model is: its shapes by file or name, and how devices share its tensors out."""
