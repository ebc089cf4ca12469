"""What is done while the device works changes nothing but the moment: chunks, texts and counts."""

from __future__ import annotations

from typing import Any

import pytest

from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.protocol import Stop, Submit
from lpr.serve.messages import Stepped
from lpr.serve.ranks.bridge import EngineBridge

PROMPTS = ["def add(a, b):\n    return a", "import os\n\n\ndef main"]


class ScriptedLine:
    """A front that submits two requests, aborts nothing, and stops once both have ended."""

    def __init__(self, engine: Engine) -> None:
        self.load: Any = None
        self.sent: list[Any] = []
        self.waits: list[float] = []
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        prompts = map(engine.encode, PROMPTS)
        self._script = [Submit(id, prompt, params, len(prompt)) for id, prompt in enumerate(prompts)]

    def moved(self, load: Any) -> None:
        self.load = load

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def flush(self) -> None:
        pass

    def take(self, wait: float) -> list[Any]:
        self.waits.append(wait)
        assert len(self.waits) < 500, "the requests do not end"
        if self._script:
            return [self._script.pop(0)]
        ended = [chunk for step in self.steps for chunk in step.chunks if chunk.finish_reason]
        return [Stop()] if len(ended) == len(PROMPTS) else []

    @property
    def steps(self) -> list[Stepped]:
        return [message for message in self.sent if isinstance(message, Stepped)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    decode = DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=2, max_length=256)
    return Engine.from_pretrained(str(bundled_model()), decode=decode)


def serve(engine: Engine, overlaps: bool) -> tuple[ScriptedLine, list[int]]:
    """Serve the script; also how many steps had been sent whenever a step's forward began."""
    engine.configure(engine.decode)
    line = ScriptedLine(engine)
    bridge = EngineBridge(engine, line, "bundled")  # type: ignore[arg-type]
    bridge.overlaps = overlaps
    sent, evaluate = [], engine.model.evaluate
    engine.model.evaluate = lambda *args: (sent.append(len(line.steps)), evaluate(*args))[1]  # type: ignore[method-assign,func-returns-value]
    try:
        bridge.run()
    finally:
        engine.model.evaluate = evaluate  # type: ignore[method-assign]
    return line, sent


def whole(line: ScriptedLine) -> list[Any]:
    found = []
    for id in range(len(PROMPTS)):
        mine = [chunk for step in line.steps for chunk in step.chunks if chunk.id == id]
        ids = [token for chunk in mine for token in chunk.token_ids]
        found.append([ids, "".join(chunk.text for chunk in mine), mine[-1].finish_reason, mine[-1].usage])
    return found


def test_chunks_that_are_sent_while_the_device_works_are_the_same(engine: Engine) -> None:
    at_once, sent_at_once = serve(engine, overlaps=False)
    later, sent_later = serve(engine, overlaps=True)
    assert whole(at_once) == whole(later) and len(whole(later)[0][0]) == 24
    assert sent_at_once == list(range(len(sent_at_once))), "each step's chunks leave before the next step"
    assert sent_later == [max(0, index - 1) for index in range(len(sent_later))], "or while it is evaluated"


def test_what_a_request_tells_does_not_wait_for_the_device(engine: Engine) -> None:
    engine.configure(engine.decode)
    request = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=12, ignore_eos=True))
    num_tokens = 0
    while request.finish_reason is None:
        engine.step()
        assert request.stats.num_tokens == request.num_output > num_tokens
        assert request.stats.drafted.total() == request.stats.num_nodes
        emitted = [token for chunk in request.take() for token in chunk.token_ids]
        assert emitted == request.token_ids[num_tokens:]
        num_tokens = request.num_output
    assert request.completion().stats.num_tokens == 12
