"""Reading low-bit checkpoints: a quantizer of transformers' own kind, by which `from_pretrained` reads their tensors.

Each module's tensors become one parameter of rows (lpr.model.low_bit.coded) before transformers stacks experts. The
tensors decide which weights are low-bit, and the config how: no weight that has a scale is read without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lpr.config import InputError, first_line
from lpr.model.low_bit.coded import Coding
from lpr.model.low_bit.formats import Coded, Format, is_skipped
from lpr.model.low_bit.layers import EXPERTS, divide, hold, logical_shape, may_be_coded
from lpr.model.rewrite.sharded_layers import generic_name

_METHOD = "lpr"
_LAYER = re.compile(r".*\.\d+\.")
_MEANS = re.compile(r"(scales?|scale_inv|zero_points?|qweight|qzeros|_packed|_blocks|absmax|quant_map|\.scale_\w+)$")
"""Ends of names of tensors without which low-bit weights mean something else."""
_ASIDE = re.compile(r"\.(k|v|q|prob|input|output|activation)_scale$")
"""Scales of K and V in 8 bits and of activations, which lpr does not round."""


class Unreadable(BaseException):
    """The reason why a checkpoint cannot be read. transformers catches and counts every Exception of a conversion."""


@dataclass(frozen=True)
class Share:
    rank: int
    size: int
    group: Any
    whole: frozenset[str]  # modules of a plan that every rank reads whole, though it divides them


class Reading:
    def __init__(self, form: Format) -> None:
        self.form = form
        self.share: Share | None = None
        self.styles: dict[str, str] | None = None
        """By the name of a module with * in the place of its number, how transformers' plan divides it."""
        self.found: dict[str, Coded] = {}
        """The weights that are low-bit by the name of the parameter, without their rows."""

    def __deepcopy__(self, memo: Any) -> Reading:
        return self  # transformers copies configs and, for every weight, converters

    def read(self, parameter: str, name: str, given: dict[str, Tensor], shape: Sequence[int] | None) -> Tensor:
        """The rows for `parameter` of a weight of `shape`, or the weight as it is stored.

        `name` is that of the module in the checkpoint, and `shape` None for one that cannot be low-bit.
        """
        try:
            if shape is None:
                if given.keys() != {"weight"} or given["weight"].dtype.itemsize == 1:
                    raise InputError(f"{self.form.method}: lpr knows no low-bit weights of {name}")
                return given["weight"]
            coded = self.form.read(name, given, shape)
            if coded is None:
                return given["weight"]
            before = self.found.setdefault(parameter, Coded(coded.coding, torch.empty(0), coded.order))
            if before.coding != coded.coding or before.order is not coded.order:
                raise InputError(f"{self.form.method}: the experts of {parameter} differ in how they are coded")
        except Exception as failure:  # of tensors of other shapes, whatever torch raises
            line = first_line(failure) if isinstance(failure, InputError) else f"{name}: {first_line(failure)}"
            raise Unreadable(line) from failure
        return coded.rows

    def style_of(self, parameter: str) -> str | None:
        """How the plan divides a module, whose weight may be low-bit; None if it does not."""
        style = (self.styles or {}).get(generic_name(parameter.rpartition(".")[0]))
        return None if self.share is None or generic_name(parameter.rpartition(".")[0]) in self.share.whole else style

    def part_of(self, parameter: str, found: Tensor) -> Tensor:
        """This rank's part of what was read for a parameter."""
        share, coded, name = self.share, self.found.get(parameter), generic_name(parameter.rpartition(".")[0])
        assert share is not None
        if self.styles is None:
            raise Unreadable("--tp of a low-bit checkpoint needs transformers 5.24 or later")
        if coded is None:
            if name in self.styles:
                raise Unreadable(f"--tp: {parameter} is not low-bit, as the config says it is")
            return found
        style, inputs = self.style_of(parameter), coded.coding.num_inputs
        if style is None:
            return found
        size = inputs if style == "rowwise" else len(found)
        if style not in ("colwise", "rowwise") or size % share.size or (style == "rowwise" and coded.order is not None):
            why = f"{size} {'in an order of their own ' if coded.order is not None else ''}by {style!r}"
            raise Unreadable(f"--tp {share.size} does not divide the low-bit weight {parameter}: {why}")
        each = size // share.size
        if style == "colwise":
            return found[share.rank * each : (share.rank + 1) * each]
        coding, rows = coded.coding.part(found, share.rank * each, each)
        if coding.num_groups > 1 and coding.group % 8:
            raise Unreadable(f"--tp {share.size} cuts the groups of {parameter} into parts of {coding.group} inputs")
        self.found[parameter] = Coded(coding, torch.empty(0), None)
        return rows


