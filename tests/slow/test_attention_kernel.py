"""The long tests of tests/model/kernels/test_attention_kernel.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lpr import Engine, SamplingParams
from lpr.model.tree_mask import TreeMask
from tests.fakes.again import again
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT
from tests.fakes.pretend_kernels import without_a_check
from tests.model.kernels import test_attention_kernel as fast
from tests.model.kernels.test_attention_kernel import (
    DECODE,
    DEVICE,
    FAMILIES,
    PROMPTS,
    attention_kernel,
    check_against_reference,
    make_case,
    needs_triton,
    pytestmark,
    random_parents,
)
from tests.model.kernels.test_attention_kernel import (
    test_trees_of_several_words_in_a_ragged_batch as check_ragged_batch,
)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "rules"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"window": 4096, "softcap": 50.0}),
    ],
    ids=["bfloat16", "float32, window and softcap"],
)
def test_a_context_of_32k_tokens(dtype: torch.dtype, rules: dict[str, Any]) -> None:
    parents = random_parents(np.random.default_rng(1), 40)
    case = make_case([parents], [32768], heads=(2, 1), dims=(16, 16), dtype=dtype)
    check_against_reference(attention_kernel.tree_attention, case, **rules)


@needs_triton
@pytest.mark.timeout(900)
def test_the_kernels_compile_for_gpus_without_one(tmp_path: Path) -> None:
    """The interpreter takes programs that the compiler refuses. A consumer GPU gives a block 101376 bytes at most."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    script = ROOT / "tests" / "fakes" / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert len(compiled) >= 5
    for each in compiled:
        assert each["shared"] <= 101376, each
        assert each["cubin"] > 0, each


@needs_triton
@pytest.mark.parametrize(
    "dtype, rules, num_splits",
    [(torch.float32, "window", 2), (torch.float32, "plain", 1), (torch.bfloat16, "window", 1)],
    ids=str,
)
def test_trees_of_several_words(dtype: torch.dtype, rules: str, num_splits: int) -> None:
    check_ragged_batch(dtype, rules, num_splits)


@needs_triton
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_the_engine_emits_the_same_ids_with_the_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"num_attention_heads": 2, "num_key_value_heads": 1}  # the interpreter runs a program for each head
    model = tiny_model(family, seed=7, spread=0.12, **few, **FAMILIES[family]).to(DEVICE)
    monkeypatch.setattr("lpr.engine.prepare.self_check", without_a_check)  # which is tested below
    params = SamplingParams(max_new_tokens=4)
    done = Engine.from_model(model, decode=DECODE, attention="sdpa").generate(PROMPTS, params)
    engine = Engine.from_model(model, decode=DECODE, attention="triton")

    def forbidden(*_: object) -> torch.Tensor:
        raise AssertionError("a dense mask was built")

    monkeypatch.setattr(TreeMask, "visible", forbidden)
    monkeypatch.setattr("lpr.model.attention.layer_rules._dense_mask", forbidden)
    assert [each.token_ids for each in engine.generate(PROMPTS, params)] == [each.token_ids for each in done]


test_trees_of_several_words_in_a_ragged_batch = again(
    fast.test_trees_of_several_words_in_a_ragged_batch,
    ("dtype", "rules", "num_splits"),
    [(torch.bfloat16, "plain", 2), (torch.float16, "window", 1)],
)
