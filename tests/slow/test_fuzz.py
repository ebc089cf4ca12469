"""Random requests in random modes on a pool that is too small; each answer against plain decoding alone.

    python -m tests.slow.test_fuzz --seconds 600 --seed 3          all modes by turns
    python -m tests.slow.test_fuzz llama --ranks 3 --home 0 --exact --adaptive --padded --disturbed

The same seed gives the same requests and the same disturbances. Disturbances are interrupts at any line, hooks that
raise (both in a world of one, where an engine goes on), and aborts and submits inside steps.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.dist.comm import Comm
from lpr.engine.hooks import StepHooks
from lpr.engine.options import EngineOptions
from lpr.engine.request import Request
from lpr.model.loader import Loaded, wrap
from lpr.protocol import Chunk
from tests.fakes.interruptions import interrupted_at
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadWorld, run_ranks

VOCABULARY = 97
NUM_LETTERS = VOCABULARY - 3
"""Three ids have no token."""
MOST_LINES = 6000
"""About the lines of lpr in a step."""
TOLERANCE = 1e-3
"""Of log-probabilities: the height of a product decides its last bits in float32."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "xglm": {"num_layers": 2, "ffn_dim": 96, "attention_heads": 4},
    "qwen3_next": {
        **HYBRID, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 16},
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """How the engine under test works."""

    family: str = "llama"
    ranks: int = 1
    home: Any = "auto"
    exact: bool = False
    adaptive: bool = False
    padded: bool = False
    disturbed: bool = False
    swap: float | None = None
    self_draft: Any = "off"
    pool: int = 350
    """Tokens of the KV cache: too few for the requests that run at once."""

    def decode(self) -> DecodeConfig:
        """The settings."""
        sizes: dict[str, Any] = {} if self.adaptive else {"window_size": 3, "guess_set_size": 2, "trie_nodes": 16}
        home = {"home_ranks": self.home} if self.ranks > 1 else {}
        pool = self.pool + 300 * self.adaptive  # trees of any size keep rows for themselves
        fixed = {"prefill_chunk": 48, "max_batch_size": 4, "num_candidates": 4, "kv_tokens": pool}
        return DecodeConfig(**fixed, **sizes, **home)


MODES = [
    Mode(disturbed=True),
    Mode(ranks=2, home=0),
    Mode("qwen3_next", disturbed=True),
    Mode(ranks=3, disturbed=True),
    Mode("mistral", padded=True, disturbed=True),
    Mode(exact=True, disturbed=True),
    Mode(adaptive=True, ranks=2),
    Mode("jamba", ranks=2, home=0, disturbed=True),
    Mode("gemma2", disturbed=True, swap=0.0),
    Mode(exact=True, ranks=3, home=0, adaptive=True),
    Mode("lfm2", ranks=3),
    Mode("xglm", adaptive=True, disturbed=True),
    Mode("mamba2", padded=True, disturbed=True),
    Mode("qwen3_next", ranks=3, home=0, padded=True),
    Mode("mistral", ranks=3, home=1, disturbed=True),
    Mode(adaptive=True, disturbed=True, swap=0.1),
    Mode(disturbed=True, self_draft="int8"),
    Mode("gemma2", adaptive=True, disturbed=True, self_draft="auto"),
    Mode(ranks=3, self_draft="int4"),
]
"""What runs without a mode: every family, one to three ranks, and each of the other settings."""


@cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a letter per token."""
    names = [chr(97 + number) if number < 26 else chr(0x4E00 + number) for number in range(NUM_LETTERS)]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def model_of(family: str) -> PreTrainedModel:
    """A tiny random model."""
    return tiny_model(family, seed=1, spread=0.12, **FAMILIES[family])


def some(dice: random.Random, count: int) -> list[int]:
    """Random ids."""
    return [dice.randrange(VOCABULARY) for _ in range(count)]


def random_params(dice: random.Random) -> SamplingParams:
    """Parameters of all kinds."""
    most = dice.choice((1, 2, 3, 8, 20, 40, 60))
    known: dict[str, Any] = {"max_new_tokens": most}
    if dice.random() < 0.5:
        known |= {"temperature": dice.choice((0.3, 0.8, 1.0, 2.0)), "seed": dice.choice((0, -1, 7, 2**63, 2**64 - 1))}
    offers: dict[str, tuple[float, Callable[[], Any]]] = {
        "top_k": (0.15, lambda: dice.choice((1, 2, 5, 40, 200))),
        "top_p": (0.15, lambda: dice.choice((1e-9, 0.3, 0.9, 0.999))),
        "min_p": (0.1, lambda: dice.choice((0.01, 0.2, 1.0))),
        "repetition_penalty": (0.2, lambda: dice.choice((0.8, 1.2, 1.7))),
        "no_repeat_ngram_size": (0.15, lambda: dice.choice((1, 2, 3))),
        "presence_penalty": (0.15, lambda: dice.choice((-1.0, 0.7))),
        "frequency_penalty": (0.15, lambda: dice.choice((-0.5, 0.7))),
        "logit_bias": (0.15, lambda: tuple((token, dice.choice((-100.0, 3.0))) for token in some(dice, 3))),
        "stop_token_ids": (0.3, lambda: tuple(some(dice, dice.choice((1, 3, 8))))),
        "min_new_tokens": (0.3, lambda: dice.randrange(most + 1)),
        "logprobs": (0.25, lambda: dice.choice((0, 1, 5, 20))),
        "forced_ids": (0.07, lambda: tuple(some(dice, dice.choice((1, 5, 12))))),
        "stop": (0.3, lambda: tuple(letters().decode([token % NUM_LETTERS]) * 2 for token in some(dice, 3))),
    }
    known |= {name: make() for name, (chance, make) in offers.items() if dice.random() < chance}
    return SamplingParams(**known)


def random_cases(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that begin alike, of lengths around those of pages, and their parameters."""
    dice = random.Random(seed)
    begins = [some(dice, 130) for _ in range(3)]
    lengths = (0, 1, 15, 16, 17, 31, 32, 33, 48, 64, 96, 112, 128, 130)
    cases = []
    for _ in range(count):
        params = random_params(dice)
        prompt = dice.choice(begins)[: dice.choice(lengths)] + some(dice, dice.choice((0, 1, 1, 2, 5, 20)))
        cases.append((prompt or some(dice, 1), params))
    return cases


class Plain:
    """Answers of plain decoding, one request at a time and without a prefix cache; each is made once."""

    def __init__(self, loaded: Loaded, exact: bool) -> None:
        options = EngineOptions(prefix_reuse=False, exact=exact, swap_space=0)
        self.engine = Engine(loaded, DecodeConfig.autoregressive(max_batch_size=1), options)
        self.known: dict[int, Completion] = {}

    def __call__(self, number: int, prompt: list[int], params: SamplingParams) -> Completion:
        """The answer to a case."""
        if number not in self.known:
            self.known[number] = self.engine.generate([prompt], params)[0]
        return self.known[number]


@lru_cache(maxsize=8)
def answers(family: str, exact: bool, seed: int, count: int) -> tuple[list[tuple[list[int], SamplingParams]], Plain]:
    """Cases and what plain decoding answers, for all modes of a family."""
    return random_cases(seed, count), Plain(wrap(model_of(family), letters()), exact)


class HookError(Exception):
    """Raised by a hook."""


class Disturbing(StepHooks):
    """Calls something at a random place of a step, if it is set."""

    def __init__(self, dice: random.Random) -> None:
        self.action: Callable[[], Any] | None = None
        self._dice = dice

    def _at(self, *_: Any) -> None:
        if self.action is not None and self._dice.random() < 0.2:
            action, self.action = self.action, None
            action()

    begin_step = end_phase = while_busy = end_step = _at


def fail() -> None:
    """What a hook does that raises."""
    raise HookError


