"""Products of rounded inputs with rounded weights (W4A4, W8A8), and the rounding of the inputs.

`weights/atom_weight.py` multiplies by these; `hopper.py` and `portable.py` are its two GPU paths.
"""
