"""Plans that are simpler to make, for comparison and to start from: one file each."""
