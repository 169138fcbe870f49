"""Caches in blocks of a pool, rows of any lengths; first file: paged_attend.py."""
