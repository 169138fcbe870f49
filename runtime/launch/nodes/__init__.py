"""Which of the nodes there are is which of a plan's, and what to say of them."""
