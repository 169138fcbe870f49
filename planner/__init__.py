"""Nouns in, Plan out: the room that decides (never imports torch)."""
