"""Replicas that share drafts through a real redis-server: faster by what others wrote, and never other tokens."""

import os
import shutil
import socket
import subprocess
import time

import msgspec
import numpy as np
import pytest

from tests.fakes import stores
from tests.fakes.stores import HAS_SERVER, until
from tests.fakes.worlds import ThreadWorld, run_ranks

pytest.importorskip("redis", reason="needs pip install 'lpr[fleet]'")

import redis

import lpr
from lpr import InputError
from lpr.core.suffix_index import END
from lpr.engine.drafts import DraftIndexes
from lpr.fleet import entries, sharing, snapshots, store, streams
from tests.fakes.fleet_world import DECODE, PROMPTS, Member, fleet, key_of
from tests.fakes.redis_server import redis_server

pytestmark = HAS_SERVER


@pytest.fixture(scope="module")
def loaded():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = lpr.bundled_model()
    import torch

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain(loaded):
    """Per prompt its ids, and what a replica that shares nothing makes of it: ids and steps."""
    engine = lpr.Engine.from_model(*loaded, decode=DECODE)
    found = []
    for prompt in PROMPTS:
        ids = engine.encode(prompt)
        engine.configure(DECODE)  # it knows no drafts again
        done = engine.generate([ids], lpr.SamplingParams(max_new_tokens=40))[0]
        found.append((ids, done.token_ids, done.stats.num_steps))
    return found


@pytest.fixture(scope="module")
def server():
    with redis_server() as running:
        yield running


@pytest.fixture(autouse=True)
def empty(request):
    if "server" in request.fixturenames:
        request.getfixturevalue("server").client().flushall()


def texts(history):
    """The documents of a history."""
    documents, last = [], []
    for token in history:
        if token == END:
            documents.append(last)
            last = []
        else:
            last.append(token)
    return documents


def check_shared(loaded, plain, url):
    with fleet(loaded, url) as (first, second):
        for ids, wanted, _ in plain:
            assert first.ask(ids)[0] == wanted
        second.learn(len(plain))
        for ids, wanted, steps in plain:
            found, taken = second.ask(ids)
            assert found == wanted
            assert taken < steps, "what the other has written makes it faster"
        assert second.counts.duplicate == second.counts.malformed == second.counts.outside_vocabulary == 0
        first.turn(lambda line: first.counts.own + first.counts.learnt >= 2 * len(plain))
        assert first.counts.own == first.counts.learnt == len(plain), "only others' outputs are learnt"
        assert len(texts(first.history())) == 2 * len(plain), "its own and the other's, each once"


def test_a_replica_drafts_from_what_another_has_written(loaded, plain, server):
    check_shared(loaded, plain, server.url)


def test_own_entries_that_are_not_known_are_found(loaded, plain, server, monkeypatch):
    monkeypatch.setattr(streams.Reader, "is_new", lambda self, entry: True)
    with pytest.raises(AssertionError, match="only others'"):
        check_shared(loaded, plain[:1], server.url)


def check_tenants(loaded, plain, url):
    ids, wanted, steps = plain[0]
    with fleet(loaded, url, follow=("", "a", "b")) as (first, second):
        assert first.ask(ids, "a")[0] == wanted
        until(lambda: second.counts.read_up, "the second one reads")
        second.turn(lambda line: second.counts.learnt)
        assert second.ask(ids, "b") == (wanted, steps), "another tenant is as slow as before"
        assert second.ask(ids, "") == (wanted, steps), "and so is a request of nobody"
        found, taken = second.ask(ids, "a")
        assert found == wanted and taken < steps, "the same tenant is faster"


def test_tenants_never_mix(loaded, plain, server):
    check_tenants(loaded, plain, server.url)


def one_stream_for_all(monkeypatch):
    monkeypatch.setattr(
        sharing, "stream_of", lambda fingerprint, model, tenant: store.stream_of(fingerprint, model, "")
    )


def one_trie_for_all(monkeypatch):
    monkeypatch.setattr(
        DraftIndexes, "learn", lambda self, command: learn(self, msgspec.structs.replace(command, tenant="b"))
    )


learn = DraftIndexes.learn


@pytest.mark.parametrize("fault", [one_stream_for_all, one_trie_for_all])
def test_a_tenant_that_is_dropped_from_the_key_is_found(loaded, plain, server, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="as slow as before|nobody"):
        check_tenants(loaded, plain, server.url)


