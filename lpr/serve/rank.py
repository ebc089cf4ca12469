"""One rank of a service: rank 0 drives, the others work."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lpr.config import DecodeConfig, InputError
from lpr.dist.comm import CommError
from lpr.dist.runtime import World, join, leave
from lpr.engine.engine import Engine
from lpr.engine.exchange import DesyncError
from lpr.engine.trie_file import check_writable, read_trie, trie_path
from lpr.model.loader import bundled_model
from lpr.serve.driver import Driver, FrontGoneError, Line
from lpr.serve.messages import Loading, Refused
from lpr.serve.options import ServeArgs, parse
from lpr.serve.ranks import SOCKET

_STAGES = ("loading libraries", "meeting the other ranks", "loading the model", "ready")
_RANK_0_SPEAKS = 10.0
"""Seconds that the other ranks stay after bad input; the launcher ends them as soon as rank 0 has left."""


def main(argv: Sequence[str]) -> int:
    """Run this rank and return its exit code: 0, 1 (a rank was lost) or 2 (bad input)."""
    world = World(0, 1, 0, 0, False)
    line = None
    try:
        world = World.from_environment()
        args = parse(argv, quiet=world.rank != 0)
        if world.rank == 0:
            line = Line(Path(os.environ[SOCKET]))
        run(args, world, line)
        return 0
    except InputError as failure:
        if line is not None:
            line.send(Refused(str(failure)))
        elif world.launched:
            time.sleep(_RANK_0_SPEAKS)  # the first rank to leave ends the job, and rank 0 has to say why before that
        return 2
    except (CommError, DesyncError) as failure:
        print(f"lpr.serve: rank {world.rank}: {failure}", file=sys.stderr)
        return 1
    except FrontGoneError as failure:
        print(f"lpr.serve: rank {world.rank}: {failure}", file=sys.stderr)
        return 1
    finally:
        if line is not None:
            line.close()


def run(args: ServeArgs, world: World, line: Line | None) -> None:
    """Join the world, load the same engine on every rank, and let rank 0 drive."""
    _tell(line, 1)
    world.mesh_shape(args.tp, args.lp)
    device = world.device(args.engine.device)
    with join(world, device, args.timeout, args.tp) as comm:
        _tell(line, 2)
        model = args.model or bundled_model()
        engine = Engine.from_pretrained(model, _decode(args), replace(args.engine, device=device), comm=comm)
        # What is loaded stays: without this, each full collection walks a million objects, in the middle of some step.
        gc.freeze()
        if line is None:
            engine.work()
            engine.close()
            return
        with _stopped(engine), _kept_trie(args.trie, engine):
            Driver(engine, line, model).run()


def _decode(args: ServeArgs) -> DecodeConfig:
    """The decode settings; with --share-drafts none nothing is learnt from one request for another."""
    return replace(args.decode, trie_capacity=1) if args.share_drafts == "none" else args.decode


@contextlib.contextmanager
def _stopped(engine: Engine) -> Iterator[None]:
    """End the other ranks too, unless one of them is lost."""
    try:
        yield
    except (CommError, DesyncError):
        raise
    except BaseException:
        engine.close()
        raise
    engine.close()


@contextlib.contextmanager
def _kept_trie(path: Path | None, engine: Engine) -> Iterator[None]:
    """Draft from the trie at `path`, and save it at the end."""
    if path is not None:
        if trie_path(path).exists():
            read_trie(path)
            engine.load_trie(path)
        check_writable(path)
    yield
    if path is not None:
        engine.save_trie(path)


def _tell(line: Line | None, stage: int) -> None:
    if line is not None:
        line.send(Loading(_STAGES[stage], stage, len(_STAGES)))


def launched(argv: Sequence[str]) -> int:
    """Run a rank that a launcher has started, which started no front: rank 0 brings it along."""
    # The launcher passes a signal on to every rank; the front finishes what is open and then stops them all.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    world = World.from_environment()
    if world.rank != 0:
        leave(world, main(argv))
    with tempfile.TemporaryDirectory(prefix="lpr-serve-") as folder:
        path = Path(folder) / "driver.sock"
        os.environ[SOCKET] = str(path)
        front = _start_front(argv, path)
        code = main(argv) if front.poll() is None else front.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = front.wait(timeout=30) or code
    leave(world, code)


def _start_front(argv: Sequence[str], path: Path) -> subprocess.Popen[bytes]:
    """Start the front, wait until it listens, and pass signals on to it."""
    ours = ("RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    front = subprocess.Popen([sys.executable, "-m", "lpr.serve", *argv], env=environment, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: front.terminate())
    while front.poll() is None and not path.exists():
        threading.Event().wait(0.05)
    return front


if __name__ == "__main__":
    leave(World.from_environment(), main(sys.argv[1:]))
