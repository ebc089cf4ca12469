"""`python -m lpr.plan`: which lp x tp mesh a model fits on, what it moves, and which to take. No weights, no GPU."""

import sys

from lpr.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
