"""Products of a mixture's experts: all of a layer in one launch; first file: expert_stack.py."""
