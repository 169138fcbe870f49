"""The CPU's own code: C++ compiled once a machine, for the widest instructions that it has.

Knows arrays and values, not weights or models: `library.py` builds and opens it.
"""