@dataclass
class Soak:
    """Requests that come and go, and what was wrong with their answers."""

    engine: Engine
    cases: Sequence[tuple[list[int], SamplingParams]]
    plain: Plain
    mode: Mode
    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    running: dict[Request, tuple[int, int, list[Chunk]]] = field(default_factory=dict)
    """Each with the number of its case, the tokens delivered before, and its chunks."""

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Ask while `goes_on`, and wait for all answers."""
        hooks = self.engine.hooks = Disturbing(self.dice)
        while (more := goes_on()) or self.running or not self.engine.is_idle:
            if more:
                self.ask()
            if self.mode.disturbed and self.dice.random() < 0.05 and self.running:
                victim = self.dice.choice(list(self.running))
                hooks.action = self.dice.choice((partial(self.engine.abort, victim), self.submit))
                self.counts["calls in steps"] += 1
            with self.disturbed(hooks):
                if self.running and self.dice.random() < 0.02:
                    self.engine.abort(self.dice.choice(list(self.running)))
                self.engine.step()
            self.counts["steps"] += 1
            if not self.engine.is_idle and not self.running and not more:
                self.counts["idle turns"] += 1
                assert self.counts["idle turns"] < 10_000, f"requests that nobody asked: {self.engine.requests}"
            for request in list(self.running):
                self.look(request)
        hooks.action = None

    def ask(self) -> None:
        """Submit some requests, and learn something now and then."""
        while len(self.running) < 12 and self.dice.random() < 0.5:
            self.submit()
        if self.dice.random() < 0.01:
            self.engine.learn(some(self.dice, 30))

    def submit(self) -> None:
        """Submit a case in some way."""
        dice, number = self.dice, self.dice.randrange(len(self.cases))
        prompt, params = self.cases[number]
        wanted = self.plain(number, prompt, params)
        tenant = dice.choice(("", "", "other"))
        how: dict[str, Any] = {"tenant": tenant, "share": tenant, "priority": dice.choice((0, 0, 3, -3))}
        how |= {"learns": dice.random() < 0.9, "details": dice.random() < 0.2}
        if dice.random() < 0.3:
            guess = list(wanted.token_ids)
            for _ in range(dice.choice((0, 1, 4))):
                at = dice.randrange(len(guess) + 1)
                guess[at : at + dice.randrange(2)] = some(dice, dice.randrange(2))
            how["prediction"] = guess or [3]
        delivered = 0
        if dice.random() < 0.15 and params.logprobs is None:
            delivered = dice.randrange(len(wanted.token_ids) + 1)
            how["delivered"] = wanted.token_ids[:delivered]
        self.running[self.engine.submit(prompt, params, **how)] = number, delivered, []
        self.counts["requests"] += 1

    @contextmanager
    def disturbed(self, hooks: Disturbing) -> Iterator[None]:
        """A step that is interrupted now and then, or in which a hook raises."""
        kind = ""
        if self.mode.disturbed and self.mode.ranks == 1 and self.dice.random() < 0.06:
            kind = self.dice.choice(("hook", "interrupt"))
        if kind == "hook":
            hooks.action = fail
        make = self.dice.choice((KeyboardInterrupt, MemoryError))
        try:
            if kind == "interrupt":
                with interrupted_at(self.dice.randrange(1, MOST_LINES), make):
                    yield
            else:
                yield
        except (HookError, KeyboardInterrupt, MemoryError) as failure:
            self.counts[type(failure).__name__] += 1

    def look(self, request: Request) -> None:
        """Take a request's chunks now and then, and compare its answer once it is over."""
        number, delivered, chunks = self.running[request]
        if self.dice.random() < 0.5 or request.finish_reason is not None:
            chunks += request.take()
        if request.finish_reason is None:
            return
        del self.running[request]
        self.counts[request.finish_reason] += 1
        prompt, params = self.cases[number]
        try:
            compare(request.completion(), self.plain(number, prompt, params), chunks, params, delivered)
        except AssertionError as failure:
            self.wrong.append(f"{self.mode} case {number}: {prompt} {params}: {failure}"[:2000])


def compare(found: Completion, wanted: Completion, chunks: list[Chunk], params: SamplingParams, delivered: int) -> None:
    """Assert that an answer is the one of plain decoding, as a whole or up to where it was ended."""
    ids = [token for chunk in chunks for token in chunk.token_ids]
    text = "".join(chunk.text for chunk in chunks)
    error = found.error or ""  # a processor that an exception has interrupted fails alone
    is_told = error.startswith("an exception ended its step") or error.endswith(" failed: MemoryError: MemoryError")
    ended = found.finish_reason == "abort" or is_told
    if ended:
        assert found.token_ids == wanted.token_ids[: len(found.token_ids)], "ids of one that was ended"
        start = chunks[0].start_character if chunks else 0  # behind what was delivered
        # One that was ended inside a stop string shows what there is of it.
        whole = [
            (wanted.text + stop)[start:] for stop in ("", *(params.stop if wanted.finish_reason == "stop" else ()))
        ]
        assert any(each.startswith(text) for each in whole), "the text of one that was ended"
    else:
        assert found.token_ids == wanted.token_ids, f"ids {found.token_ids} are not {wanted.token_ids}; {error}"
        seen = found.text, found.finish_reason
        assert seen == (wanted.text, wanted.finish_reason), seen
        elsewhere = (found.error or "").startswith("a logits processor failed on rank")
        assert found.error == wanted.error or (elsewhere and wanted.error), found.error
        assert found.text.endswith(text), "the text of the chunks"
    assert ids == found.token_ids[delivered:] or (not chunks and not ids), "ids of the chunks"
    for before, after in itertools.pairwise(chunks):
        assert after.start == before.start + len(before.token_ids), "start"
        assert after.start_character == before.start_character + len(before.text), "start of the text"
    if params.logprobs is not None:
        assert found.logprobs is not None and wanted.logprobs is not None
        assert len(found.logprobs) == len(found.token_ids), "log-probabilities"
        for one, other in zip(found.logprobs, wanted.logprobs, strict=False):
            assert len(one.top) == params.logprobs
            pairs = zip([one.logprob, *(each for _, each in one.top)], [other.logprob, *(v for _, v in other.top)],
                        strict=True)  # fmt: skip
            assert all(a == b or abs(a - b) < TOLERANCE for a, b in pairs), (one, other)


