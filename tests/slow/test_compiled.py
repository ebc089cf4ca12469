"""The long tests of tests/model/test_compiled.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.kernel_counts import count
from lpr.model.compiled import CompiledForward
from lpr.model.parallel import TensorParallel
from lpr.model.split_layers import VocabularyHead
from lpr.model.step_inputs import current_step
from lpr.planner.facts import facts_of
from lpr.planner.footprint import tp_traffic
from lpr.planner.launches import step_launches
from tests.fakes.pretend_gpu import guard
from tests.model.test_compiled import Small, quick_kernel, replica, small, start_compiled, the_number_of_keys_decides


def test_a_start_of_a_replica_compiles_four_forms(replica: TensorParallel, tmp_path: Path) -> None:
    """Of a rank's half of a model, with the collectives of its steps."""
    assert start_compiled("llama", 2, 16, replica=replica, folder=tmp_path) == (4, 4, 4)


def test_a_head_that_asks_for_parts_doubles_the_forms(
    replica: TensorParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are gathered outside of what is compiled, as sampling that needs all of them would be other forms."""

    def forward(self: VocabularyHead, input: torch.Tensor) -> torch.Tensor:
        step, mine = current_step(), nn.functional.linear(input, self.weight)
        return mine if step is not None and step.in_parts else mine + 0

    monkeypatch.setattr(VocabularyHead, "forward", forward)
    assert start_compiled("llama", 1, 1, replica=replica, folder=tmp_path)[1] > 4


def test_compiled_code_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled again, as in a second process, is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    # A new folder has neither of these, and each takes longer than the compilation.
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    said = []
    for _ in range(2):
        torch._dynamo.reset()
        layer = Small()
        compiled = CompiledForward(SimpleNamespace(model=layer))  # type: ignore[arg-type]
        with torch.no_grad():
            layer(torch.randn(3, 8))
        said.append(str(compiled.describe()))
    folder = tmp_path / "lpr" / "compiled"
    assert ", 0 of them read" in said[0] and said[1].endswith(f", 1 of them read from {folder}") and folder.is_dir()


def test_kernels_of_a_step(guard: None) -> None:
    """Ten a layer: norm, QKV, rotation with the cache's writes, attention and its second launch, output, norm, gate
    and up, SiLU, down; and no copy of a cache. Over two ranks, also two sums a layer and one for the embedding."""
    for tp, layers, entries in ((1, 2, 1), (2, 1, 16)):
        config = small(num_hidden_layers=layers)
        step, facts = count(config, entries, 1024, tp=tp), facts_of(config, "small")
        forward, split = step["compiled"]["forward"], 2 + 2 * layers if tp > 1 else 0
        assert forward == 10 * layers + 2 + split, "the last norm and the head; the embedding and its sum"
        assert step["packed_groups"] == 2 * layers and step["compiled"]["largest_copies"] == 0
        assert step["packed"]["forward"] == step["operators"]["forward"] - 3 * layers
        assert step["compiled"]["launches"] == step_launches(facts, tp, entries > 1)
        assert step["collectives"] == (tp_traffic(facts, 1, 1, 2, tp).num_collectives if tp > 1 else 0)


def test_a_start_of_gemma2_compiles_four_forms() -> None:
    """Two kinds of layers, and logits with a soft cap."""
    assert start_compiled("gemma2") == (4, 4, 4)


def test_forms_by_the_number_of_keys_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    the_number_of_keys_decides(monkeypatch)
    assert start_compiled("llama", 1, 1)[1] > 4
