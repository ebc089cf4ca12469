"""The driver's deliveries: whatever the front has got, what comes is what is beyond, as if nothing had been lost."""

import json
import threading

import pytest

import lpr
from lpr.config import SamplingParams
from lpr.engine.request import Request
from lpr.engine.text import TextStream
from lpr.model.sampling import grammar as grammar_module
from lpr.protocol import Abort, Chunk, ProtocolError, Stop, Submit
from lpr.serve.messages import Facts, Finish, Load, Pulse, Resume, Stepped
from lpr.serve.ranks.bridge import MOST_READ, EngineBridge

PROMPT = "def fibonacci(n):\n    "
NUM = 40


class Line:
    """The socket's two ends in memory: what the front sends is a script, what the driver says is kept."""

    def __init__(self, script):
        self.load = Load()
        self.said = []
        self._script = script

    def moved(self, load):
        self.load = load

    def send(self, message):
        self.said.append(message)

    def flush(self):
        pass

    def take(self, wait):
        return self._script(self)

    def chunks(self, id):
        return [
            chunk for message in self.said if isinstance(message, Stepped) for chunk in message.chunks if chunk.id == id
        ]


@pytest.fixture(scope="module")
def engine():
    decode = lpr.DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=4)
    return lpr.Engine.from_pretrained(lpr.bundled_model(), decode, dtype="float32")


@pytest.fixture(scope="module")
def regex():
    llguidance = pytest.importorskip("llguidance")
    return llguidance.LLMatcher.grammar_from_regex("[a-z]{3,8}( [a-z]{3,8}){4,20}")


def drive(engine, *messages, steps=None):
    """Send `messages` to a new driver of `engine`, and stop it when nothing runs, or after so many turns."""
    left = list(messages)
    turns = 0

    def script(line):
        nonlocal turns
        turns += 1
        if left:
            taken, left[:] = list(left), []
            return taken
        if turns > (steps or 10**6) or (engine.is_idle and not bridge._new and steps is None):
            return [Stop()]
        return []

    line = Line(script)
    bridge = EngineBridge(engine, line, "bundled")
    bridge.run()
    return line


def put_together(chunks, ids=(), text=""):
    """What a front makes of chunks: ids, text, log-probabilities, the end."""
    ids, logprobs, finish = list(ids), [], None
    for chunk in chunks:
        chunk = chunk.after(len(ids), len(text))
        assert chunk.token_ids == [] or chunk.start == len(ids)
        ids += chunk.token_ids
        text += chunk.text
        logprobs += [each.logprob for each in chunk.logprobs or ()]
        finish = chunk.finish_reason or finish
    return ids, text, logprobs, finish


def submit(id, params, prompt, ids=(), details=False):
    return Submit(id, [*prompt, *ids], params, len(prompt), details=details)


