"""How layers bear low precision: what enters them on real text, and omega made of it.

`omega.py` is the way in.
"""
