"""The long tests of tests/model/test_pretend_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.fakes.pretend_gpu import PretendGpu, gpu, guard
from tests.model.test_pretend_gpu import expected, model
from tests.model.test_pretend_gpu import test_a_checkpoint as check_checkpoint


def test_a_checkpoint_of_unknown_layers(
    gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    check_checkpoint("unknown", gpu, model, expected, tmp_path, monkeypatch, caplog)
