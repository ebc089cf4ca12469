"""`python -m lpr.serve`, alone or under torchrun: the front process, or one of the ranks."""

import asyncio
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import closing, redirect_stderr
from pathlib import Path
from typing import TextIO, cast

from lpr.config import InputError
from lpr.dist.places import is_launched
from lpr.serve.front import Front
from lpr.serve.options import parse
from lpr.serve.ranks import SOCKET, concealed
from lpr.serve.stderr import Unblocking


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 (the ranks were lost) or 2 (bad input)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if is_launched():
            # Imported by name: a rank's modules import torch, which the front must not.
            return int(importlib.import_module("lpr.serve.ranks.rank").launched(argv))
        argv += concealed()
        args = parse(argv)
        attached = Path(os.environ[SOCKET]) if SOCKET in os.environ else None
        with closing(Unblocking(sys.stderr)) as written, redirect_stderr(cast(TextIO, written)):
            # gc.freeze: a garbage collection over all imported objects would block the event loop for 50 ms.
            return asyncio.run(Front(args, argv, attached, loaded=gc.freeze).run())
    except InputError as failure:
        print(f"lpr.serve: error: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit:  # after --help
        return 0


if __name__ == "__main__":
    sys.exit(main())
