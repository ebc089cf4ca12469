"""Connections over real sockets: limits, time-outs, and who gives way to whom."""

import asyncio
import contextlib
import gc
import json
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import uvicorn

from lpr.serve import limits, port
from lpr.serve.connections import GONE, SECONDS, Connection, Waits
from lpr.serve.port import Port
from tests.fakes.fake_driver import wait_for

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class App:
    """Answers "ok"; /body only after the body; /hold not before `release`; /big with 8 MB in pieces; /gone late."""

    def __init__(self):
        self.release = threading.Event()
        self.calls = 0
        self.gone = 0
        self.bytes_read = 0
        self.saw_gone = []

    async def __call__(self, scope, receive, send):
        self.calls += 1
        if scope["path"] == "/gone":
            time.sleep(0.2)  # the loop stands still
            self.saw_gone.append(scope["extensions"][GONE]())
        more = scope["path"] == "/body"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            self.bytes_read += len(message["body"])
            more = message["more_body"]
        while scope["path"] == "/hold" and not self.release.is_set():
            await asyncio.sleep(0.01)
        pieces = [b"x" * 65536] * 128 if scope["path"] == "/big" else [b"ok"]
        length = str(sum(map(len, pieces))).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def running(most=8, tls=None):
    """A port with an App behind it: `app`, `connect()`, `ask(path)`, and its `loop`."""
    app, loop = App(), asyncio.new_event_loop()
    listening = Port(socket.create_server(("127.0.0.1", 0)), most, tls)
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", ws="none", timeout_keep_alive=SECONDS[Waits.IDLE],
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    ended = asyncio.Event()
    server.main_loop = ended.wait  # uvicorn's own looks ten times a second whether it ends

    async def serve():
        serving = asyncio.create_task(server.serve([]))
        listening.open(lambda: Connection(config, server.server_state, {}, port=listening))
        await serving

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    opened = []

    def connect():
        opened.append(socket.create_connection(("127.0.0.1", listening.number), timeout=5))
        return opened[-1]

    def is_set_up():
        """True if a connection has a transport."""
        return any(isinstance(each, Connection) and each.transport for each in list(listening._open))

    def ask(path=b"", link=None):
        link = link or connect()
        link.sendall(GET % path)
        return read(link)

    def end():
        listening.close()
        ended.set()

    try:
        yield SimpleNamespace(app=app, connect=connect, ask=ask, loop=loop, is_set_up=is_set_up)
    finally:
        app.release.set()
        for link in opened:
            link.close()
        loop.call_soon_threadsafe(end)
        thread.join(10)
        loop.close()
        assert not thread.is_alive()


