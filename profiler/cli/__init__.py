"""The commands `llmpq-profile` and `llmpq-quantize`: arguments in, files and tables out."""
