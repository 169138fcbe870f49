"""Which plan is run: given, asked for or made by hand, and what is added before it runs."""
