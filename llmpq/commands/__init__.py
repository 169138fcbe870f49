"""Shared by all commands: flags, children, output files, addresses."""
