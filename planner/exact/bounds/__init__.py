"""Lower bounds of all plans: relaxations, columns, completions."""
