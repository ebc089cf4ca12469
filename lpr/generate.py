"""`python -m lpr.generate`, alone or under torchrun: complete prompts from a file, or show what lpr does."""

from lpr.cli.generate import main
from lpr.dist.runtime import leave

if __name__ == "__main__":
    leave(main())
