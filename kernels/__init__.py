"""Quantised bytes and arithmetic: weight formats, low-bit matmuls, low-bit KV attention.

Imports nothing heavy; import the module you need, for example `llmpq.kernels.weights.weight`.
"""
