"""Rewrites of lpr.model.rewrite for a model of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lpr.model.cpu.products import PrepackedProducts
from lpr.model.rewrite.base import Rewrite, Setting, Stage, carry_out
from lpr.model.rewrite.merged_linear import MergedLinear
from lpr.model.rewrite.table import rewrite


def setting_of(model: nn.Module, **modes: Any) -> Setting:
    """Of lpr's own model, on its device."""
    return Setting(next(model.parameters()).device, **modes)


def make_faster(model: nn.Module, **modes: Any) -> dict[str, int]:
    """What was rewritten, by name."""
    found = rewrite(model, setting_of(model, **modes), Stage.FASTER)
    return {line.name: line.num_modules for line in found if line.reason is None}


def carried_out(made: Rewrite, model: nn.Module) -> int:
    """How many modules a rewrite has changed."""
    return len(carry_out(made, model, setting_of(model)))


def merge_projections(model: nn.Module, has_room: Callable[[], bool] = lambda: True) -> int:
    """Groups whose products are merged, as on a GPU."""
    return carried_out(MergedLinear(lambda device: has_room()), model)


def prepack(model: nn.Module) -> int:
    """Products that are prepacked."""
    return carried_out(PrepackedProducts(), model)
