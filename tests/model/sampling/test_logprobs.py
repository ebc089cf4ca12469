"""Log-probabilities, OpenAI's penalties and grammars, against plain decoding that is written out here."""

import copy
import itertools
import json
import re

import pytest
import torch

import lpr
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.core.grammar import matcher
from lpr.core.noise_keys import noise_key
from lpr.model.sampling import grammar as grammar_module
from lpr.model.sampling.specification import gumbel
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadWorld, run_ranks

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 4, 2] * 6]
TREES = DecodeConfig(window_size=5, ngram_size=4, guess_set_size=4, trie_nodes=24, max_batch_size=2)


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=7, spread=0.12)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def generate(request, model):
    """`generate(prompts, params)` of one rank, or of the first of two."""

    def run(prompts, params):
        def program(comm):
            engine = Engine.from_model(copy.deepcopy(model), decode=TREES, comm=comm)
            if comm.rank:
                engine.work()
                return None
            done = engine.generate(prompts, params)
            engine.close()
            return done

        return run_ranks(ThreadWorld(request.param), program)[0]

    return run


def naive(model, prompt, params, change=lambda scores, output: scores):
    """Plain decoding, one token at a time: ids, and the model's log-probabilities [num_tokens, V]."""
    ids, rows = list(prompt), []
    for _ in range(params.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        rows.append(torch.log_softmax(logits, -1))
        scores = change(logits.clone(), ids[len(prompt) :])
        if params.temperature:
            keys = torch.tensor([[noise_key(params.seed, len(ids))]])
            scores = scores / params.temperature + gumbel(keys, torch.arange(len(scores))[None])[0]
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.slow(first=2)
def test_logprobs_are_the_models_own(generate, model, temperature):
    params = [SamplingParams(max_new_tokens=20, temperature=temperature, seed=4, logprobs=n) for n in (3, 0)]
    for prompt, each, done in zip(PROMPTS, params, generate(PROMPTS, params), strict=True):
        ids, rows = naive(model, prompt, each)
        assert done.token_ids == ids and len(done.logprobs) == len(ids)
        for token, row, found in zip(ids, rows, done.logprobs, strict=True):
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert len(found.top) == each.logprobs
            if each.logprobs:
                best = row.topk(each.logprobs)
                assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)
                assert [token for token, _ in found.top] == best.indices.tolist()


def test_nobody_pays_who_does_not_ask(model):
    def program(comm):
        engine = Engine.from_model(model, decode=TREES, comm=comm)
        if comm.rank:
            engine.work()
            return None
        plain = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=12))[0]
        steps, gathered = plain.stats.num_steps, len(comm.gathered_bytes)
        asked = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=12, logprobs=1))[0]
        more = len(comm.gathered_bytes) - gathered
        engine.close()
        return plain, asked, steps, more

    plain, asked, steps, more = run_ranks(ThreadWorld(1), program)[0]
    assert plain.logprobs is None and len(asked.logprobs) == 12
    assert more == asked.stats.num_steps, "they travel in the step's one collective"


def test_a_processed_choice_has_the_models_own_logprob(generate, model):
    params = SamplingParams(max_new_tokens=12, repetition_penalty=1.5, logprobs=1)
    done = generate(PROMPTS[:1], params)[0]
    ids = list(PROMPTS[0])
    for token, found in zip(done.token_ids, done.logprobs, strict=True):
        with torch.no_grad():
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
        ids.append(token)


