"""Quantised copies of a model: the recipe of each precision, GPTQ, Atom, layer by layer to disk.

`whole_model.py` is the way in, `recipes.py` says what each scheme does to a layer.
"""
