"""The long tests of tests/serve/ranks/test_secrets.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil

from tests.dist.test_private_store import ANOTHER, LOOPBACK, listeners
from tests.fakes.serving import SMALL, serving
from tests.fakes.stores import HAS_SERVER
from tests.serve.ranks.test_secrets import num_clients


@HAS_SERVER
def test_a_service_of_two_ranks_shows_and_opens_nothing(tmp_path: Path) -> None:
    """No process but the front, which got it so, has a secret in its command line; all but HTTP is on loopback."""
    from tests.fakes.redis_server import redis_server

    with redis_server("--requirepass", "sesame") as server:
        url = server.url.replace("//", "//:sesame@")
        with serving(None, "--api-key", "word-of-key", "--draft-store", url, *SMALL, lp=2) as service:
            front = psutil.Process(service.process.pid)
            others = front.children(recursive=True)
            assert len(others) >= 3, "a supervisor and two ranks"
            for each in others:
                line = " ".join(each.cmdline())
                assert "word-of-key" not in line and "sesame" not in line, line
            ranks = [each for each in others if each.cmdline()[2:3] == ["lpr.serve.ranks.rank"]]
            assert all("word-of-key" not in json.dumps(each.environ()) for each in others)
            headers = {"Authorization": "Bearer word-of-key"}
            body = {"prompt": "def f", "max_tokens": 4}
            assert service.client.post("/v1/completions", json=body).status_code == 401
            assert service.client.post("/v1/completions", json=body, headers=headers).status_code == 200
            assert num_clients(server.url), "the driver has the store's URL with its password"
            found = {each.pid: listeners(each.pid) for each in [front, *others]}
            http, own = found.pop(front.pid), set()
            for names in found.values():
                own |= {name for name in names if name.split(":")[0] not in LOOPBACK}
            assert own == set() and len(ranks) == 2
            assert sum(name.startswith(LOOPBACK[0]) for name in http) == 1, "the HTTP port"
            paths = [Path(name) for name in http if name.startswith("/")]
            assert len(paths) == 1 and paths[0].parent.stat().st_mode & 0o777 == 0o700
            if os.geteuid() == 0:
                program = f"import socket; socket.socket(socket.AF_UNIX).connect('{paths[0]}')"
                done = subprocess.run([*ANOTHER, program], capture_output=True, text=True, timeout=30)
                assert done.returncode == 1 and "PermissionError" in done.stderr
