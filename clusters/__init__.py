"""Cluster descriptions and the device table, as data files."""
