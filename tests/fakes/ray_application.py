"""Start launch/serve_ray.py on this machine, ask it, kill a mesh, ask on; prints what happened as one JSON line.

A program of its own, as Ray keeps threads, processes and warnings that a test session must not inherit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve

LAUNCH = str(Path(__file__).parents[2] / "launch")
sys.path.insert(0, LAUNCH)
from serve_ray import Settings, app, free_port  # noqa: E402

PROMPT = "# Numbers, and what is known of them.\n" * 8 + "def fibonacci(n):\n    "
"""Long enough to have a key to be routed by (lpr.fleet.affinity)."""
SECONDS = 240.0
FLAGS = "--dtype float32 --max-batch-size 2 --no-access-log --window-size 0 --trie-nodes 8"
"""Trees of a fixed size, so that nothing is measured at the start."""


def meshes() -> dict[int, int]:
    """Process ids of the meshes' replicas that this program's Ray has started, each with that of its service."""
    found = {}
    for process in psutil.process_iter():
        try:
            parent = process.parent()
            if "lpr.serve" in process.cmdline() and parent is not None and "Mesh" in " ".join(parent.cmdline()):
                found[parent.pid] = process.pid
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.2)


class Client:
    """Asks an application."""

    def __init__(self, port: int) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS)

    def ask(self, prompt: str = PROMPT, most: int = 24, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    def text(self) -> str:
        return self.ask().json()["choices"][0]["text"]

    def streamed(self, most: int = 24, **fields: Any) -> str:
        lines = self.ask(most=most, stream=True, **fields).text.splitlines()
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {"))


@contextlib.contextmanager
def keep_asking(client: Client, pool: ThreadPoolExecutor, number: int) -> Iterator[list[int]]:
    """Keep `number` requests open, however fast they are answered: Ray averages its load over half a minute. The
    statuses of all that were asked are complete at the end."""
    statuses: list[int] = []
    ended = threading.Event()

    def ask(number: int) -> None:
        while not ended.is_set():
            statuses.append(client.ask(f"# {number}\n", 600, min_tokens=600).status_code)

    asking = [pool.submit(ask, each) for each in range(number)]
    try:
        yield statuses
    finally:
        ended.set()
    for each in asking:
        each.result()


def scaled(client: Client) -> Iterator[tuple[str, Any]]:
    """One mesh, a further one because requests wait, one killed."""
    yield "text", client.text()
    yield "streamed", client.streamed()
    yield "refused", client.ask(no_such_field=1).status_code
    yield "at_the_start", len(meshes())
    with ThreadPoolExecutor(12) as pool, keep_asking(client, pool, 12) as asked:
        wait_for(lambda: len(meshes()) == 2, "a further mesh")
    yield "under_load", sorted(set(asked))

    def used() -> set[str]:
        return {client.ask(f"# file {number}\n", 1).headers["x-lpr-mesh"] for number in range(16)}

    wait_for(lambda: len(used()) == 2, "an answer of the further mesh")
    # Not before: where a prompt belongs may change, once, when a mesh joins.
    yield "by_prefix", sorted({client.ask().headers["x-lpr-mesh"] for _ in range(4)})
    before = meshes()
    victim = next(iter(before))
    long = [{"prompt": f"# stream {number}\n{PROMPT}", "most": 300, "min_tokens": 300} for number in range(6)]
    undisturbed = [client.streamed(**each) for each in long]
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(client.streamed, **each) for each in long]
        asked = [pool.submit(client.ask, f"# {number}\n{PROMPT}") for number in range(16)]
        time.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        yield "through_the_kill", [each.result().status_code for each in asked]
        yield "streams_that_went_on", [each.result() == one for each, one in zip(streams, undisturbed, strict=True)]
    yield "afterwards", client.text()
    wait_for(lambda: not psutil.pid_exists(before[victim]), "the end of the lost mesh's service")
    wait_for(lambda: len(meshes()) == 2, "a new mesh")


def main() -> None:
    # What `serve run --working-dir .` does: the workers import the application by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join([LAUNCH, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    # Without the last, Ray's workers leave the processor to everything else on the machine, the other tests too.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver="-v" in sys.argv, object_store_memory=80 << 20)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    client = Client(port)
    one = Settings(gpus_per_machine=0, max_meshes=2, target_requests=2, upscale_seconds=0.0, flags=FLAGS)
    serve.run(app(one), name="lpr")
    result = dict(scaled(client))
    services = meshes().values()
    serve.delete("lpr")
    wait_for(lambda: not any(map(psutil.pid_exists, services)), "the end of the services")
    # A mesh of two machines, both of which are this one.
    serve.run(app(Settings(gpus_per_machine=0, lp=2, ranks_per_machine=1, flags=FLAGS)), name="lpr")
    result["on_two_machines"] = client.text()
    result["mesh"] = client.http.get("/v1/models").json()["data"][0]["lpr"]["mesh"]
    services = meshes().values()
    serve.shutdown()
    ray.shutdown()
    wait_for(lambda: not any(map(psutil.pid_exists, services)), "the end of the services")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
