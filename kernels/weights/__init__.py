"""What a linear layer multiplies by: one file a form, each knows its bytes and its products.

Start with `weight.py`.
"""
