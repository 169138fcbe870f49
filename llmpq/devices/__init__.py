"""Kinds of devices, and the devices of this machine."""
