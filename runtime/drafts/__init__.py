"""Speculation: where drafts come from, how many to make, and which of them are kept."""
