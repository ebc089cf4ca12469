"""Which tests see the twelve findings of the second review of the GPU path when one of them is put back."""

from __future__ import annotations

import pytest

from tests.fakes.paths import ROOT

SEEN_BY = {
    "1 compile storm": (
        "slow/test_torch_compile.py::test_sizes_make_no_form_of_their_own",
        "model/test_torch_compile.py::test_the_first_replica_compiles_before_the_others",
    ),
    "2 an error is a hang": (
        "dist/test_nccl.py::test_a_communicator_that_does_not_end_ends_the_process",
        "model/test_pretend_faults.py::test_an_abort_waits_for_graphs",
    ),
    "3 holes count as free": ("model/test_reserve.py::test_memory_with_holes_is_not_promised",),
    "4 the reserve": (
        "model/test_reserve.py::test_the_reserve_covers_what_a_step_makes",
        "model/test_reserve.py::test_graphs_that_end_at_the_logits_share_one_place",
    ),
    "5 a second loss": ("dist/test_nccl.py::test_a_second_loss_while_survivors_connect_does_not_block_them",),
    "6 the watchdog": ("model/test_pretend_faults.py::test_the_watchdog_leaves_survivors_alone",),
    "7 one rank fails to capture": (
        "dist/test_nccl.py::test_ranks_that_share_weights_run_equal_numbers_of_collectives_after_a_failed_capture",
        "model/test_pretend_faults.py::test_without_agreement_collectives_find_no_other",
        "model/test_pretend_faults.py::test_buffers_that_are_registered_in_a_capture_wait_for_all",
    ),
    "8 tp is neither compiled nor packed": (
        "model/test_torch_compile.py::test_a_rank_of_a_replica_is_packed_and_compiled",
    ),
    "9 more shapes than are kept": ("model/test_gpu_defects.py::test_a_start_captures_no_more_graphs_than_are_kept",),
    "10 partial sums": ("model/test_gpu_defects.py::test_attention_makes_few_partial_sums",),
    "11 passes of a top-k": ("model/kernels/test_sampling_kernel.py::test_a_top_k_takes_few_passes",),
    "12 one pool for all": ("model/test_pretend_faults.py::test_a_tensor_may_outlive_the_graphs_of_a_capturer",),
    "12 an upload's stream": ("dist/test_nccl.py::test_an_upload_is_marked_on_its_own_devices_stream",),
    "12 a replica's group spans the world": ("dist/test_nccl.py::test_the_group_of_a_replica_holds_its_ranks_alone",),
    "12 products before scaling": ("model/test_gpu_defects.py::test_soft_capped_scores_stay_within_float16",),
}
"""By finding, those of its parts that hold; some have several."""


@pytest.mark.parametrize("finding", SEEN_BY)
def test_each_is_seen(finding: str) -> None:
    for place in SEEN_BY[finding]:
        name, test = place.split("::")
        assert f"def {test}(" in (ROOT / "tests" / name).read_text(), place
