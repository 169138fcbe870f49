"""Operands that are values times scales: codes in small groups and codes of a table."""
