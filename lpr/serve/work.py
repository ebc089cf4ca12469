"""What a rank does once it knows its flags: join the others, load the model, drive or work."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lpr.dist.channel import CommError
from lpr.dist.runtime import World, join
from lpr.engine.engine import Engine
from lpr.engine.exchange import DesyncError
from lpr.engine.trie_file import check_writable, read_trie, trie_path
from lpr.model.loader import bundled_model
from lpr.serve.driver import Driver
from lpr.serve.line import Line
from lpr.serve.messages import Loading
from lpr.serve.options import ServeArgs


def run(args: ServeArgs, line: Line | None) -> None:
    """Join the world, load the same engine on every rank, and let rank 0 drive."""
    _tell(line, "meeting the other ranks", 1)
    world = World.from_environment()
    world.mesh_shape(args.tp, args.lp)
    device = world.device(args.engine.device)
    with join(world, device, args.timeout, args.tp, args.load_timeout) as comm:
        _tell(line, "loading the model", 2)
        model = args.model or bundled_model()
        engine = Engine.from_pretrained(model, args.decode, replace(args.engine, device=device), comm=comm)
        # What is loaded stays: without this, each full collection walks a million objects, in the middle of some step.
        gc.freeze()
        if line is None:
            engine.work()
            engine.close()
            return
        with _stopped(engine), _kept_trie(args.trie, engine):
            Driver(engine, line, model, learns=args.share_drafts != "none").run()


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


def _tell(line: Line | None, stage: str, number: int) -> None:
    if line is not None:
        line.send(Loading(stage, number, 3))
