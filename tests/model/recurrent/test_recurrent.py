"""Recurrent layers evaluate trees: ids are those of transformers and of plain decoding, and a wrong form is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from operator import eq
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dev.families import tiny_config, tiny_model
from dev.family_table import FAMILIES
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.engine.request import Request
from lpr.model.adapter import Adapter
from lpr.model.kv_cache import KVCache
from lpr.model.recurrent import in_order, scans, states
from lpr.model.recurrent.selective import Selective
from lpr.model.recurrent.states import States
from lpr.model.recurrent.tree import Tree
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row, current_step
from tests.fakes.compared import Group, Worlds
from tests.fakes.worlds import ThreadComm, ThreadWorld, generate_on, run_ranks
from tests.model.exact import test_check as exact

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {  # gated delta rule
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "kimi_linear": {  # with a decay per channel
        "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 8,
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "granitemoehybrid": {  # Mamba 2
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_state": 8, "shared_intermediate_size": 16,
        "mamba_chunk_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},  # Mamba 1
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},  # a convolution alone
    "mamba2": {  # without attention
        "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 16,
    },
}  # fmt: skip
SOME = ["qwen3_next", "jamba"]
"""Of kinds of code that are far apart; tests/slow has the others."""
BY_NAME = {family.name: family for family in FAMILIES}
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
DECODE = {"window_size": 4, "ngram_size": 3, "guess_set_size": 3, "trie_nodes": 16, "prefill_chunk": 70}


def hybrid(name: str, full_size: bool = True) -> PreTrainedModel:
    """A tiny random model; with weights of full size, under which a wrong scan shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name)
    known = {key: value for key, value in SIZES.items() if hasattr(config, key)}
    model = AutoModelForCausalLM.from_config(type(config)(**{**known, **KINDS[name]}), dtype=torch.float32).eval()
    for weight in model.parameters() if full_size else ():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model


def skip_old(name: str) -> None:
    if name in BY_NAME and BY_NAME[name].is_old:
        pytest.skip(f"this transformers does not run {name} in trees")


@cache
def shared_model(name: str) -> PreTrainedModel:
    skip_old(name)
    return hybrid(name) if name in KINDS else tiny_model(BY_NAME[name])


@cache
def prompts() -> list[list[int]]:
    """Ragged; some fill several pieces, some begin alike."""
    dice = random.Random(1)
    beginning = [dice.randrange(2, 97) for _ in range(150)]
    made = [beginning[:length] + [dice.randrange(2, 97) for _ in range(rest)] for length, rest in ((0, 3), (0, 19))]
    return [*made, beginning, beginning[:90] + [5, 6, 7] * 9, [*beginning, 3, 4]]


@cache
def stock(name: str) -> list[list[int]]:
    """Greedy ids of transformers."""
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        how = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
        found.append(shared_model(name).generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :])
    return [each.tolist() for each in found]


@pytest.mark.parametrize("name", SOME)
def test_greedy_ids_equal_transformers(name: str) -> None:
    """In ragged batches, with drafts accepted and rejected, pieces of prompts, then again by the prefix cache."""
    engine = Engine.from_model(shared_model(name), decode=DecodeConfig(**DECODE, max_batch_size=3))
    for again in range(2):
        requests = [engine.submit(prompt, SamplingParams(max_new_tokens=32)) for prompt in prompts()]
        while not engine.is_idle:
            engine.step()
        assert [request.token_ids for request in requests] == stock(name)
        stats = [request.stats for request in requests]
        assert sum(each.num_steps for each in stats) < sum(each.num_tokens for each in stats)
        assert sum(sum(each.drafted.values()) for each in stats) > sum(sum(each.accepted.values()) for each in stats)
        hits = [request.num_cached_tokens for request in requests]
        assert not again or hits[2:] == [144, 112, 144]  # the last full pages before the last token


@pytest.mark.parametrize("name", ["qwen3_next"])
def test_sampled_ids_equal_plain_decoding_also_of_padded_batches(name: str) -> None:
    sampled = [SamplingParams(max_new_tokens=24, temperature=0.8, seed=seed) for seed in range(len(prompts()))]
    plain = Engine.from_model(shared_model(name), decode=DecodeConfig.autoregressive())
    expected = [done.token_ids for done in plain.generate(prompts(), sampled)]
    engine = Engine.from_model(shared_model(name), decode=DecodeConfig(**DECODE, max_batch_size=3))
    engine.model.adapter.packed = False
    engine.configure(DecodeConfig(**DECODE, max_batch_size=4))
    assert [done.token_ids for done in engine.generate(prompts(), sampled)] == expected
    again = [SamplingParams(max_new_tokens=32) for _ in prompts()]
    assert [done.token_ids for done in engine.generate(prompts(), again)] == stock(name)


