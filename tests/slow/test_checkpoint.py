"""The long tests of tests/model/low_bit/test_checkpoint.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lpr import DecodeConfig, Engine
from lpr.model import loader
from lpr.model.low_bit.layers import CodedLinear, coded_modules
from tests.fakes.low_bit_checkpoints import CASES, write
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu
from tests.model.low_bit.test_checkpoint import check_ids


def test_ids_on_a_pretend_gpu(gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers keep their codes, which a kernel reads."""
    reference = write(tmp_path, CASES["gptq-asymmetric"])

    def read_there(where: torch.device, read: Any, dtype: Any) -> Any:
        model, info = read(dtype=dtype)
        return to_gpu(model), info

    monkeypatch.setattr(loader, "_read_to", read_there)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: module)  # it is there
    decode = DecodeConfig(max_length=256, kv_tokens=1024)
    engine = Engine.from_pretrained(str(tmp_path), decode, device="cuda", dtype="float32")
    found = coded_modules(engine.model.model)
    assert {type(each) for _, each in found} == {CodedLinear} and engine.model.capturer is not None
    check_ids(engine, reference, 8)
