"""Products of rounded inputs with rounded weights (W4A4, W8A8), and the rounding of the inputs.

`product.py` is the way in; `hopper.py` and `portable.py` are its two GPU paths.
"""
