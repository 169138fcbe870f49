"""What the nodes of a plan are and have, asked before a stage loads there."""
