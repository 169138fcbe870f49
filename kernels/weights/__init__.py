"""Weights of linear layers: one file a form, each knows its bytes and its products.

Start with `weight.py`.
"""
