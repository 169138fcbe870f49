"""`python -m llmpq.runtime` is `llmpq-dist`."""

import sys

from llmpq.runtime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
