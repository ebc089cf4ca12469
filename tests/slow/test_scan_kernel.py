"""The long tests of tests/model/kernels/test_scan_kernel.py."""

from __future__ import annotations

import pytest

from tests.model.kernels.test_scan_kernel import few_heads, pytestmark
from tests.model.kernels.test_scan_kernel import test_an_engine_emits_the_same_ids as check_ids
from tests.model.kernels.test_scan_kernel import test_exact_bits_by_kernels as check_exact_bits
from tests.model.kernels.test_scan_kernel import test_linear_attention as check_linear_attention


@pytest.mark.parametrize(("kind", "dim", "dim_v"), [("delta", 128, 64), ("ssd", 64, 128)])
def test_linear_attention_of_large_heads(kind: str, dim: int, dim_v: int) -> None:
    check_linear_attention(kind, dim, dim_v, True)


def test_an_engine_of_qwen3_next_emits_the_same_ids(few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_ids("qwen3_next", few_heads, monkeypatch)


def test_exact_bits_of_mamba_2_by_kernels(few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_exact_bits("mamba2", few_heads, monkeypatch)
