"""`python -m lpr.corpus FILES... --output trie/`: feed text into a trie file, for the first request to draft from."""

import sys

from lpr.cli.corpus import main

if __name__ == "__main__":
    sys.exit(main())
