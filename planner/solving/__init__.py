"""Runs solvers: each method, in a child process, within one limit; first file: methods.py."""
