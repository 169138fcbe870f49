"""Operands that are numbers times scales: codes in small groups and codes of a table."""
