"""The parts of shared drafts by themselves: entries, queues, hostile stores, flags, and what routers go by."""

import importlib.util
import os
import socket
import threading
import time

import numpy as np
import pytest

from lpr.config import InputError
from lpr.core.suffix_index import END, MAX_MATCH
from lpr.fleet import affinity, entries
from lpr.fleet.counts import DraftCounts
from lpr.fleet.entries import Batch, Inbox
from lpr.serve.messages import Load, Pulse, frame
from lpr.serve.options import parse
from tests.fakes.fake_driver import served

HAS_CLIENT = pytest.mark.skipif(importlib.util.find_spec("redis") is None, reason="needs pip install 'lpr[fleet]'")
STORE = "redis://127.0.0.1:6379/0"


# Entries.


def test_an_entry_carries_the_prompts_tail_and_the_newest_of_the_output():
    data, count = entries.encode(b"o" * 8, b"n" * 8, range(100), [200, 201])
    entry = entries.decode(data)
    assert entry.token_ids().tolist() == [*range(100 - MAX_MATCH, 100), 200, 201] and count == MAX_MATCH + 2
    assert entry.num_prompt == MAX_MATCH
    data, count = entries.encode(b"o" * 8, b"n" * 8, [1, 2], list(range(5000)))
    entry = entries.decode(data)
    assert count == entries.MOST_TOKENS == len(entry.token_ids()) and len(data) <= entries.MOST_BYTES
    assert entry.token_ids().tolist()[-1] == 4999 and entry.num_prompt == 0


def test_any_bytes_are_an_entry_or_none():
    data, _ = entries.encode(b"o" * 8, b"n" * 8, [1, 2], [3, 4])
    for cut in range(len(data)):
        assert entries.decode(data[:cut]) is None
    for at in range(len(data)):
        for bit in range(8):
            changed = bytes([*data[:at], data[at] ^ (1 << bit), *data[at + 1 :]])
            found = entries.decode(changed)
            assert found is None or 0 < len(found.token_ids()) <= entries.MOST_TOKENS
    assert entries.decode(None) is entries.decode("text") is entries.decode(data + b"x") is None


def test_ids_that_are_no_tokens_end_a_document():
    found, count = entries.within_vocabulary(np.array([5, 9, 10, -1, -2, 2**31 - 1, 0], np.int32), 10)
    assert found.tolist() == [5, 9, END, END, END, END, 0] and count == 3 and found.dtype == np.int32


# What waits to be learnt.


def test_an_inbox_hands_out_little_at_a_time_in_order_and_by_tenant():
    woken = []
    waiting = Inbox(lambda: woken.append(1))
    document = [*range(1, 1000), END]
    waiting.put(Batch("a", np.array(document * 10, np.int32), "7-0", 10, 3.0))
    waiting.put(Batch("a", np.array([5, END], np.int32), "8-0", 1, 4.0))
    waiting.put(Batch("b", np.array([6, END], np.int32), "1-0", 1))
    assert len(waiting) == 12 and len(woken) == 3 and not waiting.is_full
    taken = []
    while (batch := waiting.take()) is not None:
        assert len(batch.history) <= entries.AT_ONCE and batch.history[-1] == END, "documents stay whole"
        taken.append(batch)
    assert np.concatenate([each.history for each in taken]).tolist() == [*document * 10, 5, END, 6, END]
    assert [each.read_to for each in taken if each.read_to] == ["8-0", "1-0"]
    assert taken[0].read_to == "", "a position is said with the last piece only"
    assert taken[-1].tenant == "b" and sum(each.num_outputs for each in taken) == 12
    assert waiting.is_empty and len(waiting) == 0


def test_a_document_longer_than_a_piece_is_cut():
    waiting = Inbox(lambda: None)
    waiting.put(Batch("", np.arange(10000, dtype=np.int32), "1-0"))
    lengths = []
    while (batch := waiting.take()) is not None:
        lengths.append(len(batch.history))
    assert sum(lengths) == 10000 and max(lengths) <= entries.AT_ONCE


# Stores that mean no good.


class Hostile:
    """A server that does `behave(connection)` with each connection until the test ends."""

    def __init__(self, behave):
        self._server = socket.create_server(("127.0.0.1", 0))
        self._behave = behave
        self.over = threading.Event()
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        while not self.over.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection):
        try:
            with connection:
                self._behave(connection, self.over)
        except OSError:
            pass

    def close(self):
        self.over.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(5)


def silent(connection, over):
    over.wait(60)


def drips(connection, over):
    connection.recv(1)
    connection.sendall(b"$1000000000\r\n")
    while not over.wait(0.05):
        connection.sendall(b"x")


