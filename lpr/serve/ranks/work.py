"""The work of a rank: join the others, load the model, drive or take part."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lpr.dist.comm import is_driver
from lpr.dist.runtime import World, join
from lpr.engine.engine import Engine
from lpr.engine.trie_file import check_writable, read_trie, trie_path
from lpr.model.loader import bundled_model
from lpr.protocol import MeshError
from lpr.serve.messages import Loading
from lpr.serve.options import ServeArgs
from lpr.serve.ranks.bridge import EngineBridge, epoch_of
from lpr.serve.ranks.line import FrontGoneError, Line
from lpr.serve.ranks.processes import ORIGIN, SOCKET

if TYPE_CHECKING:
    from lpr.fleet.sharing import SharedDrafts


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
        # Without this, each full garbage collection walks a million objects that stay, in the middle of some step.
        gc.freeze()
        if line is not None:
            _drive(engine, line, model, args, takes_over=False)
            return
        is_first = is_driver(engine.comm)  # of a new mesh, as all others were lost
        engine.work()
        if engine.is_stopped:
            engine.close()
            return
        # The driver was lost, and this rank has taken its place.
        if SOCKET not in os.environ:
            raise FrontGoneError("the driver was lost, and the front with it")
        line = Line(Path(os.environ[SOCKET]), epoch=epoch_of(engine.comm), loaded=not is_first)
        with contextlib.closing(line):
            _drive(engine, line, model, args, takes_over=not is_first)


def _drive(engine: Engine, line: Line, model: str, args: ServeArgs, takes_over: bool) -> None:
    with _stopped(engine), _kept_trie(args.trie, engine, loads=not takes_over), _shared(args, engine, line) as drafts:
        EngineBridge(engine, line, model, learns=args.share_drafts != "none", drafts=drafts).run()


@contextlib.contextmanager
def _shared(args: ServeArgs, engine: Engine, line: Line) -> Iterator[SharedDrafts | None]:
    """Share drafts with other replicas, if a store is given."""
    if args.fleet.draft_store is None or not engine.sizes.trie_nodes:
        yield None
        return
    from lpr.fleet.sharing import SharedDrafts  # its client is an optional package

    drafts = SharedDrafts(
        args.fleet,
        fingerprint=engine.fingerprint,
        model=args.names[0],
        vocab_size=engine.model.vocab_size,
        origin=bytes.fromhex(os.environ.get(ORIGIN) or secrets.token_hex(8)),
        positions=engine.read_to,
        wake=line.wake,
    )
    with contextlib.closing(drafts):
        yield drafts


@contextlib.contextmanager
def _stopped(engine: Engine) -> Iterator[None]:
    """End the other ranks too, unless one is lost."""
    try:
        yield
    except MeshError:
        raise
    except BaseException:
        engine.close()
        raise
    engine.close()


@contextlib.contextmanager
def _kept_trie(path: Path | None, engine: Engine, loads: bool) -> Iterator[None]:
    """Load the trie at `path`, unless another driver has, and save it at the end."""
    if path is not None:
        if loads and trie_path(path).exists():
            read_trie(path)
            engine.load_trie(path)
        check_writable(path)
    yield
    if path is not None:
        engine.save_trie(path)


def _tell(line: Line | None, stage: str, number: int) -> None:
    if line is not None:
        line.send(Loading(stage, number, 3))
