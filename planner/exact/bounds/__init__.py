"""What no plan can beat: relaxations, columns, completions."""
