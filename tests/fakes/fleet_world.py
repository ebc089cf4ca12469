"""Replicas of a fleet in one process: a driver each, with a store between them and a script in place of the front."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.fleet.options import FleetOptions
from lpr.fleet.sharing import SharedDrafts
from lpr.fleet.store import stream_of
from lpr.protocol import Chunk, Stop, Submit
from lpr.serve.messages import Load, Resume, Stepped
from lpr.serve.ranks.bridge import EngineBridge
from tests.fakes.stores import WAIT

DECODE = DecodeConfig(window_size=0, trie_nodes=16, num_candidates=0, max_batch_size=2)
PROMPTS = ("def fibonacci(n):\n    ", "class Stack:\n    def __init__(self):\n", "import os\n\ndef read_lines(path):\n")
FINGERPRINT, MODEL = "tokenizer 0", "bundled"


class Line:
    """The socket's two ends in memory: what the front sends is a script, what the driver says is kept."""

    def __init__(self, script: Callable[[], list[Any]]) -> None:
        self.load = Load()
        self.said: list[Any] = []
        self._script = script

    def moved(self, load: Load) -> None:
        self.load = load

    def send(self, message: Any) -> None:
        self.said.append(message)

    def flush(self) -> None:
        pass

    def take(self, wait: float) -> list[Any]:
        time.sleep(0.002 if wait else 0)
        return self._script()

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for message in self.said if isinstance(message, Stepped) for chunk in message.chunks]


class Member:
    """A replica of one rank, as its driver sees it."""

    def __init__(self, loaded: tuple[Any, Any], url: str, **options: Any) -> None:
        """A cold engine of a model and its tokenizer; `options` are FleetOptions, `facts` what SharedDrafts is told."""
        facts = {"fingerprint": FINGERPRINT, "model": MODEL, "vocab_size": loaded[0].config.vocab_size, "positions": {},
                 "origin": os.urandom(8), **options.pop("facts", {})}  # fmt: skip
        self.engine = options.pop("engine", None) or Engine.from_model(*loaded, decode=DECODE)
        self.drafts = SharedDrafts(FleetOptions(draft_store=url, **options), **facts)
        self.longest = 0.0
        """Seconds of the longest turn of the step loop."""
        self._ids = 0

    @property
    def counts(self) -> Any:
        return self.drafts.counts

    def ask(self, prompt: list[int], tenant: str = "", seed: int = 0, **params: Any) -> tuple[list[int], int]:
        """Complete a prompt; returns ids and decode steps. What the store brings meanwhile is learnt."""
        self._ids += 1
        params = SamplingParams(**{"max_new_tokens": 40, "seed": seed, **params})
        submit = Submit(self._ids, prompt, params, len(prompt), tenant=tenant)
        line = self.turn(lambda line: any(each.finish_reason for each in line.chunks), Resume([]), submit)
        assert all(chunk.failure is None for chunk in line.chunks), line.chunks
        usage = line.chunks[-1].usage
        assert usage is not None
        return [token for chunk in line.chunks for token in chunk.token_ids], usage.num_steps

    def turn(self, is_over: Callable[[Line], object], *messages: Any) -> Line:
        """Run the step loop until `is_over`."""
        left, end, began = list(messages), time.monotonic() + WAIT, None

        def script() -> list[Any]:
            nonlocal began
            now = time.monotonic()
            self.longest, began = max(self.longest, now - (began or now)), now
            assert now < end, f"nothing came of it: {self.counts}"
            taken, left[:] = list(left), []
            if not taken and is_over(line):
                return [Stop()]
            began = time.monotonic()
            return taken

        line = Line(script)
        EngineBridge(self.engine, line, MODEL, drafts=self.drafts).run()
        return line

    def learn(self, count: int) -> None:
        """Run the idle step loop until so many outputs of others were learnt since the beginning."""
        self.turn(lambda line: self.counts.learnt >= count)
        assert self.counts.learnt == count

    def idle(self, turns: int = 3) -> None:
        """Let the idle step loop go round so often."""
        left = iter(range(turns))
        self.turn(lambda line: next(left, None) is None)

    def history(self, tenant: str = "") -> list[int]:
        """What drafts come from."""
        return self.engine.learned(tenant)[0].tolist()


SPARE: list[Engine] = []
"""Engines of the bundled model that know no drafts: a check at the start is most of what a replica costs."""


@contextlib.contextmanager
def fleet(
    loaded: tuple[Any, Any], url: str, count: int = 2, follow: tuple[str, ...] = ("",), **options: Any
) -> Iterator[Any]:
    """So many replicas that follow the streams of some tenants, whether asked for or not."""
    members = [Member(loaded, url, engine=SPARE.pop() if SPARE else None, **options) for _ in range(count)]
    try:
        for member in members:
            for tenant in follow:
                member.drafts.follow(tenant)
        yield members
    finally:
        for member in members:
            member.drafts.close()
            member.engine.configure(DECODE)  # which forgets all drafts
            SPARE.append(member.engine)


def key_of(tenant: str = "") -> str:
    """The stream of a tenant of these replicas."""
    return stream_of(FINGERPRINT, MODEL, tenant)
