"""The service that is attacked: two keys, a chat template, and few files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from benchmarks.processes.services import Server, running

KEYS = ("attacker-1f0b", "neighbour-7c2e")
"""Key of the hostile clients, and of their well-behaved neighbours."""
OPEN_FILES = 1024
"""`ulimit -n`, which many systems have as default."""
TEMPLATE = (
    "{% for _ in range(pad | default(0)) %} {% endfor %}{{ bos_token }}"
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}def "
)
"""A chat template whose length a client can choose."""


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