class _ReadRows(ConversionOps):
    def __init__(self, hf_quantizer: LowBitQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # by this name transformers knows that tensors keep their dtype


class ReadModule(_ReadRows):
    """Makes rows of the tensors of a module."""

    def convert(  # type: ignore[override]  # it takes what it needs by name
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        reading = self.hf_quantizer.reading
        module, _, name = full_layer_name.rpartition(".")
        owner = model.get_submodule(module)
        given = {
            key.replace("\\", "").lstrip(".").removeprefix(name if name in EXPERTS else ""): each[0]
            for key, each in input_dict.items()
        }
        shape = logical_shape(owner, name) if may_be_coded(owner, name) else None
        found = reading.read(full_layer_name, module, given, shape)
        if reading.share is not None:
            found = reading.part_of(full_layer_name, found)
        return {full_layer_name: found if full_layer_name in reading.found else found.to(getattr(owner, name).dtype)}


class ReadParts(_ReadRows):
    """Makes rows of the tensors of each of the modules that transformers makes one parameter of, as of experts."""

    def convert(  # type: ignore[override]  # it takes what it needs by name
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        reading, parts = self.hf_quantizer.reading, dict[str, dict[str, list[Tensor]]]()
        module, _, name = full_layer_name.rpartition(".")
        owner = model.get_submodule(module)
        for key, found in input_dict.items():
            stem, _, ending = key.rpartition(".")
            parts.setdefault(stem, {})[ending] = found if isinstance(found, list) else [found]
        shape, result = None, dict[str, list[Tensor]]()
        if name in EXPERTS and may_be_coded(owner, name):
            whole = logical_shape(owner, name)
            shape = whole[-2] // len(parts), whole[-1]
        for stem, tensors in parts.items():
            rows = result[f"{stem}.weight"] = []
            for i in range(max(map(len, tensors.values()))):
                place = f"{module}.{i}.{stem.rpartition('.')[2]}"
                given = {key: each[i] for key, each in tensors.items() if i < len(each)}
                rows.append(reading.read(full_layer_name, place, given, shape))
        if full_layer_name not in reading.found:
            dtype = getattr(owner, name).dtype
            result = {key: [each.to(dtype) for each in rows] for key, rows in result.items()}
        return result


@register_quantization_config(_METHOD)
class LowBitConfig(QuantizationConfigMixin):
    def __init__(self, reading: Reading, quant_method: str = _METHOD) -> None:
        self.quant_method, self.reading = quant_method, reading  # type: ignore[assignment]


@register_quantizer(_METHOD)
class LowBitQuantizer(HfQuantizer):
    requires_calibration = False
    is_trainable = False

    def __init__(self, quantization_config: LowBitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.reading = quantization_config.reading

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.reading.found

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of a weight's element, for which transformers takes memory ahead."""
        module, _, name = param_name.rpartition(".")
        owner = model.get_submodule(module)
        coding = self.reading.form.coding(module, logical_shape(owner, name)) if may_be_coded(owner, name) else None
        return param.element_size() if coding is None else coding.row_bytes / coding.num_inputs

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Take what may be low-bit out of a plan: it is divided as rows, when it is read."""
        if self.reading.share is None:
            return
        if any(may_be_coded(each, name) for each in model.modules() for name in EXPERTS if hasattr(each, name)):
            raise Unreadable(f"{self.reading.form.method}: --tp does not divide low-bit experts; --tp 1 works")
        styles = self.reading.styles = self.reading.styles or {}
        for parameter, _ in expected_codings(model, self.reading.form):
            name = generic_name(parameter.rpartition(".")[0])
            if name in plan:
                styles[name] = plan.pop(name)

    def get_weight_conversions(self) -> list[WeightConverter]:
        form = self.reading.form
        if form.target == "weight":
            has_plain = "weight" in form.names
            names = [*form.names] if has_plain else [rf"\.{each}" for each in form.names]
            return [WeightConverter(names, "weight" if has_plain else ".weight", [ReadModule(self)])]
        return [
            WeightConverter([each + ending for ending in form.names], each, [ReadModule(self)])
            for each in ("gate_up_proj", "down_proj")
        ]

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The model's own conversions, which get rows, and those of modules behind them."""
        names, found = dict.fromkeys(("weight", *self.reading.form.names)), list[Any]()
        for each in weight_conversions:
            if isinstance(each, WeightConverter) and self.reading.form.target == "weight":
                sources = each._original_source_patterns
                if all(source.endswith(".weight") for source in sources):
                    wider = [source.removesuffix("weight") + name for source in sources for name in names]
                    operations = [ReadParts(self), *each.operations]
                    made = WeightConverter(wider, list(each._original_target_patterns), operations)
                    for key in ("scope_prefix", "base_model_prefix"):
                        setattr(made, key, getattr(each, key, None))
                    each = made
            found.append(each)
        return found + self.get_weight_conversions()

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        """Raise Unreadable for a bias that the model would leave out: AutoGPTQ writes zeros, and others may not."""
        without = {name for name, each in model.named_modules() if getattr(each, "bias", 0) is None}
        for path in checkpoint_files or ():
            if path.endswith(".safetensors"):
                with safe_open(path, "pt") as file:
                    keys = [key for key in file.keys() if key.endswith(".bias") and key[:-5] in without]  # noqa: SIM118
                    if wrong := next((key for key in keys if file.get_tensor(key).any()), None):
                        raise Unreadable(f"{self.reading.form.method}: the model has no place for {wrong}")
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for key, coded in self.reading.found.items():
            module, _, name = key.rpartition(".")
            owner = model.get_submodule(module)
            rows = getattr(owner, name)
            if rows.dtype is not torch.uint8 or rows.shape[-1] != coded.coding.row_bytes:
                why = "is tied to another weight, or laid out unknown to lpr"
                raise Unreadable(f"{self.reading.form.method}: {key} {why}")
            hold(owner, name, coded, model.dtype)
            if (style := self.reading.style_of(key)) is not None and self.reading.share is not None:
                divide(owner, style, self.reading.share.rank, self.reading.share.group)
        return model


def expected_codings(model: Any, form: Format) -> Iterator[tuple[str, Coding]]:
    """The parameters of linear layers that a checkpoint of `model` has in few bits by its config, and how.

    Which they are its tensors decide: a config does not name all layers that stayed whole.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_whole = module is head if form.skipped is None else is_skipped(name, form.skipped)
        if may_be_coded(module, "weight") and not is_whole and form.target == "weight" and _LAYER.match(f"{name}."):
            coding = form.coding(name, logical_shape(module, "weight"))
            if coding is not None:
                yield f"{name}.weight", coding


def begin_reading(config: PretrainedConfig, form: Format) -> None:
    """Let `from_pretrained` of `config` read a checkpoint of a format; `end_reading` follows."""
    config.quantization_config = {"quant_method": _METHOD, "reading": Reading(form)}


def share_reading(config: Any, share: Share) -> None:
    """Let a rank of a group read its part alone, if `config` is that of a low-bit checkpoint."""
    if (reading := reading_of(config)) is not None:
        reading.share = share


def reading_of(config: Any) -> Reading | None:
    given = getattr(config, "quantization_config", None)
    return given.get("reading") if isinstance(given, dict) else None


def end_reading(model: Any, given: dict[str, Any] | None) -> None:
    """Make `model` one of transformers' plain ones, whose config has the `given` quantization_config."""
    for name in ("hf_quantizer", "quantization_method", "_weight_conversions"):
        vars(model).pop(name, None)
    model.is_quantized = False
    model.config.quantization_config = given


def check_names(model: Any, unexpected: Iterable[str]) -> None:
    """Raise InputError for tensors of the model's layers that nothing has read and that say what its weights mean."""
    modules = {name for name, _ in model.named_modules()}
    left = sorted(
        key for key in unexpected
        if _MEANS.search(key) and not _ASIDE.search(key)
        and (layer[0][:-1] if (layer := _LAYER.match(key)) else key.rpartition(".")[0]) in modules
    )  # fmt: skip
    if left:
        why = "they say what weights mean, and its quantization_config does not tell how"
        raise InputError(f"{len(left)} tensors of the checkpoint are not read, the first {left[0]}: {why}")
