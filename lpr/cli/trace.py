"""A trace: the drafted, evaluated and accepted nodes of every step, as one self-contained HTML page.

A `Recorder` set as `engine.hooks` records each step of each request. Trees and shards are replicated, so rank 0's
recorder covers all ranks; times are rank 0's. On a GPU `forward` is the launch time of the forward, and `gather`, which
waits for its results, includes the rest.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lpr.config import InputError
from lpr.core.accept import likely
from lpr.core.tree import Source
from lpr.engine.engine import Engine
from lpr.engine.hooks import StepHooks
from lpr.engine.outcomes import Outcome
from lpr.engine.request import Request
from lpr.engine.text import TextStream, decoder_of
from lpr.files import asset, replace_file
from lpr.native import Conclusion
from lpr.protocol import Chunk

Json = dict[str, Any]
PLACEHOLDER = "{{ trace }}"


@dataclass
class Recorder(StepHooks):
    """Records up to `max_steps` steps, counted per request; further ones are only counted."""

    max_steps: int = 500
    num_steps: int = 0
    num_left_out: int = 0
    steps: dict[Request, list[Json]] = field(default_factory=dict)
    """The steps of each request, in the order in which the requests began."""
    _phases: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def begin_step(self) -> None:
        self._phases, self._last = {}, time.perf_counter()

    def end_phase(self, phase: str) -> None:
        now = time.perf_counter()
        self._phases[phase] = round((now - self._last) * 1e3, 4)
        self._last = now

    def end_step(self, batch: Sequence[Request], outcomes: Sequence[Outcome], chunks: Iterable[Chunk]) -> None:
        for request, outcome, chunk in zip(batch, outcomes, chunks, strict=True):
            if self.num_steps == self.max_steps:
                self.num_left_out += 1
                continue
            self.num_steps += 1
            step = step_record(outcome.concluded, request.running.probabilities)
            step |= {"emitted": chunk.token_ids, "ms": self._phases, "batch": len(batch)}
            self.steps.setdefault(request, []).append(step)


def step_record(concluded: Conclusion, probabilities: Sequence[float]) -> Json:
    """One tree: per node its token, parent, source, owner, next token and path probability; and each rank's part.

    `evaluated[r]` is the number of nodes that rank r evaluated and `ancestors[r]` those of them that another rank owns.
    """
    tree = concluded.tree
    owners = {node: rank for rank, shard in enumerate(concluded.shards) for node in shard.owned}
    return {
        "tokens": tree.tokens,
        "parents": tree.parents,
        "sources": [int(source) for source in tree.sources],
        "owners": [owners.get(node, 0) for node in range(len(tree))],
        "next": likely(concluded.next_tokens),
        "probabilities": [round(each, 5) for each in probabilities[: len(tree)]],
        "path": concluded.path,
        "evaluated": [len(shard.nodes) for shard in concluded.shards],
        "ancestors": [sorted(set(shard.nodes) - set(shard.owned)) for shard in concluded.shards],
    }


def trace_data(recorder: Recorder, engine: Engine) -> Json:
    """Everything the page shows, as JSON-able data."""
    tokens = {token for steps in recorder.steps.values() for step in steps for token in step["tokens"] + step["next"]}
    label = labels(engine)
    return {
        "version": 1,
        "ranks": engine.comm.size,
        "device": str(engine.model.device),
        "sources": [source.name.lower() for source in Source],
        "decode": vars(engine.sizes),
        "num_left_out": recorder.num_left_out,
        "tokens": {token: label(token) for token in sorted(tokens)},
        "requests": [request_record(request, steps, engine) for request, steps in recorder.steps.items()],
    }


def request_record(request: Request, steps: list[Json], engine: Engine) -> Json:
    """A request: its prompt, its steps, and its output as (token, text that became final with it) pairs."""
    emitted = [token for step in steps for token in step["emitted"]]
    params = replace(request.params, max_new_tokens=max(1, len(emitted)))
    stream = TextStream(engine.tokenizer, request.prompt_ids, params, engine.eos_token_ids)
    output = []
    for token in emitted:
        stream.push(token)
        output.append([token, stream.take() if engine.tokenizer is not None else f" {token}"])
    prompt = request.prompt
    if not isinstance(prompt, str):
        prompt = engine.tokenizer.decode(prompt) if engine.tokenizer is not None else " ".join(map(str, prompt))
    return {
        "prompt": prompt,
        "num_prompt_tokens": len(request.prompt_ids),
        "sampling": vars(request.params),
        "finish_reason": request.finish_reason,
        "num_fill_steps": request.stats.num_fill_steps,
        "output": output,
        "steps": steps,
    }


def labels(engine: Engine) -> Callable[[int], str]:
    """A function that shows a single token: as its text, or its name where it has none, or its id."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return str
    decode = decoder_of(tokenizer)

    def label(token: int) -> str:
        name = tokenizer.convert_ids_to_tokens(token)
        text = decode([token])
        if not isinstance(name, str):
            return text or f"<{token}>"
        # SentencePiece decoders strip the space that a first token begins with.
        if name.startswith("▁") and not text.startswith(" "):
            text = " " + text
        return text or name

    return label


def page(data: Json) -> str:
    """The trace as self-contained HTML, with escaped text."""
    template = asset("trace.html").read_text(encoding="utf-8")
    return template.replace(PLACEHOLDER, json.dumps(data).replace("<", "\\u003c"), 1)


def check_trace(path: Path | None) -> None:
    """Refuse a path that a trace cannot be written to, before any work; raises InputError."""
    if path is not None:
        _write(path, b"\n", probe=True)


@contextmanager
def traced(path: Path | None, max_steps: int, engine: Engine) -> Iterator[None]:
    """Record the steps of `engine` and write the page at the end, also of a run that was interrupted or failed."""
    if path is None:
        yield
        return
    recorder = engine.hooks = Recorder(max_steps)
    try:
        yield
    finally:
        engine.hooks = StepHooks()
        _write(path, page(trace_data(recorder, engine)).encode())


def _write(path: Path, data: bytes, probe: bool = False) -> None:
    try:
        replace_file(path, data, probe=probe)
    except OSError as failure:
        raise InputError(f"cannot write a trace to {path}: {failure.strerror or failure}") from failure