def check_pages(engine: Engine) -> None:
    """Assert that an idle engine's pages are free or in the tree of a tenant, each once."""
    assert engine.is_idle and not engine.requests
    for pages in engine.scheduler.placement._pages:
        pool = pages.pool
        nodes = list(pool.roots)
        for node in nodes:
            nodes += node.children.values()
        known = [node for node in nodes if node.parent is not None]
        held = [node.page for node in known if node.is_resident]
        assert pool.num_held == 0 and not any(pool._kept) and all(node.num_users == 0 for node in nodes)
        assert len(set(held)) == len(held) == sum(pool._used) == pool.num_pages - pool._num_free
        assert sum(not node.is_resident for node in known) == pool.num_swapped_pages
        if pool.snapshots is not None:
            assert set(pool.snapshots._held.values()) <= set(nodes)


def run(mode: Mode, seed: int, goes_on: Callable[[], bool], num_cases: int = 200) -> tuple[Counter[str], list[str]]:
    """Counts and wrong answers of a mode."""
    loaded = wrap(model_of(mode.family), letters())
    cases, plain = answers(mode.family, mode.exact, seed, num_cases)

    def program(comm: Comm) -> tuple[Counter[str], list[str]]:
        options = EngineOptions(exact=mode.exact, swap_space=mode.swap, self_draft=mode.self_draft)
        engine = Engine(loaded, mode.decode(), options, comm=comm)
        if mode.padded:
            engine.model.adapter.packed = False
            engine.configure(replace(mode.decode(), max_batch_size=5))
        if comm.rank:
            engine.work()
            return Counter(), []
        soak = Soak(engine, cases, plain, mode, random.Random(seed))
        soak.run(goes_on)
        check_pages(engine)
        counts = engine.scheduler.counts
        soak.counts += Counter(preemptions=counts.preemptions, hits=counts.hits)
        engine.close()
        return soak.counts, soak.wrong

    if mode.ranks == 1:
        return program(Comm())
    return run_ranks(ThreadWorld(mode.ranks), program, timeout=3600)[0]


def steps(number: int) -> Callable[[], bool]:
    """True `number` times."""
    left = iter(range(number))
    return lambda: next(left, None) is not None


@pytest.mark.parametrize("mode", MODES[:8], ids=str)
def test_answers_are_those_of_plain_decoding(mode: Mode) -> None:
    counts, wrong = run(mode, seed=1, goes_on=steps(60), num_cases=60)
    assert not wrong, wrong
    assert counts["requests"] > 20 and counts["length"] + counts["stop"] > 10, counts


def test_mutant_rows_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzz finds K/V that is not moved into its place."""
    ask = Soak.run

    def without_moves(soak: Soak, goes_on: Callable[[], bool]) -> None:
        """After the start, whose check of the model would notice."""
        monkeypatch.setattr("lpr.model.kv_cache.KVCache.commit_moves", lambda cache, rows, moves: None)
        ask(soak, goes_on)

    monkeypatch.setattr(Soak, "run", without_moves)
    assert run(Mode(), seed=1, goes_on=steps(60), num_cases=60)[1]


def main(argv: Sequence[str]) -> int:
    """Run modes until the time is up; exit code 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family", nargs="?", choices=sorted(FAMILIES))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--home", default="auto", type=lambda word: int(word) if word.isdigit() else word)
    parser.add_argument("--pool", type=int, default=350)
    parser.add_argument("--swap", type=float)
    parser.add_argument("--self-draft", default="off")
    for name in ("exact", "adaptive", "padded", "disturbed"):
        parser.add_argument(f"--{name}", action="store_true")
    given = vars(parser.parse_args(argv))
    seconds, seed, family = given.pop("seconds"), given.pop("seed"), given.pop("family")
    modes = MODES if family is None else [Mode(family, **given)]
    until, total, wrong = time.monotonic() + seconds, Counter[str](), list[str]()
    for number, mode in enumerate(itertools.cycle(modes)):
        share = time.monotonic() + (seconds if family is not None else max(20.0, seconds / len(modes)))
        end = min(share, until)
        counts, found = run(mode, seed + number // len(modes), lambda end=end: time.monotonic() < end)  # type: ignore[misc]
        total, wrong = total + counts, wrong + found
        print(mode, dict(counts), *found, sep="\n  ", flush=True)
        if time.monotonic() > until:
            break
    print("all", dict(total), f"wrong: {len(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
