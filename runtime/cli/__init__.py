"""`llmpq-dist` on the command line: flags into values, exit codes, the last line on stderr."""