@pytest.mark.parametrize("name", ["jamba"])
def test_two_ranks(name: str) -> None:
    params = [SamplingParams(max_new_tokens=32) for _ in prompts()]
    decode = DecodeConfig(**DECODE, max_batch_size=3)
    for rank in generate_on(2, shared_model(name), decode, prompts(), params):
        assert [done.token_ids for done in rank] == stock(name)


@pytest.mark.parametrize("name", ["qwen3_next"])
@pytest.mark.slow
def test_nan_on_the_rank_that_owns_a_root_alone(name: str) -> None:
    """The other rank's state does not follow the root, which is evaluated again."""
    model, num_broken = shared_model(name), 0

    def program(comm: ThreadComm) -> list[list[int]]:
        engine = Engine.from_model(model, decode=DecodeConfig(**DECODE, home_ranks=0), comm=comm)
        exchange, seen = engine.replica.exchange, 0
        real = exchange.gather

        def gather(draft: Any, local: Any, *args: Any) -> Any:
            nonlocal seen, num_broken
            seen += len(draft) > 0 and len(draft.trees[0]) > 2
            if len(draft) and seen % 3 == 2 and len(draft.trees[0]) > 2 and 0 in draft.shards[0][comm.rank].owned:
                local[0, 0] = -1
                num_broken += 1
            return real(draft, local, *args)

        exchange.gather = gather  # type: ignore[method-assign]
        return [engine.generate([each], SamplingParams(max_new_tokens=32))[0].token_ids for each in prompts()[:3]]

    assert run_ranks(ThreadWorld(2), program) == [stock(name)[:3]] * 2 and num_broken > 3


def soak(engine: Engine, seed: int, num_requests: int) -> None:
    """Submit prompts at random and abort some; each of the others has its own text."""
    dice, asked = random.Random(seed), 0
    running: dict[Request, list[int]] = {}
    while running or asked < num_requests:
        while asked < num_requests and len(running) < 8 and dice.random() < 0.6:
            number = dice.randrange(len(prompts()))
            count = dice.choice((3, 20, 32))
            request = engine.submit(prompts()[number], SamplingParams(max_new_tokens=count))
            running[request] = stock("qwen3_next")[number][:count]
            asked += 1
        if running and dice.random() < 0.05:
            engine.abort(dice.choice(list(running)))
        engine.step()
        for request in [each for each in running if each.finish_reason is not None]:
            expected = running.pop(request)
            assert request.token_ids == (
                expected if request.finish_reason == "length" else expected[: request.num_output]
            )


@pytest.mark.parametrize("home_ranks", [None, "auto"])
def test_slots_snapshots_and_preemption_keep_texts(home_ranks: Any) -> None:
    """On one rank, and on two of which each serves requests of its own."""
    extra = {} if home_ranks is None else {"home_ranks": home_ranks}
    decode = DecodeConfig(**DECODE, **extra, max_batch_size=4, kv_tokens=272)

    def program(comm: ThreadComm) -> int:
        engine = Engine.from_model(shared_model("qwen3_next"), decode=decode, comm=comm)
        if comm.rank:
            engine.work()
        else:
            soak(engine, 3, 28)
            engine.close()
        return engine.scheduler.counts.preemptions

    assert all(run_ranks(ThreadWorld(1 if home_ranks is None else 2), program))


@pytest.mark.parametrize("name", SOME)
def test_states_after_many_rejected_branches_are_those_of_a_fresh_prefill(name: str) -> None:
    """501 rejected branches of 1 to 3 entries; no leaf is ever accepted."""
    adapter, dice = TreeModel(shared_model(name), attention="sdpa").adapter, random.Random(2)
    cache = KVCache(1, 256)
    parents = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 0, 0, 1, 5]
    depths = [0, 1, 1, 2, 2, 2, 3, 3, 4, 1, 1, 2, 3]
    num_leaves = len({*range(len(parents))} - {*parents})
    text: list[int] = [5, 6, 7]
    adapter.logits([row := Row.chain(0, 0, text, 1)], cache)
    cache.commit(row, range(3))
    rejected = 0
    while rejected < 500:
        tokens = [dice.randrange(97) for _ in parents]
        path = dice.choice([[0], [0, 1], [0, 2, 5], [0], [0]])
        row = Row(0, len(text), tokens, parents, [len(text) + depth for depth in depths], len(parents))
        adapter.logits([row], cache)
        cache.commit(row, path)
        text += [tokens[node] for node in path]
        rejected += num_leaves
    fresh = KVCache(1, 256)
    adapter.logits([row := Row.chain(0, 0, text, 1)], fresh)
    fresh.commit(row, range(len(text)))
    assert cache.states.of(0)
    for site, state in cache.states.of(0).items():
        expected = fresh.states.of(0)[site]
        assert (state - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max().item()), site


