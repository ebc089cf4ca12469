"""The other families of tests/model/recurrent/test_recurrent.py."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from lpr import Engine, native
from tests.dist import test_survivors as survivors
from tests.fakes.again import again
from tests.fakes.compared import SHAPES
from tests.fakes.elastic_world import ElasticWorld, Fault
from tests.model.exact import test_check as exact
from tests.model.recurrent import test_recurrent as fast
from tests.model.recurrent.test_recurrent import hybrid, shared_model

test_greedy_ids_equal_transformers = again(
    fast.test_greedy_ids_equal_transformers, "name", fast.KINDS, without=fast.SOME
)
test_sampled_ids_equal_plain_decoding = again(
    fast.test_sampled_ids_equal_plain_decoding_also_of_padded_batches, "name", ["mamba2"]
)
test_two_ranks = again(fast.test_two_ranks, "name", ["qwen3_next", "granitemoehybrid"])
test_nan_on_the_rank_that_owns_a_root_alone = again(
    fast.test_nan_on_the_rank_that_owns_a_root_alone, "name", ["granitemoehybrid"]
)
test_any_tree_has_the_logits_of_its_paths = again(
    fast.test_any_tree_has_the_logits_of_its_paths, "name", ["granitemoehybrid", "lfm2", "mamba2"]
)
test_states_after_many_rejected_branches = again(
    fast.test_states_after_many_rejected_branches_are_those_of_a_fresh_prefill,
    "name",
    [*fast.KINDS],
    without=fast.SOME,
)
test_half_precision = again(fast.test_half_precision, "name", ["jamba", "deepseek_v32"])
test_exact_bits = again(
    fast.test_exact_bits,
    "name, dtype",
    zip(fast.KINDS, cycle([torch.float32, torch.float16, torch.bfloat16]), strict=False),
)
"""Each kind in one more dtype: scans are in float32 in all of them."""
OTHER_WAYS = tuple(way for way in SHAPES if way not in (*fast.WAYS, "window, 2 ranks"))
SOME_WAYS = "window", "trie, batch of 4", "taken up again in the middle"
ON_RANKS = *SOME_WAYS, "both, batch of 4, 4 ranks, home ranks"
test_exact_bits_of_ways_to_decode = again(
    fast.test_exact_bits_of_ways_to_decode,
    "name, ways",
    [("qwen3_next", OTHER_WAYS), ("granitemoehybrid", ON_RANKS), ("lfm2", SOME_WAYS), ("mamba2", SOME_WAYS)],
)
test_a_wrong_form_is_refused = again(
    fast.test_a_wrong_form_is_refused, "name, full_size", [("granitemoehybrid", False)]
)
test_memory_of_a_tree = again(fast.test_memory_of_a_tree_of_512_nodes_is_bounded, "kind", ["selective"])


def test_exact_scans_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's sums are other bits, and the same numbers."""
    runner = exact.checked(hybrid("qwen3_next"))
    natively = exact.in_pieces(runner, exact.TEXT[:40], [30, 10])
    monkeypatch.setattr(native, "walk_linear", None)
    by_torch = exact.in_pieces(runner, exact.TEXT[:40], [30, 10])
    torch.testing.assert_close(by_torch, natively, rtol=1e-4, atol=1e-4)
    assert torch.equal(exact.in_pieces(runner, exact.TEXT[:40], [1] * 40), by_torch)
    exact.check_trees(runner, 1)


def test_a_rank_dies_and_others_join() -> None:
    """Survivors keep their states, and what a newcomer lacks is its pending chain."""
    model = shared_model("qwen3_next")
    done = Engine.from_model(model, decode=survivors.DECODE).generate(survivors.PROMPTS, survivors.PARAMS)
    expected = [each.token_ids for each in done]
    first = survivors.run_start(model)
    job = survivors.Job(model)
    world = survivors.run(job, Fault(0, first + 9, 0, True, frozenset({2})))
    assert world.died == {0} and survivors.texts(job) == expected
    joined = survivors.JoinedJob(model)
    joined.world = ElasticWorld(2)
    for replica in range(2):
        joined.world.start(replica, joined)
    joined.world.join()
    assert max(joined.widths) == 4 and survivors.texts(joined) == expected
