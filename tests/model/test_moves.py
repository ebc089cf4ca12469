"""Which function moves rows on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lpr.model import moves

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import moves_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("fault", ["broken", "wrong"])
def test_a_kernel_that_does_not_work_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert moves.gpu_mover.__wrapped__(DEVICE) is moves_kernel.move_rows and not caplog.text

    def broken(*_: object) -> None:
        if fault == "broken":
            raise OSError("ptxas is missing")

    monkeypatch.setattr(moves_kernel, "move_rows", broken)
    assert moves.gpu_mover.__wrapped__(DEVICE) is moves.by_operators
    assert ("ptxas is missing" if fault == "broken" else "it moved other rows") in caplog.text
