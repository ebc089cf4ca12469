"""Defects of the CUDA path that a review found without a GPU, each by what shows it without one."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_model
from pretend_gpu import PretendGpu, gpu, guard
from torch.distributed import HashStore  # noqa: TID251 - a store of one process, no group

from lpr.dist.runtime import World, memory_of, sharing
from lpr.model import loader
from lpr.model.graphs import GraphRunner, uncapturable
from lpr.model.inputs import Row, build_inputs
from lpr.model.kernels import hook
from lpr.model.runner import TreeModel
from lpr.model.selection import Selection
from lpr.model.static_inputs import WIDE_KV, StaticShape, static_shape

__all__ = ["gpu", "guard"]


def test_the_mask_travels_pinned(gpu: PretendGpu) -> None:
    rows = [Row(0, 5, [1] * 4, [-1, 0, 0, 2], [5, 6, 6, 7], 2), Row(1, 0, [1] * 3, [-1, 0, 1], [0, 1, 2], 1)]
    build_inputs(rows, 128, torch.device("cuda", 0), 8, 16, tree_bits=True)
    assert gpu.count("pinned") >= 3 and gpu.count("pageable") == gpu.count("wait") == 0


def test_a_model_is_read_straight_to_a_gpu() -> None:
    asked: dict[str, Any] = {}
    loader._read_to(torch.device("cuda", 1), lambda **kwargs: asked.update(kwargs), torch.bfloat16)
    assert asked == {"dtype": torch.bfloat16, "device_map": {"": torch.device("cuda", 1)}}
    asked.clear()
    loader._read_to(torch.device("cpu"), lambda **kwargs: asked.update(kwargs), torch.float32)
    assert asked == {"dtype": torch.float32}


def test_experts_that_do_not_read_the_setting_are_not_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral", num_local_experts=4)
    model.config._experts_implementation = "eager"
    assert "experts" in str(uncapturable(model, True))
    monkeypatch.setattr(type(model), "_can_set_experts_implementation", classmethod(lambda cls: False))
    assert uncapturable(model, True) is None


def test_the_kernel_is_imported_before_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    TreeModel(tiny_model(), attention="triton")
    monkeypatch.setattr(hook, "import_module", None)
    assert callable(hook._versions[hook.KERNELS["triton"]])


def runner_of(capturer: Any, compute: Any) -> GraphRunner:
    logits = torch.linspace(-1, 1, 50).repeat(8, 1)
    return GraphRunner(compute, lambda inputs: logits, capturer, torch.device("cpu"), 2, 512, tree_bits=True)


class CompilerError(Exception):
    """As Triton's: no RuntimeError."""


class Failing:
    num_captures = 0

    def capture(self, program: Any) -> Any:
        self.num_captures += 1
        try:
            raise CompilerError("ptxas is missing")
        except CompilerError:
            raise RuntimeError("the end of the capture failed too") from None


def test_after_a_failed_capture_steps_stay_as_high_as_a_replay(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks of a tensor-parallel replica meet in every layer: the one that failed must not compute fewer rows."""
    heights = []

    def compute(inputs: Any, selection: Selection, num_candidates: int) -> torch.Tensor:
        heights.append(inputs.tokens.shape[1])
        return torch.zeros(inputs.tokens.numel(), 1, dtype=torch.int32)

    capturer = Failing()
    runner = runner_of(capturer, compute)
    runner.limit(64)
    for count in (1, 5, 20):
        row = Row(0, 3, [1] * count, list(range(-1, count - 1)), list(range(3, 3 + count)), 1)
        assert runner.evaluate([row], Selection.build([]), 0) is not None
    assert heights == [1, 8, 32] and capturer.num_captures == 1
    assert runner.reason == "ptxas is missing" and "CompilerError" in caplog.text


def test_release_drops_graphs_that_a_command_has_frozen() -> None:
    """A graph that holds a collective keeps its communicator from ending: the process would hang at its exit."""

    class Graphs:
        """In a cycle, as the real ones are."""

    runner = TreeModel(tiny_model())
    graphs: Any = Graphs()
    graphs.itself, gone = graphs, weakref.ref(graphs)
    runner.graphs = graphs
    gc.freeze()
    del graphs
    runner.release()
    assert gone() is None


def test_lengths_and_noise_keys_make_few_shapes() -> None:
    shapes = set()
    for cached in range(0, 3900, 7):
        for num_keys in (0, 1, 9, 16):
            selection = Selection.build([])
            if num_keys:
                selection.sampled, selection.num_keys = True, num_keys
            row = Row(0, cached, [1] * 30, list(range(-1, 29)), list(range(cached, cached + 30)), 1)
            found = static_shape([row], selection, 8, 4, 4096, 96, tree_bits=True)
            assert isinstance(found, StaticShape) and found.num_kv >= cached + 30
            shapes.add(found)
    assert len(shapes) == 2 * len([size for size in (*WIDE_KV, 4096) if size <= 4096])


@pytest.mark.parametrize("uuids, expected", [("ab", [(1, 1), (1, 1)]), ("aa", [(2, 2), (2, 2)])])
def test_ranks_that_see_one_gpu_each_do_not_share_it(
    uuids: str, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM shows every task its own GPU as "cuda:0": only the GPU's name tells how many ranks are on it."""
    memories = []
    for uuid in uuids:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, uuid=uuid: SimpleNamespace(uuid=uuid))
        memories.append(memory_of("cuda:0"))
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: sharing(store, World(rank, 2, rank, 0, True), memories[rank]), range(2)))
    assert found == expected
    assert memory_of(None) == memory_of(None), "on a CPU all ranks of a machine share its memory"
