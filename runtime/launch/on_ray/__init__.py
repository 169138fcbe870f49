"""Stages as Ray actors; first file: ray_launcher.py."""
