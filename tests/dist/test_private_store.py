"""The rendezvous store of supervised ranks, and who can take part in what they form."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lpr.dist import group
from lpr.dist.private_store import PrivateStore
from lpr.dist.store_server import HEAD, MOST_MESSAGE, StoreServer
from tests.fakes.elastic_world import hash_store
from tests.fakes.sharded import dist

ANOTHER = [
    sys.executable,
    "-c",
    "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); exec(sys.argv.pop(1))",
]
"""Runs a program as the user nobody, if this one is root."""
SOON = timedelta(seconds=20)


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    found = StoreServer()
    yield found
    found.close()


@pytest.fixture
def store(server: StoreServer) -> Iterator[PrivateStore]:
    found = PrivateStore(server.open_door(), SOON)
    yield found
    found.close()


def test_it_answers_as_torchs_own_stores(store: PrivateStore) -> None:
    """The same calls on a HashStore, both through a prefix: by torch's C++ code."""

    def calls(other: Any) -> list[object]:
        prefixed = dist.PrefixStore("calls", other)
        prefixed.set("a", "1")
        prefixed.set("b", b"\xff\0")
        answers = [prefixed.get("a"), prefixed.get("b"), prefixed.check(["a", "b"]), prefixed.check(["a", "no"])]
        answers += [prefixed.compare_set("a", "2", "3"), prefixed.compare_set("a", "1", "3"), prefixed.get("a")]
        answers += [prefixed.compare_set("c", "", "x"), prefixed.compare_set("c", "", "y")]
        answers += [prefixed.add("n", 2), prefixed.add("n", -5), prefixed.get("n")]
        answers += [prefixed.delete_key("a"), prefixed.delete_key("a"), prefixed.check(["a"])]
        with pytest.raises(dist.DistStoreError):
            prefixed.wait(["b", "never"], timedelta(seconds=0.05))
        return answers

    assert calls(store) == calls(hash_store())


def test_a_wait_ends_with_the_last_key_and_delays_nobody(store: PrivateStore) -> None:
    ended = []
    waiting = threading.Thread(target=lambda: (store.wait(["w1", "w2"], SOON), ended.append(time.monotonic())))
    waiting.start()
    store.set("w2", "x")
    time.sleep(0.1)
    assert not ended
    store.set("w1", "x")
    wrote = time.monotonic()
    waiting.join(timeout=5)
    assert ended and ended[0] - wrote < 2