def random_row(dice: random.Random, slot: int, text: list[int], num_cached: int) -> Row:
    """What `text` lacks in the cache as a pending chain, and a tree of up to 20 nodes below its end."""
    pending = text[num_cached:]
    parents, depths = list(range(-1, len(pending) - 1)), list(range(len(pending)))
    count = dice.randrange(20)
    for _ in range(count):
        parent = dice.randrange(max(len(pending) - 1, len(parents) - 6), len(parents))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    tokens = [*pending, *(dice.randrange(2, 97) for _ in range(count))]
    return Row(slot, num_cached, tokens, parents, [num_cached + depth for depth in depths], count + 1)


def path_of(row: Row, entry: int) -> list[int]:
    found: list[int] = []
    while entry >= 0:
        found.insert(0, entry)
        entry = int(row.parents[entry])
    return found


def worst_of_any_tree(adapter: Adapter, packed: bool) -> float:
    """The largest difference of a logit, over their range, from cache-free forwards over the paths of random trees.

    Steps of three sequences with pending chains of 1 to 90 tokens, each committed along a random path. Before each
    step another one is dropped.
    """
    model, dice = adapter.model, random.Random(packed)
    cache, worst = KVCache(3, 256), 0.0
    texts = [[dice.randrange(2, 97) for _ in range(length)] for length in (1, 19, 90)]
    cached = [0, 0, 0]
    for _ in range(2):
        dropped, rows = ([random_row(dice, slot, text, cached[slot]) for slot, text in enumerate(texts)] for _ in "12")
        adapter.logits(dropped, cache, packed=packed)
        for row in dropped:
            cache.clear_entries(row)
        logits = adapter.logits(rows, cache, packed=packed).split([row.num_results for row in rows])
        for row, found, text in zip(rows, logits, texts, strict=True):
            before, first = text[: row.num_cached], row.num_entries - row.num_results
            for leaf in {*range(first, row.num_entries)} - {*row.parents.tolist()}:
                path = path_of(row, leaf)
                ids = torch.tensor([before + [int(row.tokens[entry]) for entry in path]])
                with torch.no_grad():
                    expected = model(input_ids=ids, use_cache=False).logits[0, row.num_cached + first :]
                mine = found[[entry - first for entry in path[first:]]]
                worst = max(worst, float((mine - expected).abs().max() / (expected.max() - expected.min())))
            path = path_of(row, dice.randrange(first, row.num_entries))
            cache.commit(row, path)
            cached[row.slot] += len(path)
            more = dice.choice((1, 4, 40))  # the last token is new, and others may have evaluated those before it
            text[:] = before + [int(row.tokens[entry]) for entry in path]
            text += [dice.randrange(2, 97) for _ in range(more)]
    return worst


@pytest.mark.parametrize("name", [*SOME, "kimi_linear"])
@pytest.mark.slow(first=2)
def test_any_tree_has_the_logits_of_its_paths(name: str) -> None:
    """In padded batches, and in packed ones where the check at load allows them."""
    runner = TreeModel(shared_model(name), attention="sdpa")
    self_check(runner)
    assert runner.packed or name == "kimi_linear", "its latent attention computes keys from all of the cache"
    for packed in {False, runner.packed}:
        assert worst_of_any_tree(runner.adapter, packed) < 1e-4


def test_a_forward_without_a_commit_changes_no_state() -> None:
    adapter = TreeModel(shared_model("qwen3_next")).adapter
    cache = KVCache(1, 64)
    adapter.logits([row := Row.chain(0, 0, [5, 6, 7], 1)], cache)
    cache.commit(row, range(3))
    before = {site: state.clone() for site, state in cache.states.of(0).items()}
    row = Row(0, 3, [1, 2, 3], [-1, 0, 0], [3, 4, 4], 3)
    adapter.logits([row], cache)
    cache.clear_entries(row)
    adapter.logits([Row.chain(0, 3, [9] * 40, 0)], cache)
    assert all(torch.equal(state, before[site]) for site, state in cache.states.of(0).items())


