"""The Grafana dashboard's questions, answered by a real Prometheus that scrapes real services under load.

    python -m benchmarks.dashboard --data classeval.jsonl --output benchmarks/results/dashboard.json --page page.html

Two services share drafts through a redis-server; clients ask both, now and then for something that is refused, and in
the middle the ranks of the second are killed. Prometheus (Debian's) scrapes as launch/monitoring/prometheus.yaml says,
but for the addresses. Then every expression of launch/monitoring/dashboard.json is asked over the whole time, with
Grafana's variables filled in as it would: an entry fails if Prometheus refuses the expression or has no figure for it.

`--page` writes the panels, each where the dashboard puts it, drawn from Prometheus's answers. It is no Grafana: none of
the package registries that this project uses has its server, and nothing here has run it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.common import attempt, make_parser, progress, run_main, whole
from benchmarks.dashboard_page import page
from benchmarks.data import load_prompts
from benchmarks.processes.redis_server import redis_server
from benchmarks.processes.services import Running, running
from lpr.config import InputError

MONITORING = Path(__file__).parent.parent / "launch" / "monitoring"
RATE_INTERVAL = "20s"
"""What Grafana makes of $__rate_interval: four scrapes."""
START_SECONDS = 60.0
SIZE = (1430, 2280)
"""Pixels of the picture."""
POINTS = 120
"""Per series of a panel."""


@dataclass(frozen=True)
class Prometheus:
    """A server that scrapes."""

    url: str

    def ask(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series of an expression; raises RuntimeError where Prometheus refuses it."""
        step = max(1.0, (end - start) / POINTS)
        asked = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        answer = httpx.get(self.url + "/api/v1/query_range", params=asked, timeout=60).json()
        if answer["status"] != "success":
            raise RuntimeError(answer.get("error", "no reason given"))
        return list(answer["data"]["result"])


@contextlib.contextmanager
def prometheus(targets: Sequence[str], port: int) -> Iterator[Prometheus]:
    """Debian's Prometheus with the project's configuration, scraping `targets` (host:port); raises InputError."""
    import yaml

    program = shutil.which("prometheus")
    if program is None:
        raise InputError("this needs Prometheus: apt-get install prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    del scrape["dns_sd_configs"]
    scrape["static_configs"] = [{"targets": list(targets)}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prometheus.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        flags = [
            f"--config.file={path}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found, end = Prometheus(f"http://127.0.0.1:{port}"), time.monotonic() + START_SECONDS
            while not _is_ready(found.url):
                if process.poll() is not None or time.monotonic() > end:
                    raise InputError("Prometheus did not start")
                time.sleep(0.2)
            yield found
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url + "/-/ready", timeout=5).status_code == 200
    return False


class Load:
    """Clients of some services, each in a thread of its own, until `stop`."""

    def __init__(self, urls: Sequence[str], prompts: Sequence[str], clients: int) -> None:
        """Ask at once."""
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(urls[number % len(urls)], prompts[number::clients], number))
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return once the last answer has come."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str, prompts: Sequence[str], number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            for turn in itertools.count():
                if self._stopped.is_set():
                    return
                body = {"prompt": prompts[turn % len(prompts)], "max_tokens": 48, "temperature": 0.8 * (turn % 2)}
                if turn % 7 == number % 7:
                    body["no_such_field"] = 1
                with contextlib.suppress(httpx.HTTPError):
                    client.post("/v1/completions", json=body)


def kill_ranks(service: Running) -> None:
    """Kill what the front of a service has started."""
    for process in psutil.Process(service.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def filled_in(expression: str) -> str:
    """An expression with Grafana's variables replaced as for "All"."""
    for name, value in (("$__rate_interval", RATE_INTERVAL), ("$model", ".*"), ("$instance", ".*")):
        expression = expression.replace(name, value)
    return expression


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run everything, then ask for every panel."""
    prompts = load_prompts(options.data, options.prompts)
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel.get("targets")]
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(redis_server())
        advance = stack.enter_context(progress(console, options.seconds, "starting"))
        flags = ["--no-access-log", "--dtype", "float32", "--max-batch-size", "2", "--draft-store", store.url]
        services = [stack.enter_context(running(flags, options.threads)) for _ in range(2)]
        urls = [service.url for service in services]
        server = stack.enter_context(prometheus([url.partition("://")[2] for url in urls], options.port))
        began = time.time()
        load = Load(urls, prompts, options.clients)
        try:
            for second in range(options.seconds):
                time.sleep(1)
                advance(1, "under load")
                if second == options.seconds // 2:
                    kill_ranks(services[1])
        finally:
            load.stop()
        ended = time.time()
        runs = [attempt(partial(look, server, panel, began, ended)) | {"panel": panel["title"]} for panel in panels]
    text = page(dashboard, [run.pop("answers", []) for run in runs], began, ended)
    if options.page:
        Path(options.page).write_text(text, encoding="utf-8")
    if options.picture:
        photograph(text, Path(options.picture))
    return {
        "benchmark": "dashboard",
        "seconds": options.seconds,
        "services": len(services),
        "clients": options.clients,
        "load_average": round(os.getloadavg()[0], 1),
        "runs": runs,
        "num_failed": sum("failed" in run for run in runs),
    }


def look(server: Prometheus, panel: dict[str, Any], start: float, end: float) -> dict[str, Any]:
    """A panel's series; raises RuntimeError if one of its expressions is refused, or none has a figure."""
    answers, figures = [], 0
    for target in panel["targets"]:
        series = server.ask(filled_in(target["expr"]), start, end)
        figures += sum(math.isfinite(float(value)) for each in series for _, value in each["values"])
        answers.append({"legend": target["legendFormat"], "series": series})
    if not figures:
        raise RuntimeError("Prometheus has no figure for it")
    return {"expressions": len(answers), "series": sum(len(each["series"]) for each in answers), "figures": figures,
            "answers": answers}  # fmt: skip


def photograph(text: str, path: Path) -> None:
    """A page as a picture; raises InputError without chromium."""
    program = shutil.which("chromium")
    if program is None:
        raise InputError("--picture needs chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(text, encoding="utf-8")
        window = f"--window-size={SIZE[0]},{SIZE[1]}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", window]
        command = [program, *flags, f"--screenshot={path.resolve()}", f"{folder}/page.html"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> int:
    """Run the benchmark from the command line."""
    parser = make_parser("dashboard", "Every question of the Grafana dashboard, to a real Prometheus.", threads=1)
    parser.add_argument("--data", required=True, metavar="FILE", help="prompts, as for the other benchmarks")
    parser.add_argument("--prompts", type=whole, default=24, metavar="N", help="use the first N prompts (24)")
    parser.add_argument("--seconds", type=whole, default=180, metavar="S", help="under load (180)")
    parser.add_argument("--clients", type=whole, default=6, metavar="N", help="of both services together (6)")
    parser.add_argument("--port", type=whole, default=19090, metavar="P", help="of Prometheus (19090)")
    parser.add_argument("--page", metavar="FILE.html", help="write the panels as a page")
    parser.add_argument("--picture", metavar="FILE.png", help="and that page as a picture, by chromium")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