def floods(connection, over):
    connection.recv(1)
    connection.sendall(b"*1\r\n$1000000000\r\n")
    while not over.is_set():
        connection.sendall(b"x" * 65536)


def noise(connection, over):
    while not over.is_set() and connection.recv(1 << 16):
        connection.sendall(os.urandom(100) + b"\r\n")


def nests(connection, over):
    while not over.is_set() and connection.recv(1 << 16):
        connection.sendall(b"*1\r\n" * 20000)


def wrong_types(connection, over):
    while not over.is_set() and connection.recv(1 << 16):
        connection.sendall(b"*2\r\n:1\r\n*1\r\n*2\r\n$3\r\n1-1\r\n:7\r\n" * 4)


def hangs_up(connection, over):
    connection.recv(1)


@HAS_CLIENT
@pytest.mark.parametrize("behave", [silent, drips, floods, noise, nests, wrong_types, hangs_up])
def test_a_hostile_store_is_never_waited_for(behave, monkeypatch):
    from lpr.fleet import sharing, store, streams
    from lpr.fleet.options import FleetOptions

    monkeypatch.setattr(store, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(store, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(store, "MOST_ANSWER", 1 << 20)
    monkeypatch.setattr(streams, "QUEUE", 100)
    monkeypatch.setattr(sharing, "FLUSH_SECONDS", 0.0)
    asked = set()
    send = store.Metered.sendall
    monkeypatch.setattr(store.Metered, "sendall", lambda *of: asked.add(threading.get_ident()) or send(*of))
    hostile = Hostile(behave)
    options = FleetOptions(draft_store=hostile.url)
    drafts = sharing.SharedDrafts(
        options, fingerprint="f", model="m", vocab_size=100, origin=b"o" * 8, positions={"": "1-0"}
    )
    try:
        times = []
        for _ in range(300):
            began = time.monotonic()
            drafts.finished("", [1, 2], [3, 4])
            drafts.follow("t")
            assert drafts.take() is None or behave is wrong_types
            times.append(time.monotonic() - began)
        end = time.monotonic() + 20
        while not (drafts.counts.read_errors and drafts.counts.write_errors):
            assert time.monotonic() < end, drafts.counts
            time.sleep(0.01)
        # A machine that is busy with other tests holds up one step or two; a store that is waited for, every step.
        assert sorted(times)[-5] < 0.4, "the step loop has waited for the store"
        assert asked and threading.get_ident() not in asked, "the step loop has asked the store itself"
        assert drafts.counts.unsent >= 100 and drafts.counts.send_queue <= 100 and drafts.counts.learnt == 0
    finally:
        drafts.close()
        hostile.close()


@HAS_CLIENT
def test_a_full_queue_drops_the_oldest():
    from lpr.fleet import streams

    counts = DraftCounts()
    sent, expiring = [], []

    class Store:
        def pipeline(self, transaction):
            return self

        def xadd(self, key, fields, maxlen, approximate):
            sent.append((key, entries.decode(fields[entries.FIELD]).token_ids().tolist()[-1], maxlen))

        def expire(self, key, seconds):
            expiring.append((key, seconds))

        def execute(self, raise_on_error):
            return [b"1-0"] * len(sent[-streams.SEND_AT_ONCE :]) + [1]

    queue = streams.Sender(Store(), b"o" * 8, 77, counts)
    for number in range(streams.QUEUE + 5):
        queue.put("key", [], [number])
    assert counts.unsent == 5 and counts.send_queue == streams.QUEUE
    queue.work()
    assert sent[0] == ("key", 5, 77) and counts.sent == streams.SEND_AT_ONCE
    assert expiring == [("key", streams.KEPT_SECONDS)]


@HAS_CLIENT
def test_streams_of_other_models_tokenizers_and_tenants_are_apart():
    from lpr.fleet.store import stream_of

    parts = [("f", "m", ""), ("f", "m", "t"), ("f", "m:t", ""), ("f:m", "t", ""), ("f", "n", ""), ("g", "m", "")]
    assert len({stream_of(*each) for each in parts}) == len(parts)
    assert stream_of("f}", "{m", "a b").count("{") == stream_of("f}", "{m", "a b").count("}") == 1


# Snapshots in an object store.


def test_snapshots_in_a_bucket(monkeypatch):
    pytest.importorskip("obstore", reason="needs pip install 'lpr[fleet]'")
    server = pytest.importorskip("moto.server", reason="needs pip install 'moto[s3,server]'")
    from lpr.fleet import snapshots

    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        address = f"http://{host}:{port}"
        for name, value in (
            ("AWS_ENDPOINT", address), ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        import httpx

        httpx.put(f"{address}/drafts").raise_for_status()
        place = snapshots.place_of("s3://drafts/fleet/a")
        assert place.read("x.safetensors") is None
        data = snapshots.to_bytes("stream", np.array([1, 2, END], np.int32), "5-1")
        place.write("x.safetensors", data)
        place.write("x.safetensors", data)
        assert place.read("x.safetensors") == data
        history, read_to = snapshots.from_bytes("stream", data)
        assert history.tolist() == [1, 2, END] and read_to == "5-1"
        monkeypatch.setattr(snapshots, "MOST_BYTES", 10)
        with pytest.raises(snapshots.SnapshotError, match="larger"):
            place.read("x.safetensors")
    finally:
        running.stop()


# Flags.


@HAS_CLIENT
def test_flags_of_a_fleet_and_of_its_environment(monkeypatch, tmp_path):
    args = parse(["--draft-store", STORE, "--draft-snapshots", "folder", "--replica-name", "r1"])
    assert (args.fleet.draft_store, args.fleet.draft_snapshots, args.fleet.replica_name) == (STORE, "folder", "r1")
    monkeypatch.setenv("LPR_DRAFT_STORE", "rediss://u:secret@host:6380/2")
    monkeypatch.setenv("LPR_REPLICA_NAME", "r2")
    args = parse([])
    assert (args.fleet.draft_store, args.fleet.replica_name) == ("rediss://u:secret@host:6380/2", "r2")
    path = tmp_path / "serve.toml"
    path.write_text('draft_store_length = 5\ndraft_snapshot_every = 60\nreplica_name = "r3"\n')
    args = parse(["--config", str(path)])
    assert (args.fleet.draft_store_length, args.fleet.draft_snapshot_every, args.fleet.replica_name) == (5, 60.0, "r3")


@HAS_CLIENT
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--draft-store", "http://secret@h"], "--draft-store must begin with one of redis://, rediss://, unix://"),
        (["--draft-store", "redis://"], "needs a host"),
        (["--draft-store", "redis://u:secret@h:port"], "--draft-store is no URL"),
        (["--draft-store", "redis://u:secret@h/x"], "the number of a database"),
        (["--draft-store", "unix://"], "the path of a socket"),
        (["--draft-store", STORE, "--share-drafts", "none"], "--share-drafts none forbids it"),
        (["--draft-store", STORE, "--draft-snapshots", "ftp://x"], "ftp:// is none of"),
        (["--draft-snapshots", "folder"], "needs --draft-store"),
        (["--draft-store", STORE, "--draft-store-length", "0"], "--draft-store-length 0"),
        (["--draft-store", STORE, "--draft-snapshot-every", "0"], "--draft-snapshot-every 0"),
        (["--replica-name", "a\nb"], "--replica-name"),
        (["--replica-name", " "], "--replica-name"),
    ],
)
def test_bad_flags_of_a_fleet_are_one_line_without_secrets(flags, message):
    with pytest.raises(InputError) as failure:
        parse(flags)
    assert message in str(failure.value) and "\n" not in str(failure.value) and "secret" not in str(failure.value)


def test_a_client_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'lpr\[fleet\]'"):
        parse(["--draft-store", STORE])


# What routers go by.


def test_prompts_that_begin_alike_share_their_first_keys():
    text = "".join(f"line {number}\n" for number in range(2000))
    keys = affinity.prefix_keys({"prompt": text})
    assert len(keys) == 7 and len(set(keys)) == 7 and all(len(key) == 16 and int(key, 16) >= 0 for key in keys)
    assert affinity.prefix_keys({"prompt": text[:1024] + "other"}) == keys[:3]
    assert affinity.prefix_keys({"prompt": text[:1023]}) == keys[:2]
    assert affinity.prefix_keys({"prompt": "x" + text})[0] != keys[0]
    assert affinity.prefix_keys({"prompt": text[:255]}) == affinity.prefix_keys({"prompt": ""}) == []
    assert len(affinity.prefix_keys({"prompt": "é" * 10**6})) == affinity.MOST_KEYS


def test_every_way_of_giving_a_prompt_has_keys():
    text = "word " * 100
    keys = affinity.prefix_keys({"prompt": text})
    assert affinity.prefix_keys({"prompt": [text, "other"]}) == keys
    parts = [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]
    chat = affinity.prefix_keys({"messages": [{"role": "user", "content": text}]})
    assert chat == affinity.prefix_keys({"messages": [{"role": "user", "content": parts}]}) != []
    ids = list(range(300))
    assert affinity.prefix_keys({"prompt": ids}) == affinity.prefix_keys({"prompt": [ids, [1]]}) != []
    assert affinity.prefix_keys({"input_prefix": text, "input_extra": [], "prompt": ""}) == keys
    assert affinity.prefix_keys({"input_prefix": "", "input_extra": [{"text": text}]}) == keys
    for odd in ({"messages": 5}, {"messages": ["x"]}, {"prompt": 5}, {"prompt": []}, {"prompt": [[]]}, {}):
        assert affinity.prefix_keys(odd) == []


def test_a_session_goes_before_the_prompt():
    body = {"prompt": "word " * 100, "prompt_cache_key": "conversation 7"}
    assert affinity.routing_key({"X-Session-ID": "s1"}, body) == "session s1"
    assert affinity.routing_key({}, body) == "session conversation 7"
    del body["prompt_cache_key"]
    assert affinity.routing_key({"other": "x"}, body) == f"prefix {affinity.prefix_keys(body)[0]}"
    assert affinity.routing_key({}, {"prompt": "short"}) == ""


def test_answers_name_the_replica_and_how_their_prompt_begins():
    with served(fleet=parse(["--replica-name", "pod-3"]).fleet) as service:
        body = {"prompt": "x = 1\n" * 100, "max_tokens": 4, "prompt_cache_key": "s"}
        answer = service.client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-lpr-replica"] == "pod-3"
        assert answer.headers["x-lpr-prefix"].split(",") == affinity.prefix_keys(body)
        chat = {"messages": [{"role": "user", "content": "y = 2\n" * 100}], "stream": True, "max_tokens": 4}
        answer = service.client.post("/v1/chat/completions", json=chat)
        assert answer.headers["x-lpr-prefix"].split(",") == affinity.prefix_keys(chat)
        hole = {"input_prefix": "z = 3\n" * 100, "input_suffix": "\n", "n_predict": 4}
        answer = service.client.post("/infill", json=hole)
        assert answer.headers["x-lpr-prefix"].split(",") == affinity.prefix_keys(hole)
        for path, status in (("/livez", 200), ("/metrics", 200), ("/nowhere", 404)):
            answer = service.client.get(path)
            assert answer.status_code == status and answer.headers["x-lpr-replica"] == "pod-3"
            assert "x-lpr-prefix" not in answer.headers
        answer = service.client.post("/v1/completions", json={"prompt": "short"})
        assert "x-lpr-prefix" not in answer.headers
    with served() as service:
        assert service.client.get("/livez").headers["x-lpr-replica"] == f"{socket.gethostname()}:{service.front.port}"


def test_metrics_carry_what_routers_and_dashboards_need():
    with served() as service:
        text = service.client.get("/metrics").text
        assert "shared_draft" not in text, "nothing is shared"
        assert 'vllm:cache_config_info{block_size="16"' in text and 'num_gpu_blocks="128"' in text
        counts = DraftCounts(sent=3, learnt=4, outside_vocabulary=5, read_errors=6, read_up=True, lag=0.25)
        load = Load(num_cached_pages=2, num_cached_tokens=99, drafts=counts, num_preemptions=7, num_recomputed=8,
                    num_swapped_pages=9, num_swapped=(11, 10))  # fmt: skip
        service.driver.pulses = False
        time.sleep(0.3)
        service.call(lambda: service.driver._writer.write(frame(Pulse(load))))
        end = time.monotonic() + 10
        while "lpr:shared_drafts_total" not in (text := service.client.get("/metrics").text):
            assert time.monotonic() < end
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(("lpr:", "vllm:")))
        for part, value in (
            ("lpr:cached_pages{", 2), ("lpr:cached_prefix_tokens{", 99), ('lpr:shared_drafts_total{.*"sent"', 3),
            ("vllm:num_preemptions_total{", 7), ("lpr:recomputed_tokens_total{", 8), ("lpr:swapped_pages{", 9),
            ('lpr:swaps_total{.*"out"', 11), ('lpr:swaps_total{.*"in"', 10),
            ('lpr:shared_drafts_total{.*"learnt"', 4), ('lpr:shared_draft_tokens_total{.*"outside_vocabulary"', 5),
            ('lpr:shared_draft_errors_total{.*"read"', 6), ('lpr:shared_draft_store_up{.*"read"', 1),
            ('lpr:shared_draft_store_up{.*"write"', 0), ("lpr:shared_draft_lag_seconds{", 0.25),
        ):  # fmt: skip
            name, _, label = part.partition("{")
            of_name = {line: float(each) for line, each in lines.items() if line.startswith(name + "{")}
            assert [each for line, each in of_name.items() if label.strip(".*") in line] == [value], part
