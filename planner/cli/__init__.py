"""The command line of `llmpq-algo`: flags in, tables and JSON out."""
