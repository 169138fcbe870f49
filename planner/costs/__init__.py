"""What a layer, a message and a stage's memory cost, measured or estimated; knows no plans."""
