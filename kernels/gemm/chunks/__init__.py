"""Products with codes whose scales are of fewer weights than a k-group."""
