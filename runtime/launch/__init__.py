"""Starts the stages of a plan (threads, processes, Ray), watches them, says what broke."""