@pytest.mark.parametrize(
    "temperature, presence, frequency, bias", [(0.0, 0.7, 0.0, ()), (0.8, -0.5, 0.3, ((7, 2.0), (9, -50.0)))]
)
@pytest.mark.slow(first=1)
def test_penalties_and_bias_as_openai_defines_them(generate, model, temperature, presence, frequency, bias):
    params = SamplingParams(
        max_new_tokens=24, temperature=temperature, seed=2, presence_penalty=presence, frequency_penalty=frequency,
        logit_bias=bias,
    )  # fmt: skip

    def change(scores, output):
        for token in set(output):
            scores[token] -= presence + frequency * output.count(token)
        for token, value in bias:
            scores[token] += value
        return scores

    for prompt, done in zip(PROMPTS, generate(PROMPTS, params), strict=True):
        assert done.token_ids == naive(model, prompt, params, change)[0]
    plain = generate(PROMPTS, SamplingParams(max_new_tokens=24, temperature=temperature, seed=2))
    assert [done.token_ids for done in plain] != [done.token_ids for done in generate(PROMPTS, params)]


def test_a_known_text_is_scored_in_few_steps_and_not_learnt(generate, model):
    """A forced output is evaluated as a draft that is always right; behind it the model goes on by itself."""
    text = PROMPTS[1] + PROMPTS[0] + [(7 * i) % 89 for i in range(40)]
    free = SamplingParams(max_new_tokens=8)
    params = SamplingParams(max_new_tokens=len(text) - 1 + 8, forced_ids=text[1:], logprobs=1, temperature=0.9, seed=5)
    scored, after, again = generate([text[:1], text, text[:1]], [params, free, params])
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([text])).logits[0].float(), -1)
    assert scored.token_ids[: len(text) - 1] == text[1:] and scored.token_ids == again.token_ids
    wanted = [float(rows[place, token]) for place, token in enumerate(text[1:])]
    assert [each.logprob for each in scored.logprobs[: len(wanted)]] == pytest.approx(wanted, abs=1e-4)
    assert scored.stats.num_steps < len(text) / 2
    assert after.token_ids == naive(model, text, free)[0]
    plain = SamplingParams(max_new_tokens=8, temperature=0.9, seed=5)
    assert scored.token_ids[len(text) - 1 :] == naive(model, text, plain)[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"forced_ids": (-1,)},
        {"logprobs": 21},
        {"logprobs": -1},
        {"presence_penalty": float("nan")},
        {"logit_bias": ((-1, 1.0),)},
    ],
)
def test_what_cannot_be_asked_for(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        SamplingParams(**wrong)


# Grammars.

llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")
REGEX = llguidance.LLMatcher.grammar_from_regex(r"def [a-z]{2,8}\([a-z]\):\n    return [a-z]+")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["one", "two"]},
        "n": {"type": "integer"},
    },
    "required": ["name", "kind", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bundled():
    return {
        name: Engine.from_pretrained(lpr.bundled_model(), decode, dtype="float32")
        for name, decode in (("trees", DecodeConfig()), ("plain", DecodeConfig.autoregressive()))
    }


@pytest.mark.parametrize("temperature", [0.9])
def test_an_output_keeps_to_its_grammar_and_equals_plain_decoding(bundled, temperature):
    schema = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    params = [
        SamplingParams(max_new_tokens=80, temperature=temperature, seed=seed, grammar=grammar)
        for seed in range(2)
        for grammar in (REGEX, schema)
    ]
    prompts = ["# code\n"] * len(params)
    drafted, plain = (bundled[name].generate(prompts, params) for name in ("trees", "plain"))
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    for each, done in zip(params, drafted, strict=True):
        assert done.error is None
        if done.finish_reason != "stop":
            continue
        if each.grammar == REGEX:
            assert re.fullmatch(r"def [a-z]{2,8}\([a-z]\):\n    return [a-z]+", done.text), done.text
        else:
            found = json.loads(done.text)
            assert set(found) == {"name", "kind", "n"} and found["kind"] in ("one", "two")
    assert any(done.finish_reason == "stop" for done in drafted)


def test_drafts_beyond_the_end_of_a_text_that_nothing_can_follow(bundled):
    """The trie drafts the end of an output that has come before; llguidance takes no token behind such a text."""
    grammar = llguidance.LLMatcher.grammar_from_regex("[0-9]{2}")
    processor = grammar_module.Grammar(grammar, 0, bundled["plain"].tokenizer)
    one, two = [bundled["plain"].tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "12"]
    end = bundled["plain"].tokenizer.eos_token_id

    def allowed(*path):
        return (processor(torch.tensor([path], dtype=torch.long), torch.zeros(1, 4104)) > -1).sum().item()

    first, second = allowed(), allowed(one)
    assert first > second >= 10 and [allowed(one, two), allowed(one, two, end), allowed(one)] == [1, 1, second]
    assert [allowed(one, two, end), allowed(two, one), allowed()] == [1, 1, first]
    with pytest.raises(ValueError, match="left its grammar"):
        allowed(one, two, one)
    params = SamplingParams(max_new_tokens=9, grammar=grammar)
    for name in bundled:
        done = [bundled[name].generate(["a = "], params)[0] for _ in range(4)]
        assert [(each.finish_reason, each.text) for each in done] == [("stop", done[0].text)] * 4, done[-1]


def test_a_bad_grammar_is_refused(bundled):
    with pytest.raises(InputError, match="grammar"):
        bundled["plain"].submit("a", SamplingParams(grammar="nonsense"))


def test_requests_of_one_grammar_compile_it_once(bundled, monkeypatch):
    made = []
    monkeypatch.setattr(grammar_module, "matcher", lambda *args: made.append(args[1]) or matcher(*args))
    regex = llguidance.LLMatcher.grammar_from_regex("[ab]{5,9}c")
    tokenizer = bundled["plain"].tokenizer
    compiler = grammar_module.Compiler(tokenizer, 4104)
    several = [compiler.matcher(regex) for _ in range(128)]
    assert made == [regex]
    token = tokenizer.encode("a")[0]
    assert several[0].consume_token(token) and several[1].compute_bitmask() == several[2].compute_bitmask()


def test_kept_grammars_are_bounded_by_what_they_took(bundled, monkeypatch):
    """Also where their memory lies in the holes of others, which no count of the process shows."""
    seconds = itertools.count()
    monkeypatch.setattr(grammar_module.time, "thread_time", lambda: float(next(seconds)))
    monkeypatch.setattr(grammar_module, "memory_used", lambda: 0)
    compiler = grammar_module.Compiler(bundled["plain"].tokenizer, 4104)
    for number in range(12):
        compiler.begin(llguidance.LLMatcher.grammar_from_regex(f"[ab]{{{number + 1}}}c")).result()
    most = grammar_module.MOST_BYTES // grammar_module.BYTES_PER_SECOND
    assert len(compiler._compiled) == most + 1, "the last one is counted with the next"


TOO_COMPLEX = llguidance.LLMatcher.grammar_from_regex("(?:a?){500}a{500}")  # it can be read, and has no mask


def test_a_grammar_that_fails_at_work_ends_its_request_only(bundled):
    for engine in bundled.values():
        params = [SamplingParams(max_new_tokens=60, ignore_eos=True, grammar=each) for each in (TOO_COMPLEX, "")]
        failed, other = engine.generate(["# code\n"] * 2, params)
        assert failed.finish_reason == "error" and "lexer error" in failed.error
        assert other.error is None and len(other.token_ids) == 60
        again = engine.generate(["# code\n"], SamplingParams(max_new_tokens=60, ignore_eos=True))[0]
        assert again.token_ids == other.token_ids


def test_a_panic_of_llguidance_ends_its_request_only(bundled, monkeypatch):
    class PanicException(BaseException):  # what pyo3 raises
        pass

    def panic(*_):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(grammar_module, "matcher", panic)
    grammar = llguidance.LLMatcher.grammar_from_regex("[xyz]{3,7}")
    done = bundled["plain"].generate(["# code\n"], SamplingParams(max_new_tokens=5, grammar=grammar))[0]
    assert done.finish_reason == "error" and "index out of bounds" in done.error