KINDS = {
    "greedy": {"stop": ("print(", "\n\n\n\n")},
    "sampled, all penalties, a stop string that straddles": {
        "temperature": 0.8, "seed": 3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
        "min_new_tokens": 12, "no_repeat_ngram_size": 5, "logprobs": 2, "logit_bias": ((66, 1.5),),
    },
    "a grammar": {"temperature": 0.8, "seed": 1, "logprobs": 0},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_goes_on_from_every_point_of_its_stream(engine, regex, kind):
    """Ranks that know nothing of it any more, and a front that has got any number of its steps."""
    more = dict(KINDS[kind])
    if kind == "a grammar":
        more["grammar"] = regex
    prompt = engine.encode(PROMPT)
    params = SamplingParams(max_new_tokens=NUM, **more)
    plain = engine.generate([prompt], params)[0]
    if "logprobs" in more and "grammar" not in more:  # a stop string that begins in one token and ends in another
        shown = plain.text
        params = SamplingParams(max_new_tokens=NUM, stop=(shown[len(shown) // 2 : len(shown) // 2 + 9],), **more)
        plain = engine.generate([prompt], params)[0]
        assert plain.finish_reason == "stop"
    assert engine.is_idle
    chunks = drive(engine, Resume([]), submit(1, params, prompt)).chunks(1)
    wanted = put_together(chunks)
    assert wanted[0] == plain.token_ids and wanted[1] == plain.text and wanted[3] == plain.finish_reason
    for given in range(len(chunks) + 1):
        ids, text, logprobs, _ = put_together(chunks[:given])
        rest = drive(engine, Resume([2]), submit(2, params, prompt, ids)).chunks(2)
        found = put_together(rest, ids, text)
        assert (found[0], found[1], found[3]) == (wanted[0], wanted[1], wanted[3]), f"after chunk {given}"
        assert [*logprobs, *found[2]] == pytest.approx(wanted[2], abs=1e-4)
        assert rest[-1].usage is not None and rest[-1].usage.num_tokens == len(wanted[0]) - len(ids)


def test_a_grammar_is_compiled_beside_the_steps(engine, monkeypatch):
    """A stream goes on while the grammar of another request is compiled, however long that takes."""
    llguidance = pytest.importorskip("llguidance")
    is_done, matcher = threading.Event(), grammar_module.matcher
    monkeypatch.setattr(grammar_module, "matcher", lambda *args: is_done.wait(20) and matcher(*args))
    prompt, slow = engine.encode(PROMPT), llguidance.LLMatcher.grammar_from_regex("x[0-9]{7,9}y")
    plain = SamplingParams(max_new_tokens=NUM, ignore_eos=True)
    messages = [submit(1, SamplingParams(max_new_tokens=8, grammar=slow), prompt), submit(2, plain, prompt)]

    def script(line):
        if messages:
            return [messages.pop()]
        if line.chunks(2) and line.chunks(2)[-1].finish_reason:
            is_done.set()
        return [Stop()] if line.chunks(1) and line.chunks(1)[-1].finish_reason else []

    line = Line(script)
    EngineBridge(engine, line, "bundled").run()
    ends = [chunk.id for message in line.said if isinstance(message, Stepped) for chunk in message.chunks
            if chunk.finish_reason]  # fmt: skip
    assert is_done.is_set() and ends == [2, 1]
    assert put_together(line.chunks(1))[1].startswith("x")


@pytest.mark.parametrize("kind", list(KINDS)[:2])
def test_a_front_that_has_the_ids_alone_is_told_how_much_text_they_are(engine, kind):
    """As of another service: the first chunk begins behind the text that came with these ids."""
    go_on_by_ids(engine, KINDS[kind])


def go_on_by_ids(engine, more):
    prompt = engine.encode(PROMPT)
    params = SamplingParams(max_new_tokens=NUM, **more)
    chunks = drive(engine, Resume([]), submit(1, params, prompt)).chunks(1)
    wanted = put_together(chunks)
    for given in range(1, len(chunks)):
        ids, text, _, _ = put_together(chunks[:given])
        rest = drive(engine, Resume([2]), submit(2, params, prompt, ids)).chunks(2)
        assert rest[0].start_character == len(text)
        assert put_together(rest, ids, text)[:2] == wanted[:2]


def test_a_whole_text_sent_again_shows(engine, monkeypatch):
    true = Request.resend

    def whole(self, num_tokens):
        chunk = true(self, num_tokens)
        return Chunk(self.id, chunk.token_ids, self.text_stream.taken, start=num_tokens)

    monkeypatch.setattr(Request, "resend", whole)
    with pytest.raises(AssertionError):
        go_on_by_ids(engine, KINDS["greedy"])


@pytest.mark.parametrize("has", [-3, -1, 0, 1, 3])
def test_a_rank_that_takes_over_sends_what_is_beyond(engine, has):
    """The front has got as much as the ranks, steps more or steps less; each is cut or made up for."""
    take_over(engine, has)


@pytest.mark.parametrize(
    "where, name, fault, has",
    [
        (Request, "resend", lambda self, num_tokens: Chunk(self.id, [], ""), -3),
        (Chunk, "after", lambda self, num_tokens, num_characters: self, 3),
        (Request, "take", lambda self: taken(self)[self.num_output % 2 :], 0),
    ],
)
def test_a_fault_in_the_delivery_shows(engine, monkeypatch, where, name, fault, has):
    monkeypatch.setattr(where, name, fault)
    with pytest.raises((AssertionError, ProtocolError)):
        take_over(engine, has)


taken = Request.take


def take_over(engine, has):
    """A request goes on under another driver, behind a front that has got about `has` tokens more than the ranks."""
    prompt = engine.encode(PROMPT)
    params = SamplingParams(max_new_tokens=NUM, temperature=0.8, seed=7, logprobs=1, stop=("zzz",))
    chunks = drive(engine, Resume([]), submit(1, params, prompt)).chunks(1)
    wanted = put_together(chunks)
    drive(engine, Resume([]), submit(5, params, prompt, details=True), submit(6, params, prompt), steps=3)
    running = engine.requests[5]
    at = running.num_output
    assert 0 < at < NUM
    # What a lost driver has said: with any borders, as those of another tree are others.
    ids = wanted[0][: at + has]
    stream = TextStream(engine.tokenizer, prompt, params, engine.eos_token_ids)
    for token in ids:
        assert stream.push(token) is None
    text, logprobs = stream.take(), wanted[2][: len(ids)]
    line = drive(engine, Resume([5]), submit(5, params, prompt, ids, details=True))
    found = put_together(line.chunks(5), ids, text)
    assert (found[0], found[1], found[3]) == (wanted[0], wanted[1], wanted[3])
    assert [*logprobs, *found[2]] == pytest.approx(wanted[2], abs=1e-4)
    assert all(len(chunk.sources) == len(chunk.token_ids) for chunk in line.chunks(5))
    assert line.chunks(6) == [] and not engine.requests, "what is not wanted any more is aborted"


def test_a_request_that_is_aborted_before_it_is_submitted_again(engine):
    prompt = engine.encode(PROMPT)
    drive(engine, Resume([]), submit(8, SamplingParams(max_new_tokens=NUM), prompt), steps=2)
    assert 8 in engine.requests
    line = drive(engine, Resume([8]), Abort(8))
    assert line.chunks(8) == [] and not engine.requests


def test_a_complete_text_ends_with_what_it_took(engine):
    prompt, params = engine.encode(PROMPT), SamplingParams(max_new_tokens=NUM)
    drive(engine, Resume([]), submit(10, params, prompt), steps=3)
    line = drive(engine, Resume([10]), submit(10, params, prompt), Finish(10), Finish(11))
    (last,) = [chunk for chunk in line.chunks(10) if chunk.finish_reason is not None]
    assert (last.token_ids, last.text, last.finish_reason) == ([], "", "stop")
    assert 0 < last.usage.num_steps <= last.usage.num_tokens
    assert not engine.requests and not line.chunks(11)


def test_the_first_words_are_facts_and_a_bad_request_is_said(engine):
    line = drive(engine, Resume([]), submit(9, SamplingParams(max_new_tokens=10**6), [5]))
    assert isinstance(line.said[0], Facts) and json.loads(line.said[0].tokenizer)
    assert [chunk.finish_reason for chunk in line.chunks(9)] == ["error"]


def test_a_gap_is_noticed():
    with pytest.raises(ProtocolError, match="goes on at token 5"):
        Chunk(1, [7], "x", start=5).after(4, 0)


def test_the_front_knows_before_a_step_which_requests_it_runs(engine):
    """A step may be the last of all ranks: then the front has to know on which requests they died."""
    prompt, params = engine.encode(PROMPT), SamplingParams(max_new_tokens=4)
    line = drive(engine, Resume([]), *(submit(id, params, prompt) for id in range(20, 26)))
    begun = set()
    for message in line.said:
        if isinstance(message, Pulse):
            begun |= set(message.load.running)
        elif isinstance(message, Stepped):
            assert begun >= {chunk.id for chunk in message.chunks}
    assert begun == set(range(20, 26))


def test_delivered_text_is_read_a_little_between_two_steps_and_never_after_an_abort(engine, monkeypatch):
    """One turn reads what one request has delivered, however many come; those that end meanwhile cost nothing."""
    read, submit_one = [], EngineBridge._submit

    def counting(self, message):
        read.append((self._num_steps, message.id))
        return submit_one(self, message)

    monkeypatch.setattr(EngineBridge, "_submit", counting)
    prompt, params = engine.encode(PROMPT), SamplingParams(max_new_tokens=MOST_READ + 8, ignore_eos=True)
    many = [submit(id, params, prompt, prompt[-1:] * MOST_READ) for id in range(700, 704)]
    drive(engine, *many, submit(704, params, prompt), Abort(702), steps=6)
    assert [id for _, id in read] == [700, 701, 703, 704]
    assert len({step for step, _ in read[:3]}) == 3
    for request in list(engine.requests.values()):
        engine.abort(request)


def test_delivered_text_is_decoded_once(engine, monkeypatch):
    made, prompt = [], engine.encode(PROMPT)
    monkeypatch.setattr(
        TextStream, "extend", lambda self, ids, extend=TextStream.extend: made.append(len(ids)) or extend(self, ids)
    )
    params = SamplingParams(max_new_tokens=NUM, ignore_eos=True)
    line = drive(engine, submit(710, params, prompt, prompt[-1:] * 30))
    assert made.count(30) == 1 and line.chunks(710)[0].start_character > 0
