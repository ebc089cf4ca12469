"""What other users of the machine can read and reach: command lines, sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpr.serve import link
from lpr.serve.messages import PROTOCOL, Hello, frame, is_ours
from lpr.serve.ranks import KEYS, SECRETS, conceal, concealed, split_flags
from lpr.serve.ranks.line import FrontGoneError, Line
from tests.dist.test_private_store import ANOTHER

IS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize("form", [["--api-key", "SECRET"], ["--api-key=SECRET"], ["--api_key", "SECRET"]])
def test_flags_with_secrets_are_not_shown(form: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown, variables = conceal(["--lp", "2", *form, "--draft-store=redis://:pw@h", "--port", "1"])
    assert shown == ["--lp", "2", "--port", "1"] and json.loads(variables[SECRETS]) == [
        *form,
        "--draft-store=redis://:pw@h",
    ]
    assert split_flags(["--lp", "2", *form], KEYS)[0] == ["--lp", "2"]
    monkeypatch.setenv(SECRETS, variables[SECRETS])
    assert concealed() == [*form, "--draft-store=redis://:pw@h"] and concealed() == []


def test_a_flag_without_its_value_stays_an_error() -> None:
    assert split_flags(["--api-key"], KEYS) == ([], ["--api-key", ""])


def num_clients(url: str) -> int:
    """Clients of a store beside this one."""
    import redis

    client = redis.Redis.from_url(url, password="sesame", protocol=2)
    end = time.monotonic() + 30
    while (count := len(client.client_list()) - 1) < 1 and time.monotonic() < end:
        time.sleep(0.1)
    client.close()
    return count


# Peers of Unix sockets.

GREET = """
import socket, sys
connected = socket.socket(socket.AF_UNIX)
connected.settimeout(20)
connected.connect(sys.argv[1])
try:
    connected.sendall(bytes.fromhex(sys.argv[2]))
    connected.shutdown(socket.SHUT_WR)
    while connected.recv(9): pass
except ConnectionError: pass
"""


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may write to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_a_process_of_this_user_is_ours() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert is_ours(ours)


@IS_ROOT
@pytest.mark.parametrize("mutant", [False, True])
def test_the_front_hears_no_other_user(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger that greets like a driver, at a socket which everybody may reach by mistake."""
    heard: list[object] = []
    if mutant:
        monkeypatch.setattr(link, "is_ours", lambda _: True)

    async def serve(folder: Path) -> None:
        front = link.Link(heard.append, lambda: None)
        await front.listen(folder / "s")
        (folder / "s").chmod(0o777)
        greeting = frame(Hello(PROTOCOL, 1)).hex()
        stranger = await asyncio.create_subprocess_exec(*ANOTHER, GREET, str(folder / "s"), greeting)
        code = await asyncio.wait_for(stranger.wait(), 30)
        await front.close()
        assert code == 0

    with open_folder() as folder:
        asyncio.run(serve(folder))
    assert bool(heard) == mutant


@IS_ROOT
def test_a_driver_tells_another_users_front_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
listener.settimeout(30)
print(listener.accept()[0].recv(9) == b"", flush=True)
"""
    with open_folder() as folder:
        path = folder / "s"
        with subprocess.Popen([*ANOTHER, program, str(path)], stdout=subprocess.PIPE, text=True) as stranger:
            end = time.monotonic() + 30
            while not (path.exists() and path.stat().st_mode & 0o777 == 0o777):
                assert time.monotonic() < end
                time.sleep(0.02)
            with pytest.raises(FrontGoneError, match="another user's process"):
                Line(path)
            assert stranger.communicate(timeout=30)[0] == "True\n", "not even a greeting"
