"""Layers, captured steps and stages on CUDA devices; seen from outside by cuda.py."""