def test_a_server_that_is_killed_and_comes_back_costs_no_request(loaded, plain):
    with redis_server() as server, fleet(loaded, server.url) as (first, second):
        ids, wanted, _ = plain[0]
        assert first.ask(ids)[0] == wanted
        second.learn(1)
        server.kill()
        for ids, wanted, _ in plain:  # while there is none
            assert first.ask(ids)[0] == second.ask(ids)[0] == wanted
        until(lambda: not second.counts.read_up and second.counts.write_errors, "the loss is noticed")
        server.start()
        until(lambda: second.counts.read_up and second.counts.write_up, "it is there again")
        until(lambda: first.counts.sent == 1 + len(plain), "what was finished meanwhile is sent")
        second.turn(lambda line: second.counts.learnt + second.counts.duplicate == 1 + len(plain))
        ids, wanted, _ = plain[1]
        assert second.ask(ids)[0] == wanted
        assert max(first.longest, second.longest) < 20, "no turn of the loop has waited for the store"


def raw(tokens, number=b"n" * 8, origin=b"o" * 8, version=entries.VERSION, num_prompt=0):
    data = tokens if isinstance(tokens, bytes) else np.array(tokens, "<i4").tobytes()
    return msgspec.msgpack.encode([version, origin, number, num_prompt, data])


GARBAGE = [
    {b"d": b"\xff\xfe garbage"},
    {b"d": b""},
    {b"other": raw([5])},
    {b"d": raw([])},
    {b"d": raw(b"\1\2\3")},
    {b"d": raw([5], version=99)},
    {b"d": raw([5], number=b"short")},
    {b"d": raw([5], num_prompt=1)},
    {b"d": raw([5] * (entries.MOST_TOKENS + 1))},
    {b"d": msgspec.msgpack.encode({"version": 1})},
    {b"d": b"\x91" * 5000},
    {b"d": os.urandom(300)},
]


def check_hostile(loaded, plain, server):
    """A replica that reads a stream full of noise, answers as if there were none."""
    client = server.client()
    with fleet(loaded, server.url, count=1) as (member,):
        for fields in GARBAGE:
            client.xadd(key_of(), fields)
        vocabulary = member.engine.model.vocab_size
        for index, (ids, wanted, _) in enumerate(plain):
            # Behind what the model will write stands what it cannot read: a draft would walk into it.
            outside = [vocabulary, 2**31 - 1, -2, -(2**31), vocabulary + 7]
            client.xadd(key_of(), {b"d": raw([*ids[-8:], *wanted[:3], *outside, *wanted[3:6]], bytes([index] * 8))})
        member.learn(len(plain))
        for ids, wanted, _ in plain:
            assert member.ask(ids)[0] == wanted
        assert member.counts.malformed == len(GARBAGE)
        assert member.counts.outside_vocabulary == 5 * len(plain)
        assert max(member.history()) < vocabulary


def test_garbage_costs_nothing_and_is_counted(loaded, plain, server):
    check_hostile(loaded, plain, server)


def test_a_vocabulary_that_is_not_looked_at_is_found(loaded, plain, server, monkeypatch):
    monkeypatch.setattr(streams, "within_vocabulary", lambda tokens, size: (tokens, 0))
    with pytest.raises(InputError, match="outside the model's vocabulary"):
        check_hostile(loaded, plain, server)


def test_an_answer_that_is_too_long_is_passed_over(loaded, plain, server, monkeypatch):
    monkeypatch.setattr(store, "MOST_ANSWER", 1 << 18)
    client = server.client()
    ids, wanted, steps = plain[0]
    with fleet(loaded, server.url) as (first, second):
        client.xadd(key_of(), {b"d": raw([5, 6, 7], b"before--")})
        client.xadd(key_of(), {b"d": b"x" * (1 << 20)})
        until(lambda: second.counts.passed_over, "the entry is passed over")
        time.sleep(0.01)
        assert first.ask(ids)[0] == wanted
        until(lambda: second.counts.read_up, "it reads on")
        second.turn(lambda line: second.counts.learnt >= 2)
        found, taken = second.ask(ids)
        assert found == wanted and taken < steps


