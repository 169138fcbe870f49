"""Good plans found before and beside the proof: what a search prunes by."""
