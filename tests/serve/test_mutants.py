"""Seeded faults of the service: each breaks one thing that clients rely on, and a check of its answers must notice.

Front, driver and engine run in this process, joined by their own socket, so that a fault can be put into any of them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace

import msgspec
import pytest

import lpr
import lpr.engine.text as engine_text
from lpr.protocol import Submit
from lpr.sched import page_pool
from lpr.serve import jobs, service
from lpr.serve.api import answers, completions
from lpr.serve.api.context import Context
from lpr.serve.api.middleware import Keys
from lpr.serve.generation import Generation
from lpr.serve.ranks.bridge import EngineBridge
from lpr.serve.ranks.line import Line
from lpr.serve.text import served as served_module
from tests.fakes.fake_driver import served, wait_for

TEXT = 'class Account:\n    """An account."""\n\n    def __init__(self, owner, balance):\n        self.owner = owner\n'
BODIES = [
    {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "stop": ["balance\n        self.balance = balance\n"]},
    {"prompt": TEXT + "\n    def add", "max_tokens": 16, "temperature": 0.9, "seed": 3, "n": 2},
    {"prompt": TEXT + "\n    def put", "max_tokens": 16, "temperature": 0.9, "seed": 4},
    {"prompt": TEXT[:70] + "name", "max_tokens": 12, "temperature": 0},
]


@pytest.fixture(scope="module")
def engine():
    decode = lpr.DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=3)
    return lpr.Engine.from_pretrained(lpr.bundled_model(), decode, dtype="float32")


@pytest.fixture(scope="module")
def wanted(engine):
    return texts_of(engine)


def texts_of(engine):
    found = []
    for body in BODIES:
        names = {"max_tokens": "max_new_tokens"}
        values = {names.get(name, name): value for name, value in body.items() if name not in ("prompt", "n")}
        params = lpr.SamplingParams(**{**values, "stop": tuple(values.get("stop", ()))})
        count = body.get("n", 1)
        asked = [replace(params, seed=params.seed + number) for number in range(count)]
        found.append([done.text for done in engine.generate([body["prompt"]] * count, asked)])
    return found


@contextlib.contextmanager
def serving(engine):
    """The engine behind a front, both in threads of this process."""
    with served(connect=False, api_key="one,two", served_model_name=("bundled",)) as running:

        def drive():
            line = Line(running.front._attached)
            with contextlib.closing(line):
                EngineBridge(engine, line, "bundled").run()

        for _ in range(1000):
            if running.front._attached.exists():
                break
            time.sleep(0.005)
        thread = threading.Thread(target=drive)
        thread.start()
        try:
            wait_for(lambda: running.client.get("/readyz").status_code == 200)
            yield running
        finally:
            running.call(running.front.stop)
            running.call(running.front.stop)
            thread.join(30)
            assert not thread.is_alive()


def ask(running, body, key="one"):
    answer = running.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    answer.raise_for_status()
    return answer


def check(engine, wanted, names=()):
    """What clients rely on, of one service; or some of it, by the names of the checks."""
    checks = {
        "check_texts": lambda running: check_texts(running, wanted),
        "check_characters": check_characters,
        "check_tenants": check_tenants,
        "check_keys": check_keys,
        "check_abort": lambda running: check_abort(running, engine),
    }
    engine.configure(engine.decode)  # forgets what drafts were learnt, and what was cached
    with serving(engine) as running:
        for name in names or checks:
            checks[name](running)


def check_texts(running, wanted):
    assert "stop" in [ask(running, body).json()["choices"][0]["finish_reason"] for body in BODIES]
    for _ in range(2):  # the second time, all prompts are cached
        for body, texts in zip(BODIES, wanted, strict=True):
            choices = ask(running, body).json()["choices"]
            assert [choice["text"] for choice in choices] == texts
            streamed = [""] * len(texts)
            for line in ask(running, {**body, "stream": True}).text.splitlines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        streamed[choice["index"]] += choice["text"]
            assert streamed == texts


def check_characters(running):
    """A text of characters of several tokens each, which a stream may show as a whole only."""
    form = {"type": "regex", "regex": "é漢🙂é漢🙂"}
    body = {"prompt": "# ", "max_tokens": 60, "temperature": 0, "response_format": form, "stream": True}
    lines = [line for line in ask(running, body).text.splitlines() if line.startswith("data: {")]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert len(lines) > 6 and "".join(texts) == "é漢🙂é漢🙂" and "\ufffd" not in "".join(texts)


def check_tenants(running):
    body = {"prompt": "def tenant(a, b, c):\n    return", "max_tokens": 4, "temperature": 0}
    usages = [ask(running, body, key).json()["usage"] for key in ("one", "two", "one")]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[1] < 3 < cached[2], cached


def check_keys(running):
    for key in ("", "o", "onee", "three", "TWO"):
        headers = {"X-Api-Key": key}
        assert running.client.post("/v1/completions", json=BODIES[0], headers=headers).status_code == 401, key


def check_abort(running, engine):
    body = {"prompt": TEXT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer one"}
    with running.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
    wait_for(lambda: engine.is_idle, 2.0)


def test_without_a_fault(engine, wanted):
    check(engine, wanted)


# The faults.


def cached_prefix_is_one_too_long(patch):
    equal = page_pool.num_equal
    patch.setattr(page_pool, "num_equal", lambda first, second: min(equal(first, second) + 1, len(second)))


def seed_is_ignored(patch):
    give = jobs.Jobs.give

    def without_seed(self):
        if (job := give(self)) is not None:
            job.submit = msgspec.structs.replace(job.submit, params=replace(job.submit.params, seed=0))
        return job

    patch.setattr(jobs.Jobs, "give", without_seed)


def texts_of_one_prompt_have_one_seed(patch):
    def same(wanted, count):
        return [wanted] * count

    patch.setattr(completions, "spread", same)


def abort_is_not_sent(patch):
    patch.setattr(service, "Abort", lambda id: Submit(-id, [], lpr.SamplingParams(), 0))


def stop_string_is_kept(patch):
    find = engine_text.StopSearch.find

    def later(self, final, pending):
        found = find(self, final, pending)
        return None if found is None else (found[0] + len(found[1]), found[1])

    patch.setattr(engine_text.StopSearch, "find", later)


def a_character_is_split(patch):
    take = Generation._take

    def split(self, chunk):
        tokens = served_module.Served(self._service.mesh.facts, ["a"]).tokens
        each = take(self, chunk)
        shown = "".join(tokens.text_of(token) for token in chunk.token_ids)
        return each and replace(each, text=each.text if shown.isascii() else shown)

    patch.setattr(Generation, "_take", split)


def tenants_are_one(patch):
    patch.setattr(Context, "tenant", lambda self, request: "")


def a_key_needs_to_begin_right_only(patch):
    patch.setattr(Keys, "name_of", lambda self, key: next((k for k in ("one", "two") if k.startswith(key)), None))


def the_last_step_of_a_stream_is_lost(patch):
    event = answers.event

    def lossy(data):
        choices = data.get("choices") if isinstance(data, dict) else None
        return b"" if choices and choices[0].get("finish_reason") else event(data)

    patch.setattr(answers, "event", lossy)


FOUND_BY = {
    cached_prefix_is_one_too_long: "check_texts",
    seed_is_ignored: "check_texts",
    texts_of_one_prompt_have_one_seed: "check_texts",
    stop_string_is_kept: "check_texts",
    the_last_step_of_a_stream_is_lost: "check_texts",
    a_character_is_split: "check_characters",
    tenants_are_one: "check_tenants",
    a_key_needs_to_begin_right_only: "check_keys",
    abort_is_not_sent: "check_abort",
}


@pytest.mark.parametrize("fault", FOUND_BY, ids=lambda fault: fault.__name__)
@pytest.mark.slow(first=5)
def test_a_fault_is_found(engine, wanted, monkeypatch, fault):
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(AssertionError) as found:
            check(engine, wanted, [FOUND_BY[fault]])
    assert FOUND_BY[fault] in [entry.name for entry in found.traceback]
    wait_for(lambda: drained(engine))


def drained(engine):
    """Abort what a fault has left behind."""
    for request in list(engine.requests.values()):
        engine.abort(request)
    engine.step()
    return engine.is_idle