# Wrong forms.


def tree_as_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, levels = Tree.mask.func, Tree.levels.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Tree, "mask", property(lambda tree: mask(Tree.chain(*tree.shape, tree.device))))
    monkeypatch.setattr(Tree, "levels", property(lambda tree: levels(Tree.chain(*tree.shape, tree.device))))


def window_across_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Tree.windows
    monkeypatch.setattr(Tree, "windows", lambda tree, width: windows(Tree.chain(*tree.shape, tree.device), width))


def state_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = States.scan

    def scan_and_advance(states: States, *args: Any) -> Tensor:
        out, step = scan(states, *args), current_step()
        assert step is not None
        states.advance(step.rows, [list(range(row.num_entries)) for row in step.rows])
        return out

    monkeypatch.setattr(States, "scan", scan_and_advance)


def decay_of_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "along_paths", lambda values, tree: values.cumsum(2))


MUTANTS = [tree_as_chain, window_across_branches, state_too_early, decay_of_another_path]


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name, full_size", [("qwen3_next", True), ("kimi_linear", True)])
def test_a_wrong_form_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[[pytest.MonkeyPatch], None], full_size: bool
) -> None:
    """Also with weights as initialised, under which a scan adds next to nothing."""
    skip_old(name)
    mutant(monkeypatch)
    with pytest.raises(InputError, match=f"'{name}' cannot run a token tree: its logits differ"):
        self_check(TreeModel(hybrid(name, full_size)))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_form_shows_in_random_trees(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutant(monkeypatch)
    assert worst_of_any_tree(TreeModel(hybrid("qwen3_next"), attention="sdpa").adapter, True) > 1e-3


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return found


def wide_tree(batch: int, count: int) -> Tree:
    dice = random.Random(5)
    parents = [[max(-1, entry - dice.randrange(1, 9)) for entry in range(count)] for _ in range(batch)]
    return Tree(np.array(parents), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["per channel"])
def test_memory_of_a_tree_of_512_nodes_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All decays per channel would take 256 MiB, all states of Mamba 1 64 MiB. In parts the results are the same."""
    dice = torch.Generator().manual_seed(0)

    def random_values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice)

    def run(count: int) -> tuple[list[Tensor], int]:
        dice.manual_seed(0)
        if kind == "selective":
            inputs = [random_values(1, count, 1024), torch.rand(1, count, 1024, generator=dice) * 0.1]
            rule: Any = Selective(-torch.rand(1024, 32, generator=dice)).scan
            given = [*inputs, random_values(1, count, 32), random_values(1, count, 32)]
            state = random_values(1, 1024, 32)
        else:
            heads, size = 8, 32
            rule, state = scans.delta_rule, random_values(1, heads, size, size)
            given = [random_values(1, count, heads, size) * 0.2 for _ in range(3)]
            given += [-torch.rand(1, count, heads, size, generator=dice), torch.rand(1, count, heads, generator=dice)]
        path = scans.Path(torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([1]))
        with LargestTensor() as largest:
            out, written = rule(given, state, wide_tree(1, count))
            after = written.after(state, path)
        return [out, after], largest.num_bytes

    of_scores = 2 * 8 * 512**2  # of keys and queries, by head
    most = scans.MOST_VALUES if kind == "selective" else max(scans.MOST_VALUES, of_scores)
    assert run(512)[1] <= 4 * most <= 16 << 20
    in_parts = run(96)[0]
    monkeypatch.setattr(scans, "MOST_VALUES", 1 << 30)
    torch.testing.assert_close(in_parts, run(96)[0])
    monkeypatch.setattr(scans, "MOST_VALUES", 1 << 14)
    torch.testing.assert_close(in_parts, run(96)[0])


def test_a_least_step_size_holds_for_every_token(caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers' forward; its generate (5.24) keeps to it in the prompt alone, so that its ids may differ."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(tiny_config(BY_NAME["nemotron_h"]), dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.6 * weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    prompt = [(7 * i + i * i) % 89 + 2 for i in range(19)]
    engine = Engine.from_model(model, decode=DecodeConfig(**DECODE))
    assert "ids are those of the forward" in caplog.text
    found = engine.generate([prompt], SamplingParams(max_new_tokens=40))[0].token_ids
    logits = model(torch.tensor([prompt + found]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == found


EXACT = [("qwen3_next", torch.bfloat16)]
"""tests/slow has every kind in every dtype."""


@pytest.mark.parametrize("name, dtype", EXACT, ids=str)
def test_exact_bits(name: str, dtype: torch.dtype) -> None:
    """Of logits, in every cut of a text and in trees."""
    runner = exact.checked(hybrid(name).to(dtype))
    exact.check_pieces(runner)
    exact.check_trees(runner, 2)


WAYS = (
    "both, batch of 4, fills of 32",
    "the same again, prefixes found",
    "both, batch of 4, 2 ranks that share every tree",
)


@pytest.mark.parametrize("name, ways", [("qwen3_next", WAYS)], ids=str)
def test_exact_bits_of_ways_to_decode(name: str, ways: Sequence[str]) -> None:
    """Batches, fills, prefixes behind snapshots, requests taken up again, ranks."""
    params = [SamplingParams(max_new_tokens=12, temperature=0.8 * (seed > 0), seed=seed) for seed in range(3)]
    group = Group(Worlds(hybrid(name).to(torch.bfloat16), "bfloat16", exact=True), prompts()[1:4], params)
    for shape, counts in group.run(ways).items():
        assert counts["logits_compared"] >= 3 * 6, shape
        assert (counts["outputs_that_differ"], counts["logits_that_differ"]) == (0, 0), shape


def rejected_nodes_advance(patch: pytest.MonkeyPatch) -> None:
    inner = States.advance
    patch.setattr(
        States, "advance", lambda self, rows, kept: inner(self, rows, [range(row.num_entries) for row in rows])
    )


def chunks_begin_with_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states, "walk", lambda enter, inputs, state, tree, pads: scans.delta_rule(inputs, state, tree))


def siblings_take_a_state_over(patch: pytest.MonkeyPatch) -> None:
    walk_row = in_order._walk_row
    patch.setattr(
        in_order, "_walk_row", lambda enter, inputs, parents, state: walk_row(enter, inputs, parents * 0 - 1, state)
    )


def convolutions_by_a_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states, "convolve", lambda *given: scans.convolve(*given[:-1], exact=False))


@pytest.mark.parametrize(
    "fault",
    [rejected_nodes_advance, chunks_begin_with_a_step, siblings_take_a_state_over, convolutions_by_a_library],
)
def test_exact_faults_are_seen(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check at load or, of what it does not reach, by ids and bits."""
    model = hybrid("qwen3_next")
    fault(monkeypatch)
    params = [SamplingParams(max_new_tokens=16)] * 2
    try:
        group = Group(Worlds(model, "float32", exact=True), prompts()[2:4], params)
        found = group.run(["both, batch of 4, fills of 32"]).values()
    except InputError as refused:
        assert "cannot be exact" in str(refused) or "differ" in str(refused)
        return
    assert any(each["logits_that_differ"] for each in found)


def test_exact_mode_refuses_by_name() -> None:
    with pytest.raises(InputError, match="'zamba' cannot be exact: its own code multiplies by"):
        Engine.from_model(shared_model("zamba"), exact=True)


def test_what_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="cannot be compiled: its recurrent layers"):
        Engine.from_model(shared_model("qwen3_next"), compile="on")


@pytest.mark.parametrize("name", ["qwen3_next"])
@pytest.mark.slow
def test_half_precision(name: str) -> None:
    """Scans are fp32. Equal steps give equal ids; others may differ from plain decoding where rounding decides."""
    model = (hybrid(name) if name in KINDS else tiny_model(BY_NAME[name])).to(torch.bfloat16)
    params, few = SamplingParams(max_new_tokens=16), prompts()[:3]
    made = [Engine.from_model(model, decode=DecodeConfig(**DECODE, max_batch_size=3)) for _ in range(2)]
    drafted, again = ([done.token_ids for done in engine.generate(few, params)] for engine in made)
    assert drafted == again
    scans = [state for site, state in made[0].replica.like.states.of(0).items() if site[0] == "scan"]
    assert all(state.dtype == torch.float32 for state in scans)
    plain = Engine.from_model(model, decode=DecodeConfig.autoregressive()).generate(few, params)
    pairs = zip(drafted, [done.token_ids for done in plain], strict=True)
    assert sum(sum(map(eq, *pair)) for pair in pairs) > 0.5 * 16 * len(few)
