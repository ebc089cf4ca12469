"""Which tests see the twelve findings of the second review of the GPU path when one of them is put back."""

from __future__ import annotations

from pathlib import Path

import pytest

SEEN_BY = {
    "1 compile storm": (
        "test_compiled.py::test_more_forms_are_noticed",
        "test_compiled.py::test_the_first_replica_compiles_before_the_others",
    ),
    "2 an error is a hang": (
        "test_gpu_groups.py::test_a_communicator_that_does_not_end_ends_the_process",
        "test_pretend_faults.py::test_an_abort_waits_for_graphs",
    ),
    "3 holes count as free": ("test_gpu_memory.py::test_memory_with_holes_is_not_promised",),
    "4 the reserve": (
        "test_gpu_memory.py::test_the_reserve_covers_what_a_step_makes",
        "test_gpu_memory.py::test_graphs_that_end_at_the_logits_share_one_place",
    ),
    "5 a second loss": ("test_gpu_groups.py::test_a_second_loss_while_survivors_connect_does_not_block_them",),
    "6 the watchdog": ("test_pretend_faults.py::test_the_watchdog_leaves_survivors_alone",),
    "7 one rank fails to capture": (
        "test_gpu_groups.py::test_ranks_that_share_weights_run_equal_numbers_of_collectives_after_a_failed_capture",
        "test_pretend_faults.py::test_without_agreement_collectives_find_no_other",
        "test_pretend_faults.py::test_buffers_that_are_registered_in_a_capture_wait_for_all",
    ),
    "8 tp is neither compiled nor packed": ("test_compiled.py::test_a_rank_of_a_replica_is_packed_and_compiled",),
    "9 more shapes than are kept": ("test_gpu_defects.py::test_a_start_captures_no_more_graphs_than_are_kept",),
    "10 partial sums": ("test_gpu_defects.py::test_attention_makes_few_partial_sums",),
    "11 passes of a top-k": ("test_sampling_kernel.py::test_a_top_k_takes_few_passes",),
    "12 one pool for all": ("test_pretend_faults.py::test_a_tensor_may_outlive_the_graphs_of_a_capturer",),
    "12 an upload's stream": ("test_gpu_groups.py::test_an_upload_is_marked_on_its_own_devices_stream",),
    "12 a replica's group spans the world": ("test_gpu_groups.py::test_the_group_of_a_replica_holds_its_ranks_alone",),
    "12 products before scaling": ("test_gpu_defects.py::test_soft_capped_scores_stay_within_float16",),
}
"""By finding, those of its parts that hold; some have several."""


@pytest.mark.parametrize("finding", SEEN_BY)
def test_each_is_seen(finding: str) -> None:
    for place in SEEN_BY[finding]:
        name, test = place.split("::")
        assert f"def {test}(" in (Path(__file__).parent / name).read_text(), place
