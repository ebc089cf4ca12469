"""The attacked service, and well-behaved clients next to hostile ones, whose texts are checked."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes.services import Server, running
from lpr import Engine, SamplingParams

KEYS = ("attacker-1f0b", "neighbour-7c2e")  # key of the hostile clients, and of their well-behaved neighbours
OPEN_FILES = 1024  # `ulimit -n`, which many systems have as default
TEMPLATE = (
    "{% for _ in range(pad | default(0)) %} {% endfor %}{{ bos_token }}"
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}def "
)
"""A chat template whose length a client can choose."""
KEY = KEYS[1]  # key of the well-behaved clients
TEXT = 'class Account:\n    """An account."""\n\n    def __init__(self, owner):\n        self.owner = owner\n'
PROMPTS = ("def f(x):\n", "import os\n\n\n", "for i in range(10):\n    ", TEXT, TEXT[:40], TEXT[:60], TEXT[:61])
FEWEST = 5  # streams whose median is a figure
SLOTS = 4


@dataclass(frozen=True)
class Case:
    """A well-formed request and the expected texts."""

    body: dict[str, Any]
    texts: tuple[str, ...]


class Tally:
    """Outcomes of the requests; clients are threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.first_tokens: list[tuple[float, float]] = []
        """Of each stream, when it was asked for (time.monotonic) and the seconds to its first token."""
        self._lock = threading.Lock()

    def count(self, what: str, problem: str = "") -> None:
        """Count an event, and record its problem if there is one."""
        with self._lock:
            self.counts[what] += 1
            if problem:
                self.counts[f"wrong: {what}"] += 1
                self.problems.append(f"{what}: {problem}"[:500])


def make_cases(model: str, seed: int) -> list[Case]:
    """Requests of many kinds, most with prompts that begin alike, and an engine's texts for each."""
    dice = random.Random(seed)
    bodies: list[dict[str, Any]] = []
    for index in range(32):
        body: dict[str, Any] = {"prompt": dice.choice(PROMPTS), "max_tokens": dice.choice((4, 16, 48)), "seed": index,
                "temperature": dice.choice((0.0, 0.0, 0.8, 1.2))}  # fmt: skip
        if dice.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": 20}
        if dice.random() < 0.3:
            body["stop"] = ["\n\n", "self."]
        if dice.random() < 0.2:
            body["repetition_penalty"] = 1.2
        if dice.random() < 0.2:
            body["n"] = 2
        bodies.append(body)
    asked = [(body, number) for body in bodies for number in range(body.get("n", 1))]
    engine = Engine.from_pretrained(model, dtype="float32")
    done = engine.generate([body["prompt"] for body, _ in asked], [_params(*each) for each in asked])
    engine.close()
    texts = iter(done)
    return [Case(body, tuple(next(texts).text for _ in range(body.get("n", 1)))) for body in bodies]


def _params(body: dict[str, Any], number: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=body["max_tokens"],
        temperature=body["temperature"],
        seed=body["seed"] + number,
        top_p=body.get("top_p", 1.0),
        top_k=body.get("top_k", 0),
        stop=tuple(body.get("stop", ())),
        repetition_penalty=body.get("repetition_penalty", 1.0),
    )


def ask(
    url: str, cases: Sequence[Case], seed: str, pause: float, tally: Tally, stop: threading.Event
) -> None:  # fmt: skip
    """Send well-formed requests until `stop`, with `pause` seconds between two of them on average."""
    dice = random.Random(seed)
    with httpx.Client(base_url=url, timeout=300, headers={"Authorization": f"Bearer {KEY}"}) as client:
        while not stop.is_set():
            case, stream = dice.choice(cases), dice.random() < 0.5
            began = time.monotonic()
            while not (is_done := ask_once(client, case, stream, began, tally)) and not stop.wait(0.5):
                pass  # the time to the first token counts from the first attempt
            if pause and is_done:
                stop.wait(dice.expovariate(1 / pause))


def ask_once(client: httpx.Client, case: Case, stream: bool, began: float, tally: Tally) -> bool:
    """Send a request and check its answer; False if the service was busy."""
    try:
        with client.stream("POST", "/v1/completions", json={**case.body, "stream": stream}) as answer:
            lines, first = [], None
            for line in answer.iter_lines():
                first = time.monotonic() if first is None and line.startswith("data: {") else first
                lines.append(line)
    except httpx.HTTPError as failure:
        tally.count("answer", repr(failure))
        return True
    if answer.status_code in (429, 503):
        tally.count(f"busy {answer.status_code}")
        return False
    if answer.status_code != 200:
        tally.count("answer", f"{answer.status_code} {' '.join(lines)}")
        return True
    found = texts_of(lines, stream, len(case.texts))
    tally.count("answer", "" if found == case.texts else f"{case.body}: {found!r} is not {case.texts!r}")
    if first is not None:
        tally.first_tokens.append((began, first - began))
    return True


def texts_of(lines: Sequence[str], stream: bool, count: int) -> tuple[str, ...]:
    """The texts of an answer's choices."""
    if not stream:
        return tuple(choice["text"] for choice in json.loads("\n".join(lines))["choices"])
    texts = [""] * count
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                texts[choice["index"]] += choice["text"]
    return tuple(texts)


def first_tokens(found: Sequence[tuple[float, float]], times: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Median seconds to a stream's first token without hostile clients and under attack, and their ratio."""
    result: dict[str, Any] = {}
    for name, (since, until) in times.items():
        known = [seconds for began, seconds in found if since <= began and began + seconds < until]
        median = round(statistics.median(known), 4) if len(known) >= FEWEST else None
        result |= {f"{name}_streams": len(known), f"{name}_s": median}
    if result["alone_s"] and result["attacked_s"]:
        result["ratio"] = round(result["attacked_s"] / result["alone_s"], 2)
    return result


@contextlib.contextmanager
def attacked(folder: Path, flags: Sequence[str], threads: int = 0) -> Iterator[Server]:
    """A service whose files are in `folder`, with two keys and further `flags`."""
    keys, template = folder / "keys", folder / "template.jinja"
    keys.write_text(f"attacker {KEYS[0]}\nneighbour {KEYS[1]}\n", encoding="utf-8")
    template.write_text(TEMPLATE, encoding="utf-8")
    own = ["--dtype", "float32", "--chat-template", str(template), "--no-access-log", "--protect-metrics"]
    own += ["--api-key-file", str(keys)]
    with running([*own, *flags], threads, folder / "log", open_files=OPEN_FILES) as service:
        yield service


def at_rest(url: str, seconds: float = 60.0) -> bool:
    """True once the service is ready and has no requests; False if that takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url + "/readyz", timeout=10)
            state = answer.json() if answer.status_code == 200 else {"running": 1}
            if not state.get("running") and not state.get("waiting"):
                return True
        time.sleep(0.1)
    return False