def test_many_threads_have_connections_of_their_own(store: PrivateStore) -> None:
    threads = [threading.Thread(target=lambda: [store.add("sum", 1) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert store.get("sum") == b"400"


def test_a_store_that_is_gone_is_an_error_at_once() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    gone = PrivateStore(ours, SOON)
    with pytest.raises(dist.DistNetworkError, match="the supervisor is gone"):
        gone.set("a", "b")
    gone.close()
    ending = StoreServer()
    left = PrivateStore(ending.open_door(), SOON)
    left.set("a", "b")
    waiting = threading.Thread(target=ending.close)
    waiting.start()
    with pytest.raises(dist.DistNetworkError, match="the supervisor is gone"):
        left.wait(["never"], SOON)
    waiting.join(timeout=10)
    left.close()


def test_a_value_that_is_too_long_is_refused_by_both_ends(server: StoreServer, store: PrivateStore) -> None:
    with pytest.raises(ValueError, match="which takes"):
        store.set("long", bytes(MOST_MESSAGE))
    with passed(server) as connected:
        connected.sendall(HEAD.pack(MOST_MESSAGE + 1))
        assert connected.recv(1) == b"", "it has hung up"
    assert not store.check(["long"])


@contextmanager
def passed(server: StoreServer) -> Iterator[socket.socket]:
    """A connection to a server, in a stranger's hands."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with server.open_door() as door, ours:
        socket.send_fds(door, [b"\0"], [theirs.fileno()])
        theirs.close()
        yield ours


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\xa3set\x90\x90", b"\x91\xa4what", b"\x92\xa3add\x91\x01"])
def test_noise_ends_its_connection_only(server: StoreServer, store: PrivateStore, body: bytes) -> None:
    store.set("kept", "1")
    with passed(server) as connected:
        connected.sendall(HEAD.pack(len(body)) + body)
        assert connected.recv(1) == b""
    assert store.get("kept") == b"1"


# Who can take part.


def listeners(pid: int) -> set[str]:
    """Addresses at which a process listens for TCP, and names of the Unix sockets it listens at."""
    links = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with_name = os.readlink(each) if each.is_symlink() else ""
        links.add(with_name)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                found.add(words[1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & 0x10000 and f"socket:[{words[6]}]" in links:  # it accepts connections
            found.add(" ".join(words[7:]) or "a socket without a name")
    return found


LOOPBACK = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1, as /proc shows them."""
RANK = """
import os, sys, time, torch
from lpr.dist.runtime import World, join
with join(World.from_environment(), "cpu", 20.0) as comm:
    comm.gather(torch.zeros(1, dtype=torch.int32))
    os.write(1, b"%d\\n" % os.getpid())  # whole: two prints at once mix where output is not buffered
    time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_no_door(server: StoreServer) -> None:
    """The descriptors of a rank are its own: /proc shows them to no other user, and a socket cannot be opened there."""
    with server.open_door() as door:
        program = f"open('/proc/{os.getpid()}/fd/{door.fileno()}')"
        for command, why in (([*ANOTHER], "Permission denied"), ([sys.executable, "-c"], "No such device")):
            done = subprocess.run([*command, program], capture_output=True, text=True, timeout=30)
            assert done.returncode == 1 and why in done.stderr


def ports() -> set[int]:
    """Ports at which this process listens on 127.0.0.1."""
    return {int(each.split(":")[1], 16) for each in listeners(os.getpid()) if each.startswith(LOOPBACK[0])}


def form(
    store: PrivateStore, name: str, stranger: Callable[[int], None] | None = None, seconds: float = 10
) -> list[object]:
    """What two ranks get that form a group, while a stranger is the first at each port of the first one."""
    results: list[object] = [None, None]

    def make(rank: int) -> None:
        try:
            results[rank] = group.make_group(dist.PrefixStore(name, store), rank, 2, torch.device("cpu"), seconds)
        except RuntimeError as failure:
            results[rank] = failure

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    before = ports()
    threads[0].start()
    while not (new := ports() - before):
        time.sleep(0.01)
    for port in new if stranger is not None else ():
        stranger(port)
    threads[1].start()
    for thread in threads:
        thread.join(timeout=60)
    return results


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
@pytest.mark.parametrize("mutant", [False, True])
def test_a_stranger_takes_no_ranks_place(store: PrivateStore, mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger that connects first, with the small numbers that gloo expects and bytes that look like gloo's.

    gloo's side that listens is the one with the lower port, by chance. Without the check, it makes the stranger's
    group in one of a few tries; with it, never.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(group, "CONNECT_SECONDS", 1.0)
    if mutant:
        monkeypatch.setattr(group, "check_peers", lambda *_: None)
    heard: list[socket.socket] = []

    def connect(port: int) -> None:
        for number in range(4):
            heard.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            heard[-1].sendall(struct.pack("<q", number))

    def is_taken(number: int) -> bool:
        """True if a group was made in which one rank talks to the stranger."""
        made = form(store, f"{mutant}/{number}", connect, 3)
        if any(isinstance(each, RuntimeError) for each in made):
            assert not mutant
            return False
        sent = [torch.full((2,), 77), torch.full((2,), 78)]
        works = [each._allgather_base(torch.empty(4, dtype=torch.int64), sent[rank])  # type: ignore[attr-defined]
                 for rank, each in enumerate(made)]  # fmt: skip
        try:
            for work in works:
                work.wait(timedelta(seconds=1 if mutant else 5))
        except RuntimeError:
            return True
        return False

    assert any(is_taken(number) for number in range(16 if mutant else 4)) == mutant
    for each in heard:
        each.close()


def test_ranks_without_a_stranger_form_groups(store: PrivateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert not any(isinstance(each, RuntimeError) for each in form(store, "friends"))
