"""Products with quantised weights and 16-bit inputs on a GPU, one file per kernel form.

`choice.py` says which form multiplies a shape, `linear_gpu.py` launches it.
"""
