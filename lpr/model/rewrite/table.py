"""All changes that lpr makes to a transformers model: one ordered list of rewrites, and one table of their conflicts.

`rewrite` applies the rewrites of a stage and returns the reason for each one that does not apply. transformers'
`WeightConverter` also merges weights at load, but into modules with other names, which the modelling file must have;
`use_kernel_forward_from_hub` marks classes only if the package kernels is installed. Neither works for a model that
keeps its modules and names.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from lpr.model.attention.pooled import PooledKeys
from lpr.model.attention.sparse import Indexers
from lpr.model.cpu.products import PrepackedProducts
from lpr.model.exact.check import PinnedProducts
from lpr.model.exact.functions import FixedExperts
from lpr.model.fused.decoder_layer import DecoderLayers
from lpr.model.fused.modules import GatedMlps, RmsNorms
from lpr.model.graph_capture import uncapturable
from lpr.model.low_bit.layers import CodedProducts
from lpr.model.multimodal import DroppedTowers, empty_decoder, takes_positions
from lpr.model.recurrent.layer_embeddings import LayerEmbeddings
from lpr.model.recurrent.plug import RecurrentCalls
from lpr.model.rewrite.base import NewForward, Rewrite, Setting, Stage, carry_out, done_to, undo
from lpr.model.rewrite.compiled_model import CompiledModel
from lpr.model.rewrite.merged_linear import MergedLinear
from lpr.model.rewrite.positions import FalconLayers, QueryTemperature, RelativeDistances
from lpr.model.rewrite.sharded_layers import ShardedLayers

COMPILED = CompiledModel()
FUSED = DecoderLayers(), GatedMlps(), RmsNorms()
REWRITES: tuple[Rewrite, ...] = (
    DroppedTowers(),
    ShardedLayers(),
    RecurrentCalls(),
    LayerEmbeddings(),
    Indexers(),
    PooledKeys(),
    RelativeDistances(),
    QueryTemperature(),
    FalconLayers(),
    CodedProducts(),
    MergedLinear(),
    PrepackedProducts(),
    *FUSED,
    PinnedProducts(),
    FixedExperts(),
    COMPILED,
)
"""In the order of application: fused layers need merged weights, and exact mode pins the resulting products."""


@dataclass(frozen=True)
class Conflict:
    """A rewrite, and the mode or rewrite that excludes it."""

    losers: tuple[type[Rewrite], ...]
    winner: str | type[Rewrite]  # a mode (Setting.modes), or an applied or chosen rewrite
    reason: str
    only: str = ""  # the mode in which they conflict; "": all modes
    unless: type[Rewrite] | None = None  # lifts the conflict if it is chosen


_FUSED = (DecoderLayers, GatedMlps, RmsNorms)
CONFLICTS = (
    Conflict((MergedLinear,), "foreign", "the program may call the model too", unless=CompiledModel),
    Conflict((CodedProducts, PrepackedProducts, *_FUSED), "foreign", "the program may call the model too"),
    Conflict(
        (MergedLinear, PrepackedProducts, *_FUSED), "tp", "exact mode pins the products of the parts", only="exact"
    ),
    Conflict((MergedLinear, *_FUSED), "exact", "exact mode replaces the modules' products", only="cuda"),
    Conflict(_FUSED, "compile=on", "a compiler that is asked for fuses what lies between products", only="cuda"),
    Conflict((CompiledModel,), "exact", "compile adds in an order that the compiler chooses: it cannot be exact"),
    Conflict((CompiledModel,), "adapters", "compiled steps have no adapters: use compile='off'"),
    Conflict((CompiledModel,), "draft head", "compile='on' does not go with a prediction head: use --draft-heads off"),
    Conflict((CompiledModel,), "foreign", "the program may call the model too", only="compile=auto"),
    Conflict((CompiledModel,), DecoderLayers, "whole layers are computed by few calls", only="compile=auto"),
    Conflict((GatedMlps, RmsNorms), CompiledModel, "the compiler fuses them"),
)
"""The first applicable conflict is used."""


def why_not(rewrite: Rewrite, model: nn.Module, setting: Setting) -> str | None:
    """The reason why `rewrite` does not apply to `model`, its own or by CONFLICTS; None if it applies."""
    if (why := rewrite.why_not(model, setting)) is not None:
        return why
    for each in CONFLICTS:
        if type(rewrite) in each.losers and (not each.only or each.only in setting.modes):
            is_lifted = each.unless is not None and _holds(each.unless, model, setting)
            if _holds(each.winner, model, setting) and not is_lifted:
                return each.reason
    return None


def _holds(what: str | type[Rewrite], model: nn.Module, setting: Setting) -> bool:
    if isinstance(what, str):
        return what in setting.modes
    found = next(each for each in REWRITES if type(each) is what)
    return found.name in done_to(model) or (found.stage is Stage.LATE and why_not(found, model, setting) is None)


@dataclass(frozen=True)
class Line:
    name: str
    num_modules: int
    reason: str | None  # None: applied

    def __str__(self) -> str:
        return f"{self.name}: {self.num_modules or self.reason}"


def rewrite(model: nn.Module, setting: Setting, *stages: Stage) -> list[Line]:
    """Apply the rewrites of `stages` that match modules of `model` and have no conflict; returns all outcomes."""
    lines = []
    for each in REWRITES:
        if each.stage in stages:
            why = why_not(each, model, setting)
            count = 0 if why is not None else len(carry_out(each, model, setting))
            lines.append(Line(each.name, count, why or (None if count else "it has no such module")))
    return lines


def undo_forwards(model: nn.Module) -> bool:
    """Restore all modules' own forwards; False if none was replaced. Weights stay merged."""
    found = [each for each in REWRITES if isinstance(each, NewForward) and each.name in done_to(model)]
    for each in found:
        undo(each, model)
    return bool(found)


def dry_run(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> list[Line]:
    """The rewrites that an engine would apply to a model of `config` on a device type, tried on the meta device."""
    with torch.device("meta"):
        model = empty_decoder(config)
    nn.Module.to(model, dtype=dtype).eval()
    uncaptured = uncapturable(model, takes_positions(model)) if device.type == "cuda" else "it needs a GPU"
    return rewrite(model, Setting(device, compile="auto", uncaptured=uncaptured), *Stage)