@pytest.mark.slow
def test_a_key_of_another_type_stops_only_sharing(loaded, plain, server):
    client = server.client()
    client.set(key_of(), b"not a stream")
    ids, wanted, _ = plain[0]
    with fleet(loaded, server.url) as (first, second):
        assert first.ask(ids)[0] == second.ask(ids)[0] == wanted
        until(lambda: first.counts.unsent and first.counts.write_errors and first.counts.read_errors, "it is counted")
        client.delete(key_of())
        until(lambda: first.counts.read_up and second.counts.read_up, "the key is free again")
        assert first.ask(ids)[0] == wanted
        second.learn(1)


def check_doubles(loaded, plain, server):
    """Entries that come twice, and in any order, are learnt once."""
    client = server.client()
    with fleet(loaded, server.url, count=1) as (member,):
        found = [raw([*wanted], bytes([index] * 8)) for index, (_, wanted, _) in enumerate(plain)]
        for data in [*reversed(found), *found, found[1]]:
            client.xadd(key_of(), {b"d": data})
        member.turn(lambda line: member.counts.learnt + member.counts.duplicate == 2 * len(plain) + 1)
        assert member.counts.learnt == len(plain), "each is learnt once"
        assert texts(member.history()) == [wanted for _, wanted, _ in reversed(plain)]
        for ids, wanted, _ in plain:
            assert member.ask(ids)[0] == wanted


def test_doubles_and_another_order_cost_nothing(loaded, plain, server):
    check_doubles(loaded, plain, server)


def test_doubles_that_are_learnt_are_found(loaded, plain, server, monkeypatch):
    monkeypatch.setattr(streams, "MOST_SEEN", 0)
    with pytest.raises(AssertionError, match="once"):
        check_doubles(loaded, plain, server)


READ_SNAPSHOT = snapshots.from_bytes


def kept(folder):
    """How many documents the snapshot in a folder has, and up to which entry they go."""
    path = folder / snapshots.name_of(key_of())
    if not path.exists():
        return 0, ""
    history, read_to = READ_SNAPSHOT(key_of(), path.read_bytes())
    return len(texts(history.tolist())), read_to


def check_newcomer(loaded, plain, server, folder):
    """A newcomer knows what a snapshot holds, and reads on behind it: each output once."""
    where = {"draft_snapshots": str(folder), "draft_snapshot_every": 0.2}
    with fleet(loaded, server.url, **where) as (first, second):
        for ids, wanted, _ in plain[:2]:
            assert first.ask(ids)[0] == wanted
        second.learn(2)
        last = server.client().xrevrange(key_of(), count=1)[0][0].decode()
        end = time.monotonic() + stores.WAIT
        while kept(folder) != (2, last):
            assert time.monotonic() < end, f"no snapshot of everything: {kept(folder)}"
            for member in (first, second):  # the store decides which of them is asked
                member.idle()
    ids, wanted, _ = plain[2]
    with fleet(loaded, server.url, count=1) as (other,):
        assert other.ask(ids)[0] == wanted
        until(lambda: other.counts.sent == 1, "a third output is in the stream, behind the snapshot")
    with fleet(loaded, server.url, count=1, **where) as (newcomer,):
        newcomer.turn(lambda line: newcomer.counts.learnt)
        newcomer.turn(lambda line: not newcomer.drafts.is_waiting)
        assert newcomer.counts.snapshots_loaded == 1
        assert len(texts(newcomer.history())) == 3, "each output once"
        for ids, wanted, steps in plain:
            found, taken = newcomer.ask(ids)
            assert found == wanted and taken < steps


def test_a_newcomer_starts_warm_from_a_snapshot(loaded, plain, server, tmp_path):
    check_newcomer(loaded, plain, server, tmp_path)


@pytest.mark.slow
def test_a_snapshot_without_its_last_entry_is_found(loaded, plain, server, tmp_path, monkeypatch):
    with_all = snapshots.from_bytes
    monkeypatch.setattr(snapshots, "from_bytes", lambda stream, data: (with_all(stream, data)[0], ""))
    with pytest.raises(AssertionError, match="each output once"):
        check_newcomer(loaded, plain, server, tmp_path)


