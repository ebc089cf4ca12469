"""One rank of a service. Rank 0 reports to the front before it loads torch."""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from lpr.config import InputError
from lpr.dist.places import whole_number
from lpr.protocol import MeshError
from lpr.serve.messages import Loading, Refused
from lpr.serve.options import parse
from lpr.serve.ranks import LAUNCHER, SOCKET, conceal, concealed, socket_folder
from lpr.serve.ranks.line import FrontGoneError, Line

_RANK_0_SPEAKS = 10.0  # Seconds that other ranks stay after bad input. The launcher ends them once rank 0 has left.


def main(argv: Sequence[str]) -> int:
    """Run this rank and return its exit code: 0, 1 (a rank was lost) or 2 (bad input)."""
    rank = whole_number("RANK", 0)
    line = None
    try:
        args = parse([*argv, *concealed()], quiet=rank != 0)
        if rank == 0:
            line = Line(Path(os.environ[SOCKET]))
            line.send(Loading("loading libraries", 0, 3))
        bridge().run(args, line)
        return 0
    except InputError as failure:
        if line is not None:
            line.send(Refused(str(failure)))
        elif rank:
            time.sleep(_RANK_0_SPEAKS)  # the first rank to leave ends the job, and rank 0 reports first
        return 2
    except (FrontGoneError, MeshError) as failure:
        print(f"lpr.serve: rank {rank}: {failure}", file=sys.stderr)
        return 1
    finally:
        if line is not None:
            line.close()


def bridge() -> ModuleType:
    """Import the bridge, with torch and transformers, which takes seconds."""
    gc.disable()  # collections during the imports would take a sixth of the time and free nothing
    try:
        return importlib.import_module("lpr.serve.ranks.bridge")
    finally:
        gc.freeze()
        gc.enable()


def launched(argv: Sequence[str]) -> int:
    """Run a rank that a launcher has started. Rank 0 also starts the front."""
    # The launcher sends signals to every rank. The front finishes open requests and then stops the ranks.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if whole_number("RANK", 0) != 0:
        leave(main(argv))
    with tempfile.TemporaryDirectory(prefix="lpr-serve-", dir=socket_folder()) as folder:
        path = Path(folder) / "driver.sock"
        os.environ[SOCKET] = str(path)
        front = _start_front(argv, path)
        code = main(argv) if front.poll() is None else front.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = front.wait(timeout=30) or code
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process at once: threads of destroyed groups can abort a process that is tearing down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start_front(argv: Sequence[str], path: Path) -> subprocess.Popen[bytes]:
    """Start the front, wait until it listens, and pass signals on to it."""
    shown, secrets = conceal(argv)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | secrets
    front = subprocess.Popen([sys.executable, "-m", "lpr.serve", *shown], env=environment, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: front.terminate())
    while front.poll() is None and not path.exists():
        time.sleep(0.05)
    return front


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
