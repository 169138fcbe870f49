"""Text in and out: tokenizer, stop strings, rows of batch files."""