DAMAGE = {
    "nothing": lambda data: b"",
    "noise": lambda data: os.urandom(500),
    "cut": lambda data: data[:-4],
    "a flipped bit": lambda data: data[:-3] + bytes([data[-3] ^ 4]) + data[-2:],
    "a huge header": lambda data: b"\xff" * 8 + data[8:],
    "another stream": lambda data: snapshots.to_bytes(key_of("other"), np.array([5, 6], np.int32), "5-0"),
    "ids outside": lambda data: snapshots.to_bytes(key_of(), np.array([5, 1 << 30, -7], np.int32), "0-0"),
    "no id": lambda data: snapshots.to_bytes(key_of(), np.array([5, 6], np.int32), "garbage"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_snapshot_costs_a_cold_start(loaded, plain, server, tmp_path, damage, capsys):
    ids, wanted, _ = plain[0]
    sound = snapshots.to_bytes(key_of(), np.array(wanted, np.int32), "0-0")
    (tmp_path / snapshots.name_of(key_of())).write_bytes(DAMAGE[damage](sound))
    server.client().xadd(key_of(), {b"d": raw(wanted)})
    with fleet(loaded, server.url, count=1, draft_snapshots=str(tmp_path)) as (member,):
        member.learn(1)
        assert member.ask(ids)[0] == wanted
        assert member.counts.outside_vocabulary == (2 if damage == "ids outside" else 0)
        unreadable = damage not in ("ids outside", "no id")
        assert member.counts.snapshot_errors == unreadable
    assert capsys.readouterr().err.count("shared drafts: cannot read a snapshot") == unreadable


def test_every_rank_learns_alike_and_a_new_driver_reads_on(loaded, plain, server):
    """What was learnt and how far is in the commands: whichever rank drives next knows it."""
    ids, wanted, steps = plain[0]
    server.client().xadd(key_of(), {b"d": raw(wanted)})

    def program(comm):
        engine = lpr.Engine.from_model(*loaded, decode=DECODE, comm=comm)
        if comm.rank == 0:
            member = Member(loaded, server.url, engine=engine, facts={"origin": b"this one"})
            member.drafts.follow("")
            member.learn(1)
            found = member.ask(ids)
            member.drafts.close()
            engine.close()
        else:
            engine.work()
            found = None
        return found, engine.learned()[0].tolist(), dict(engine.read_to)

    first, second = run_ranks(ThreadWorld(2), program)
    assert first[1:] == second[1:] and list(first[2]) == [""]
    assert first[0][0] == wanted and first[0][1] < steps
    member = Member(loaded, server.url, facts={"origin": b"this one", "positions": second[2]})
    try:
        until(lambda: member.counts.read_up, "the new driver reads")
        time.sleep(0.1)
        batch = member.drafts.take()
        assert (batch is None or not len(batch.history)) and not member.counts.learnt, "the ranks know it already"
    finally:
        member.drafts.close()


@pytest.mark.parametrize("kind", ["a password", "TLS", "a Unix socket"])
def test_ways_to_reach_a_store(kind, tmp_path, monkeypatch):
    """One that asks for a password, one that speaks TLS and one on this machine; a wrong password is an error, and so
    is a certificate that nobody vouches for."""
    flags, path, query = [], tmp_path / "socket", ""
    if kind == "a password":
        flags = ["--requirepass", "sesame"]
    elif kind == "a Unix socket":
        flags = ["--unixsocket", str(path)]
    elif shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    else:
        key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
        extra = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run([*made, *extra], check=True, capture_output=True, timeout=300)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key]
        flags += ["--tls-ca-cert-file", certificate, "--tls-auth-clients", "no"]
        query = f"?ssl_ca_certs={certificate}"
    with redis_server(*flags) as server:
        urls = {
            "a password": server.url.replace("//", "//:sesame@"), "a Unix socket": f"unix://{path}",
            "TLS": f"rediss://localhost:{port if kind == 'TLS' else 0}/0{query}",
        }  # fmt: skip
        client = store.connect(urls[kind])
        try:
            assert client.ping() and client.xadd("s", {b"d": b"x"})
            assert [fields for _, fields in client.xread({"s": "0-0"})[0][1]] == [{b"d": b"x"}]
        finally:
            client.connection_pool.disconnect()
        if kind == "a password":
            stranger = store.connect(server.url)
            with pytest.raises(redis.exceptions.RedisError):
                stranger.xread({"s": "0-0"})
            stranger.connection_pool.disconnect()
            monkeypatch.setenv("LPR_DRAFT_STORE_PASSWORD", "sesame")
            friend = store.connect(server.url)
            assert friend.ping()
            friend.connection_pool.disconnect()
        if kind == "TLS":
            doubter = store.connect(urls[kind].partition("?")[0])
            with pytest.raises(redis.exceptions.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                doubter.ping()
            doubter.connection_pool.disconnect()
