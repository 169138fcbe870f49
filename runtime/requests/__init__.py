"""A request on its way: its sampling parameters, rules of its tokens, and what comes back."""
