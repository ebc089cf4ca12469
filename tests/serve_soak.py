"""A soak of the service: hostile clients beside well-behaved ones, whose every answer is checked.

    PYTHONPATH=. python tests/serve_soak.py --minutes 10 --lp 2

Hostile are: malformed JSON, huge and endless bodies, bodies that never come, readers that do not read, connections
dropped in the middle, random fields, wrong keys, unknown paths, raw noise. Well-behaved requests are compared with what
an engine of its own says, byte for byte. At the end: nothing may be left open, and the memory of front and ranks may
not have grown by more than --grow-mb since a tenth of the time. The last line is JSON; the exit code is 1 if a
well-formed request was not answered exactly, an answer was a 5xx other than 503, something leaked or a process died.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from serving import serving

import lpr

KEY = "soak-key"
PROMPTS = ["def f(x):\n", "class A:\n    def __init__(self):\n", "import os\n\n\n", "for i in range(10):\n    "]


class Soak:
    """Clients of one service, and what became of their requests."""

    def __init__(self, url: str, wanted: list[tuple[dict[str, Any], str]], seed: int) -> None:
        """`wanted` holds bodies of well-formed requests and their exact texts."""
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.wanted = wanted
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.stop = threading.Event()
        self._seed = seed
        self._lock = threading.Lock()

    def count(self, what: str, problem: str = "") -> None:
        """Note what happened."""
        with self._lock:
            self.counts[what] += 1
            if problem:
                self.problems.append(f"{what}: {problem}"[:500])

    def good(self, seed: int) -> None:
        """Ask well-formed requests until told to stop."""
        dice = random.Random(f"{self._seed} good {seed}")
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=self.url, timeout=120, headers=headers) as client:
            while not self.stop.is_set():
                body, text = dice.choice(self.wanted)
                stream = dice.random() < 0.5
                try:
                    answer = client.post("/v1/completions", json={**body, "stream": stream})
                except httpx.HTTPError as failure:
                    self.count("good", repr(failure))
                    continue
                if answer.status_code == 429:
                    self.count("busy")
                    time.sleep(0.2)
                    continue
                if answer.status_code != 200:
                    self.count("good", f"{answer.status_code} {answer.text}")
                    continue
                found = _streamed(answer.text) if stream else answer.json()["choices"][0]["text"]
                self.count("good", "" if found == text else f"{body}: {found!r} is not {text!r}")

    def bad(self, seed: int) -> None:
        """Do harm until told to stop."""
        dice = random.Random(f"{self._seed} bad {seed}")
        ways = (self.malformed, self.fields, self.keys, self.drop, self.slow, self.noise, self.huge, self.unread)
        while not self.stop.is_set():
            way = dice.choice(ways)
            try:
                way(dice)
            except OSError:
                self.count(f"{way.__name__} refused")
            except httpx.HTTPError as failure:
                self.count(f"{way.__name__} {type(failure).__name__}")

    def post(
        self, content: bytes, key: str = KEY, path: str = "/v1/completions", kind: str = "application/json"
    ) -> int:
        """One request; anything from 500 on but 503 is a problem."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
        answer = httpx.post(self.url + path, content=content, headers=headers, timeout=60)
        wrong = answer.status_code >= 500 and answer.status_code != 503
        self.count(f"status {answer.status_code}", f"{path} {content[:200]!r}: {answer.text[:200]}" if wrong else "")
        return answer.status_code

    def malformed(self, dice: random.Random) -> None:
        """JSON that is none."""
        body = bytearray(json.dumps({"prompt": "a", "max_tokens": 4}).encode())
        for _ in range(dice.randrange(1, 5)):
            body[dice.randrange(len(body))] = dice.randrange(256)
        self.post(bytes(body))

    def fields(self, dice: random.Random) -> None:
        """Fields of any name and type."""
        names = ["prompt", "max_tokens", "temperature", "stop", "n", "logprobs", "suffix", "seed", "stream", "echo",
                 "best_of", "logit_bias", "response_format", "messages", "x\u0000", "input_prefix", "input_suffix",
                 "tokens", "priority", "min_tokens", "top_p"]  # fmt: skip
        values = [None, True, -1, 0, 3, 1e308, 2**70, "", "a", "\ud83d", "\u0000", [], [1], ["a"], {},
                  {"type": "regex"}, {"1": 5}, [[1]], "x" * 5000]  # fmt: skip
        body = {"prompt": "a", "max_tokens": 3}
        body |= {dice.choice(names): dice.choice(values) for _ in range(dice.randrange(1, 4))}
        paths = ("/v1/completions", "/v1/chat/completions", "/infill", "/tokenize", "/detokenize", "/nowhere")
        self.post(json.dumps(body).encode(), path=dice.choice(paths))

    def keys(self, dice: random.Random) -> None:
        """A wrong key must not get in."""
        if self.post(b'{"prompt": "a"}', key=dice.choice(["", "wrong", KEY[:-1], KEY + "x"])) != 401:
            self.count("keys", "a wrong key was let in")

    def connect(self, body: bytes, length: int | None = None) -> socket.socket:
        """A connection on which a request was begun."""
        link = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        length = len(body) if length is None else length
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        link.sendall(head.encode() + body)
        return link

    def drop(self, dice: random.Random) -> None:
        """A long stream whose reader goes."""
        body = {"prompt": dice.choice(PROMPTS), "max_tokens": 3000, "stream": dice.random() < 0.7, "ignore_eos": True}
        with self.connect(json.dumps(body).encode()) as link:
            link.settimeout(dice.random())
            with contextlib.suppress(OSError):
                while link.recv(4096):
                    pass
        self.count("dropped")

    def slow(self, dice: random.Random) -> None:
        """A body that does not come."""
        with self.connect(b'{"prompt": ', length=1000) as link:
            self.stop.wait(dice.random() * 2)
            link.sendall(b'"a"')
        self.count("slow")

    def unread(self, dice: random.Random) -> None:
        """A stream that nobody reads."""
        body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": True, "ignore_eos": True}).encode()
        with self.connect(body):
            self.stop.wait(dice.random() * 3)
        self.count("unread")

    def noise(self, dice: random.Random) -> None:
        """Bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as link:
            link.sendall(dice.randbytes(dice.randrange(1, 2000)))
        self.count("noise")

    def huge(self, dice: random.Random) -> None:
        """A body beyond what is allowed."""
        if self.post(b'{"prompt": "' + b"a" * dice.choice((1 << 20, 1 << 22)) + b'"}') not in (400, 413):
            self.count("huge", "it was accepted")


def _streamed(text: str) -> str:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


def memory(pid: int) -> dict[int, float]:
    """Megabytes that a process and its descendants hold."""
    parents: dict[int, int] = {}
    held: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(words[1])
                held[int(folder.name)] = int(words[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return {each: held[each] for each in family if each in held}


def main() -> int:
    """Run the soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--lp", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grow-mb", type=float, default=150.0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    bodies = [
        {"prompt": dice.choice(PROMPTS), "max_tokens": dice.choice((4, 16, 48)), "seed": seed,
         "temperature": dice.choice((0.0, 0.8))}
        for seed in range(24)
    ]  # fmt: skip
    engine = lpr.Engine.from_pretrained(lpr.bundled_model(), dtype="float32")
    params = [
        lpr.SamplingParams(max_new_tokens=body["max_tokens"], seed=body["seed"], temperature=body["temperature"])
        for body in bodies
    ]
    texts = [done.text for done in engine.generate([body["prompt"] for body in bodies], params)]
    flags = ("--api-key", KEY, "--max-body", str(1 << 20), "--max-queue", "32", "--no-access-log",
             "--request-timeout", "120")  # fmt: skip
    with serving(None, *flags, lp=options.lp) as service:
        soak = Soak(service.url, list(zip(bodies, texts, strict=True)), options.seed)
        threads = [threading.Thread(target=soak.good, args=(index,)) for index in range(3)]
        threads += [threading.Thread(target=soak.bad, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(6 * options.minutes)
        before = memory(service.process.pid)
        time.sleep(54 * options.minutes)
        after = memory(service.process.pid)
        soak.stop.set()
        for thread in threads:
            thread.join(150)
        state: dict[str, Any] = {}
        for _ in range(200):
            state = service.client.get("/readyz").json()
            if state.get("running") == state.get("waiting") == 0:
                break
            time.sleep(0.1)
        growth = {pid: round(after[pid] - before[pid], 1) for pid in before if pid in after}
        died = service.process.poll() is not None or set(before) - set(after)
        code = service.stop()
        log = service.log()
    problems = soak.problems
    problems += [f"left open: {state}"] if state.get("running") or state.get("waiting") else []
    problems += [f"memory grew by {growth} MB"] if max(growth.values(), default=0.0) > options.grow_mb else []
    problems += ["a process died"] if died else []
    problems += [f"it ended with {code}"] if code else []
    problems += [f"traceback: {log[-2000:]}"] if "Traceback" in log else []
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    result = {"benchmark": "serve_soak", "minutes": options.minutes, "lp": options.lp, "counts": dict(soak.counts),
              "memory_growth_mb": sorted(growth.values()), "num_problems": len(problems)}  # fmt: skip
    print(json.dumps(result))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
