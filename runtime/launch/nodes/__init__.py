"""Surveys the nodes of a plan before a stage loads there."""