def read(link):
    """The status and the body of one answer; (0, "") if there is none."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in data and (new := link.recv(65536)):
            data += new
        head, _, body = data.partition(b"\r\n\r\n")
        if not head:
            return 0, b""
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(fields[b"content-length"]) and (new := link.recv(65536)):
            body += new
        return int(head.split()[1]), body
    return 0, b""


def is_closed(link, seconds=5.0):
    """True if the server closes the connection within `seconds`, whatever it sends before."""
    link.settimeout(seconds)
    try:
        while link.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.fixture
def impatient(monkeypatch):
    """Waits of tenths of seconds."""
    monkeypatch.setattr(port, "SWEEP_SECONDS", 0.05)

    def set_seconds(**seconds):
        for waits in Waits:
            monkeypatch.setitem(SECONDS, waits, seconds.get(waits.name, 30.0))

    return set_seconds


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-out", folder / "c", "-keyout", folder / "k"], check=True, stderr=subprocess.DEVNULL)
    return folder / "c", folder / "k"


def test_many_requests_on_one_connection():
    with running() as service:
        link = service.connect()
        assert [service.ask(b"", link) for _ in range(3)] == [(200, b"ok")] * 3
        link.sendall(POST % (b"body", 300_000) + b" " * 300_000)
        assert read(link) == (200, b"ok") and service.app.bytes_read == 300_000
        link.sendall(
            (GET % b"").replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost")
        )  # as Java's clients do
        assert read(link) == (200, b"ok")
        link = service.connect()
        link.sendall((GET % b"") * 2)  # pipelined
        data = b""
        while data.count(b"ok") < 2:
            data += link.recv(65536)


def test_idle_connections_keep_nobody_out():
    with running(most=8) as service:
        idle = [service.connect()]
        idle[0].sendall(b"GET / HT")
        time.sleep(0.05)
        idle += [service.connect() for _ in range(7)]
        for _ in range(3):
            assert service.ask() == (200, b"ok")
        assert read(idle[0])[0] == 408  # the first to come has waited longest, and had begun a head
        assert read(idle[1])[0] == 0
        assert not is_closed(idle[7], 0.1)


def test_idle_connections_that_come_in_one_turn_of_the_loop_give_way_too():
    """They are accepted before any of them has been set up."""
    with running(most=8) as service:
        service.loop.call_soon_threadsafe(time.sleep, 0.5)
        idle = [service.connect() for _ in range(9)]
        assert service.ask() == (200, b"ok")
        assert [is_closed(link, 0.2) for link in (*idle[:2], idle[8])] == [True, True, False]


@pytest.mark.parametrize("begun", ["kept alive", "head", "body", "unread"])
def test_whatever_waits_for_its_client_gives_way(begun):
    with running(most=8) as service:
        for _ in range(8):
            link = service.connect()
            if begun == "kept alive":
                assert service.ask(b"", link) == (200, b"ok")
            elif begun == "head":
                link.sendall(b"GET / HTTP/1.1\r\nA: b\r\n")
            elif begun == "body":
                link.sendall(POST % (b"body", 10) + b"123")
            else:
                link.sendall(GET % b"big")
        if begun in ("body", "unread"):
            wait_for(lambda: service.app.calls == 8)
        time.sleep(0.1)
        assert [service.ask() for _ in range(8)] == [(200, b"ok")] * 8


def test_only_if_all_are_being_answered_a_new_one_is_refused():
    with running(most=8) as service:
        held = [service.connect() for _ in range(8)]
        for link in held:
            link.sendall(GET % b"hold")
        wait_for(lambda: service.app.calls == 8)
        status, body = service.ask()
        assert status == 503 and json.loads(body)["error"]["type"] == "service_unavailable"
        assert service.app.calls == 8
        service.app.release.set()
        assert [read(link) for link in held] == [(200, b"ok")] * 8
        assert service.ask() == (200, b"ok")


def test_a_head_has_its_time_however_it_trickles(impatient):
    impatient(HEAD=0.3)
    with running() as service:
        silent, trickling, blank = (service.connect() for _ in range(3))
        trickling.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(10):
            time.sleep(0.06)
            for link, data in ((trickling, b"A: b\r\n"), (blank, b"\r\n")):
                with contextlib.suppress(OSError):
                    link.sendall(data)
        for link in (silent, blank, trickling):
            assert is_closed(link, 0.1)


def test_a_head_that_is_late_gets_a_408(impatient):
    impatient(HEAD=0.2)
    with running() as service:
        link = service.connect()
        assert service.ask(b"", link) == (200, b"ok")
        link.sendall(b"GET / ")
        status, body = read(link)
        assert status == 408 and "in time" in json.loads(body)["error"]["message"] and is_closed(link)


def test_an_idle_connection_ends(impatient):
    impatient(IDLE=0.2)
    with running() as service:
        link = service.connect()
        assert service.ask(b"", link) == (200, b"ok") and is_closed(link, 2)


def test_a_body_that_nobody_waits_for_ends(impatient):
    impatient(BODY=0.2)
    with running() as service:
        link = service.connect()
        link.sendall(POST % (b"body", 10) + b"123")
        assert is_closed(link, 2)
        wait_for(lambda: service.app.gone == 1)


def test_an_answer_that_is_not_read_ends(impatient):
    impatient(UNREAD=0.3)
    with running() as service:
        link = service.connect()
        link.sendall(GET % b"big")
        time.sleep(0.5)
        link.settimeout(5)
        size = 0
        with contextlib.suppress(ConnectionError):
            while new := link.recv(1 << 20):
                size += len(new)
        assert size < 8 << 20  # the rest has never been sent
        assert len(service.ask(b"big")[1]) == 8 << 20


def test_a_slow_reader_gets_its_whole_answer(impatient):
    impatient(UNREAD=0.5)
    with running() as service:
        link = service.connect()
        link.sendall(GET % b"big")
        size = 0
        while size < 8 << 20 and (new := link.recv(200_000)):
            size += len(new)
            time.sleep(0.02)
        assert size >= 8 << 20


@pytest.mark.parametrize("head", [b"A: " + b"b" * (33 << 10), b"A: b\r\n" * 101, b"\r\n" * (17 << 10)])
@pytest.mark.parametrize("step", [1 << 20, 5000])
def test_a_head_is_limited(head, step):
    with running() as service:
        data = b"GET / HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n\r\n"
        if not head.strip():
            data = head + data
        link = service.connect()
        for begin in range(0, len(data), step):
            with contextlib.suppress(OSError):
                link.sendall(data[begin : begin + step])
            time.sleep(0.002)
        assert read(link)[0] == 431 and service.app.calls == 0


def test_a_large_head_within_the_limits_is_taken():
    with running() as service:
        link = service.connect()
        link.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 98 + b"B: " + b"b" * 30_000 + b"\r\n\r\n")
        assert read(link) == (200, b"ok")


def test_what_comes_besides_a_request_is_limited():
    with running() as service:
        early, trailing = service.connect(), service.connect()
        early.sendall((GET % b"hold") + b"GET / HTTP/1.1\r\n")
        trailing.sendall(b"POST /body HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        wait_for(lambda: service.app.calls == 2)
        early.settimeout(0.5)
        with pytest.raises(OSError):  # it is closed, or nobody reads it
            for _ in range(400):
                early.sendall((b"A: " + b"b" * 1000 + b"\r\n") * 64)
        trailing.sendall((b"A: " + b"b" * 1000 + b"\r\n") * 6)
        assert read(trailing)[0] == 400 and trailing.recv(1) == b""


CHUNKED = b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size, expected", [(1, 400), (16, 400), (64, 200), (4096, 200)])
def test_a_body_in_small_pieces_is_refused_and_read_little_at_a_time(size, expected, monkeypatch):
    """10,000 chunks of one byte cost the event loop half a second with a parser in Python."""
    turns = []
    received = Connection.data_received

    def counting(self, data):
        turns.append(len(data))
        received(self, data)

    monkeypatch.setattr(Connection, "data_received", counting)
    with running() as service:
        link = service.connect()
        chunk = b"%x\r\n" % size + b"x" * size + b"\r\n"
        with contextlib.suppress(OSError):
            link.sendall(CHUNKED + chunk * 2000 + b"0\r\n\r\n")
        status, body = read(link)
        assert status == expected and (status == 200 or b"pieces" in body)
        if size == 1:
            assert max(turns) <= 1 << 10 and sum(turns) < 40_000


def test_a_client_that_has_gone_is_seen_before_it_is_worked_for():
    """Its end is in the socket, though the event loop has not read it yet."""
    with running() as service:
        leaving = service.connect()
        assert service.ask(b"gone", leaving) == (200, b"ok")
        leaving.sendall(GET % b"gone")
        leaving.close()
        wait_for(lambda: len(service.app.saw_gone) == 2)
        assert service.app.saw_gone == [False, True]


def test_a_connection_is_set_up_when_it_speaks_and_not_if_it_has_gone(monkeypatch):
    made, was_made = [], Connection.connection_made
    monkeypatch.setattr(Connection, "connection_made", lambda self, _: made.append(self) or was_made(self, _))
    with running() as service:
        silent = [service.connect() for _ in range(5)]
        service.loop.call_soon_threadsafe(time.sleep, 0.3)
        for words in (b"", GET % b""):
            gone = service.connect()
            gone.sendall(words)
            gone.close()
        assert service.ask() == (200, b"ok") and service.app.calls == 1 and len(made) == 1
        assert service.ask(b"", silent[3]) == (200, b"ok") and len(made) == 2


def test_what_has_been_said_is_answered_however_many_speak_at_once():
    """They wait for the service, and not it for them: no further connection takes their place."""
    with running(most=96) as service:
        service.loop.call_soon_threadsafe(time.sleep, 0.5)
        links = [service.connect() for _ in range(120)]
        for link in links:
            link.sendall(GET % b"")
        assert [read(link) for link in links] == [(200, b"ok")] * 120


def test_an_answer_before_the_end_of_the_body_arrives(impatient):
    impatient(LINGER=0.5)
    with running() as service:
        link = service.connect()
        link.sendall(POST % (b"", 100 << 20))
        assert read(link) == (200, b"ok") and link.recv(1) == b""
        for _ in range(10):  # a client that sends first and reads then is not cut off by a reset
            link.sendall(b" " * 65536)
            time.sleep(0.01)
        time.sleep(0.6)
        with pytest.raises(OSError):
            for _ in range(10):
                link.sendall(b" " * 65536)
                time.sleep(0.02)
        assert service.app.bytes_read == 0


def test_expect_does_not_fetch_a_body_that_nobody_reads():
    with running() as service:
        for path, first in ((b"", b"HTTP/1.1 200"), (b"body", b"HTTP/1.1 100")):
            link = service.connect()
            link.sendall((POST % (path, 1000)).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
            assert link.recv(12) == first


def test_no_more_files_is_no_end(monkeypatch, capsys):
    with running() as service:
        assert service.ask() == (200, b"ok")
        accept, failures = socket.socket.accept, iter([24, 24])

        def failing(self):
            for number in failures:
                raise OSError(number, "Too many open files")
            return accept(self)

        monkeypatch.setattr(socket.socket, "accept", failing)
        assert service.ask() == (200, b"ok")
        assert capsys.readouterr().err.count("Too many open files") == 2  # and not once per turn of the loop


def test_half_a_tls_handshake_ends_and_gives_way(impatient, certificate):
    impatient(HEAD=0.5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with running(most=8, tls=context) as service:
        client = ssl.create_default_context()
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        idle = [service.connect() for _ in range(8)]
        time.sleep(0.1)
        for _ in range(2):
            with client.wrap_socket(service.connect()) as link:
                assert service.ask(b"", link) == (200, b"ok")
        assert is_closed(idle[0], 0.1) and is_closed(idle[7], 2)
        with client.wrap_socket(service.connect()) as link:
            link.sendall(POST % (b"", 1 << 20) + b" " * 100_000)
            assert read(link) == (200, b"ok")


def test_a_lost_connection_leaves_nothing_to_the_garbage_collector(seconds=5.0):
    """Connections that a collection had to free, some thousands at a time, held up the loop for 100 to 340 ms."""

    def alive():
        kept = (Connection, asyncio.Transport)
        return sum(issubclass(type(each), kept) for each in gc.get_objects())

    with running(most=64) as service:
        gc.disable()
        gc.freeze()  # objects of other tests are not looked at, which takes a second each time
        try:
            for begun in (b"", GET[:9], GET % b"", POST % (b"body", 9), GET % b"big", GET % b"" * 3):
                for _ in range(3):
                    with service.connect() as link:
                        link.sendall(begun)
                        if begun == GET % b"":
                            assert read(link) == (200, b"ok")
                        if begun:
                            wait_for(service.is_set_up, 5)
            wait_for(lambda: not alive(), seconds)
        finally:
            gc.unfreeze()
            gc.enable()


def test_an_answer_that_breaks_off_ahead_of_further_requests_is_no_error(caplog):
    """uvicorn tells only the latest request of a connection that it is lost: the others are answered to their end."""
    with running() as service:
        with service.connect() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.sendall(GET % b"big" + GET % b"")
            wait_for(lambda: service.app.calls, 5)
        assert service.ask() == (200, b"ok")
        time.sleep(0.2)
    assert not [each for each in caplog.records if each.exc_info], caplog.text


# Seeded faults: each breaks one limit, and the test of that limit must notice.


def nobody_waits(patch):
    patch.setattr(Port, "wait", lambda self, connection, waits: None)


def every_byte_begins_the_wait_anew(patch):
    received, wait, ports = Connection.data_received, Port.wait, {}

    def noted(self, connection, waits):
        ports[connection] = self
        wait(self, connection, waits)

    def again(self, data):
        received(self, data)
        ports[self].wait(self, Waits.HEAD)

    patch.setattr(Port, "wait", noted)
    patch.setattr(Connection, "data_received", again)


def answers_give_way(patch):
    was = Connection._waits_for
    patch.setattr(Connection, "_waits_for", lambda self: was(self) or Waits.IDLE)


def heads_have_no_end(patch):
    patch.setattr(limits, "HEAD", limits.HEAD._replace(most=1 << 30))
    patch.setattr(limits, "HEADERS", limits.HEADERS._replace(most=1 << 30))


def closing_loses_the_answer(patch):
    patch.setattr(Connection, "may_linger", False)


def lost_connections_keep_themselves(patch):
    patch.setattr("lpr.serve.connections._Transport.forget", lambda self: None)


def those_who_speak_give_way(patch):
    patch.setattr(Port, "_on_readable", lambda self, deferred: self._loop.call_later(0.05, on_readable, self, deferred))


on_readable = Port._on_readable
FOUND_BY = {
    those_who_speak_give_way: lambda _: test_what_has_been_said_is_answered_however_many_speak_at_once(),
    nobody_waits: lambda _: test_idle_connections_keep_nobody_out(),
    every_byte_begins_the_wait_anew: test_a_head_has_its_time_however_it_trickles,
    answers_give_way: lambda _: test_only_if_all_are_being_answered_a_new_one_is_refused(),
    heads_have_no_end: lambda _: test_a_head_is_limited(b"A: b\r\n" * 101, 5000),
    lost_connections_keep_themselves: (lambda _: test_a_lost_connection_leaves_nothing_to_the_garbage_collector(1.0)),
    closing_loses_the_answer: test_an_answer_before_the_end_of_the_body_arrives,
}


@pytest.mark.parametrize("fault", FOUND_BY, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault, impatient, monkeypatch):
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, OSError)):
            FOUND_BY[fault](impatient)
