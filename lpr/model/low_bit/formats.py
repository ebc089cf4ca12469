"""The formats of low-bit checkpoints: what a `quantization_config` says, and the tensors of a weight in each.

Read here, without the packages of their authors: fp8 (also fbgemm's), compressed-tensors, AWQ, GPTQ and MXFP4. Weights
keep their codes; activations are never rounded, also where a checkpoint asks for it, so a model computes what its
dequantised weights do. What is not known is refused by name.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpr.config import InputError
from lpr.model.low_bit.coded import Coding, Kind, as_bytes

PACKAGES = {"torchao": "torchao", "bitsandbytes": "bitsandbytes"}
"""Methods that transformers loads by a package: models whose weights alone are rounded work."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of AWQ the outputs 0 to 7 of eight lie
_KINDS: dict[torch.dtype, Kind] = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Coded:
    coding: Coding
    rows: Tensor  # uint8 [..., outputs, row_bytes]
    order: Tensor | None = None
    """The input that each column is multiplied by, where groups are not of inputs in their order."""


class Format(ABC):
    method: str
    names: tuple[str, ...]  # endings of the names of a weight's tensors; what they begin with is the module's name
    target = "weight"  # the parameter that they make
    skipped: tuple[str, ...] | None = None
    """Patterns of the names of modules whose weights are not low-bit; None: the output head."""

    @abstractmethod
    def read(self, name: str, given: Tensors, shape: Sequence[int]) -> Coded | None:
        """The weight [outputs, inputs] of `shape` of the module `name`; None if it is stored as it is.

        Raises InputError for tensors that do not belong together.
        """

    @abstractmethod
    def coding(self, name: str, shape: Sequence[int]) -> Coding | None:
        """What the config says of such a weight, which the checkpoint has yet to confirm."""

    def _wrong(self, name: str, what: str) -> InputError:
        return InputError(f"{self.method}: {name} {what}")

    def _need(self, name: str, given: Tensors, key: str) -> Tensor:
        if key not in given:
            raise self._wrong(name, f"has no {key}")
        return given[key]

    def _check_whole(self, name: str, given: Tensors) -> None:
        """Raise InputError unless a weight without a scale is stored as it is."""
        if self._need(name, given, "weight").dtype.itemsize == 1:
            raise self._wrong(name, "has weights in 8 bits without a scale")

    def _coded(
        self, name: str, codes: Tensor, scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None,
        zero: Tensor | None = None, order: Tensor | None = None,
    ) -> Coded:  # fmt: skip
        """The weight of `codes`, with a scale for a tensor, a row, or a `block` of outputs and inputs, of its `shape`.

        Codes of 4 bits are uint8. `zero` are codes that mean zero, of the same shape as `scale`.
        """
        outputs, inputs = shape
        coding = Coding(_KINDS[codes.dtype], inputs, block[1] if block else inputs, zero is not None)
        if tuple(codes.shape) != (outputs, inputs):
            raise self._wrong(name, f"has a weight of shape {list(codes.shape)}, not {list(shape)}")
        per_row = block[0] if block else 1
        expected = -(-outputs // per_row), coding.num_groups
        if scale.numel() == 1 or (not block and scale.numel() == outputs):
            scale = scale.reshape(-1, 1).expand(expected)
            zero = zero.reshape(-1, 1).expand(expected) if zero is not None else None
        if tuple(scale.shape) != expected or (zero is not None and zero.shape != scale.shape):
            raise self._wrong(name, f"has scales of shape {list(scale.shape)}, not {list(expected)}")
        if not bool(scale.isfinite().all()):
            raise self._wrong(name, "has scales that are not finite")
        if coding.num_groups > 1 and coding.group % 8:
            raise self._wrong(name, f"has groups of {coding.group} inputs; lpr reads those of a multiple of 8")
        if per_row > 1:
            scale = scale.repeat_interleave(per_row, 0)[:outputs]
            zero = zero.repeat_interleave(per_row, 0)[:outputs] if zero is not None else None
        if order is not None:
            codes = codes[:, order]
        return Coded(coding, coding.encode(codes, scale.expand(outputs, coding.num_groups), zero), order)


class Fp8(Format):
    """e4m3 with a scale for a tensor, a row or a block, as DeepSeek, Qwen, Mistral and fbgemm write it."""

    names: tuple[str, ...] = (
        "weight", "weight_scale_inv", "qscale_weight", "weight_scale", "activation_scale", "qscale_act", "input_scale",
        "input_scale_ub",
    )  # fmt: skip

    def __init__(self, values: dict[str, Any]) -> None:
        self.method = values["quant_method"]
        _check(values, self.method, fmt=(None, "e4m3", "float8_e4m3fn"), expert_dtype=(None, "fp8"))
        given = values.get("modules_to_not_convert")
        self.skipped = tuple(given) if given is not None else None
        block = values.get("weight_block_size")
        self.block = (int(block[0]), int(block[1])) if block else None

    def coding(self, name: str, shape: Sequence[int]) -> Coding | None:
        return Coding("fp8", shape[1], self.block[1] if self.block else shape[1])

    def read(self, name: str, given: Tensors, shape: Sequence[int]) -> Coded | None:
        scales = [given[key] for key in self.names[1:4] if key in given]
        if not scales:
            self._check_whole(name, given)
            return None
        return self.read_fp8(name, self._need(name, given, "weight"), scales[0], shape, self.block)

    def read_fp8(
        self, name: str, weight: Tensor, scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None
    ) -> Coded:
        """The weight of e4m3 with `scale`: one, one of each row, or of each `block` of outputs and inputs."""
        if weight.dtype.itemsize == 1 and weight.dtype is not torch.float8_e4m3fn:
            raise self._wrong(name, f"has weights in {weight.dtype}, not in float8_e4m3fn")
        codes = weight.to(torch.float8_e4m3fn)
        if not torch.equal(codes.float(), weight.float()):  # before 5.18 transformers widens them; NaN is unequal
            raise self._wrong(name, "has weights that are NaN, or no values of e4m3")
        return self._coded(name, codes, wide_scale(scale), shape, block)


class CompressedTensors(Fp8):
    """compressed-tensors: int4 and int8 in words, int8 and fp8 as such, scales by tensor, channel, group or block."""

    names: tuple[str, ...] = (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
        "input_scale", "input_zero_point", "output_scale", "output_zero_point",
    )  # fmt: skip
    FORMATS = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision"

    def __init__(self, values: dict[str, Any]) -> None:
        self.method = "compressed-tensors"
        _check(values, self.method, format=(None, *self.FORMATS), quantization_status=(None, "compressed", "frozen"))
        for key in ("sparsity_config", "transform_config"):
            inner = values.get(key) or {}
            if inner and inner.get("format") != "dense" and (inner.get("format") or inner.get("config_groups")):
                raise InputError(f"{self.method}: its {key} is not supported")
        self.skipped = tuple(values.get("ignore") or ())
        self.groups: list[tuple[Sequence[str], dict[str, Any]]] = []
        for group in (values.get("config_groups") or {}).values():
            args = group.get("weights") or {}
            if not args:
                continue
            _check(group, self.method, format=(None, *self.FORMATS))
            kinds = {("int", 4), ("int", 8), ("float", 8)}
            if (args.get("type"), args.get("num_bits")) not in kinds:
                raise InputError(
                    f"{self.method}: weights of type {args.get('type')!r} with {args.get('num_bits')} bits are not "
                    "supported, those of int 4, int 8 and float 8 are"
                )
            _check(args, self.method, strategy=("tensor", "channel", "group", "block"))
            self.groups.append((group.get("targets") or (), args))

    def coding(self, name: str, shape: Sequence[int]) -> Coding | None:
        if (args := self._args(name)) is None:
            return None
        group = {"group": args.get("group_size"), "block": (args.get("block_structure") or (0, 0))[1]}
        kind: Kind = "fp8" if args["type"] == "float" else "int4" if args["num_bits"] == 4 else "int8"
        return Coding(kind, shape[1], group.get(args["strategy"]) or shape[1], not args.get("symmetric", True))

    def _args(self, name: str) -> dict[str, Any] | None:
        """The config's words on the weights of a linear layer; None if they are not rounded."""
        if any(_matches(name, each) for each in self.skipped or ()):
            return None
        named = [args for targets, args in self.groups if any(t != "Linear" and _matches(name, t) for t in targets)]
        return next(iter([*named, *(args for targets, args in self.groups if "Linear" in targets)]), None)

    def read(self, name: str, given: Tensors, shape: Sequence[int]) -> Coded | None:
        if "weight_scale" not in given and "weight_packed" not in given:
            self._check_whole(name, given)
            return None
        if (args := self._args(name)) is None:
            raise self._wrong(name, "has a scale, but no group of its config is for it")
        scale, sizes = self._need(name, given, "weight_scale"), args.get("block_structure")
        if args["type"] == "float":
            sizes = (int(sizes[0]), int(sizes[1])) if sizes and args["strategy"] == "block" else None
            return self.read_fp8(name, self._need(name, given, "weight"), scale, shape, sizes)
        bits = args["num_bits"]
        zero = given.get("weight_zero_point")
        if "weight_packed" in given:
            codes = _unpacked(given["weight_packed"], bits)[:, : shape[1]]
            if zero is not None and zero.dtype is torch.int32:
                zero = _unpacked(zero.T, bits).T[: shape[0]].int() - 2 ** (bits - 1)
        else:
            codes = self._need(name, given, "weight")
            if codes.dtype is not torch.int8:
                raise self._wrong(name, f"has weights in {codes.dtype}, not int8: it is not stored compressed")
            codes = (codes.int() + 2 ** (bits - 1)).to(torch.uint8)
        size = args.get("group_size") if args["strategy"] == "group" else None
        order = _order_of(self, name, given.get("weight_g_idx"), size)
        block = (1, size) if size else None
        return self._coded(name, _signed(codes, bits), scale.float(), shape, block, zero, order)


class Awq(Format):
    """AWQ's "gemm": four bits, inputs by outputs / 8, the eight outputs of a word in an order of their own."""

    names, method = ("qweight", "qzeros", "scales"), "awq"

    def __init__(self, values: dict[str, Any]) -> None:
        version = str(values.get("version", values.get("format", "gemm"))).lower()
        if values.get("bits", values.get("w_bit", 4)) != 4 or version != "gemm":
            what = f"bits {values.get('bits')!r} of version {version!r}"
            raise InputError(f"awq: {what} are not supported, 4 of 'gemm' are")
        self.skipped = (*(values.get("modules_to_not_convert") or ()), "lm_head")
        self.group = max(0, int(values.get("group_size", values.get("q_group_size", 128))))
        self.has_zero = bool(values.get("zero_point", True))

    def coding(self, name: str, shape: Sequence[int]) -> Coding:
        return Coding("int4", shape[1], self.group or shape[1], self.has_zero)

    def read(self, name: str, given: Tensors, shape: Sequence[int]) -> Coded | None:
        codes, scale = self._in_order(given, "qweight", name), self._need(name, given, "scales").T.float()
        zero = self._in_order(given, "qzeros", name).int() - 8 if self.has_zero or "qzeros" in given else None
        return self._coded(name, codes, scale, shape, (1, self.group) if self.group else None, zero)

    def _in_order(self, given: Tensors, key: str, name: str) -> Tensor:
        """The codes [outputs, n] of words [n, outputs / 8]."""
        words = _unpacked(self._need(name, given, key), 4)
        return words.unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1).T


class Gptq(Format):
    """GPTQ: four or eight bits, inputs / 8 by outputs, also with inputs in the order of their activations."""

    names, method = ("qweight", "qzeros", "scales", "g_idx"), "gptq"

    def __init__(self, values: dict[str, Any]) -> None:
        _check(values, "gptq", bits=(4, 8), checkpoint_format=(None, "gptq", "gptq_v2"), pack_dtype=(None, "int32"))
        self.bits, self.is_first = values["bits"], values.get("checkpoint_format") != "gptq_v2"
        self.group, self.is_symmetric = max(0, int(values.get("group_size", 128))), bool(values.get("sym", True))
        rules: dict[str, Any] = values.get("dynamic") or {}
        if any(each.startswith("+:") or (rules[each] and not each.startswith("-:")) for each in rules):
            raise InputError("gptq: sizes that differ from layer to layer ('dynamic') are not supported")
        ends = () if values.get("lm_head") else ("lm_head",)
        self.skipped = (*(each.removeprefix("-:") for each in rules), *ends)

    def coding(self, name: str, shape: Sequence[int]) -> Coding:
        return Coding("int4" if self.bits == 4 else "int8", shape[1], self.group or shape[1], not self.is_symmetric)

    def read(self, name: str, given: Tensors, shape: Sequence[int]) -> Coded | None:
        codes = _unpacked(self._need(name, given, "qweight").T, self.bits)
        zero = _unpacked(self._need(name, given, "qzeros"), self.bits).T
        if self.is_first:  # stored less one, so that -1 is all bits
            zero = (zero + 1) & (2**self.bits - 1)
        shifted = zero.int() - 2 ** (self.bits - 1)
        order = _order_of(self, name, given.get("g_idx"), self.group)
        scale, block = self._need(name, given, "scales").T.float(), (1, self.group) if self.group else None
        has_zero = not self.is_symmetric or bool(shifted.any())
        return self._coded(name, _signed(codes, self.bits), scale, shape, block, shifted if has_zero else None, order)


class Mxfp4(Format):
    """The experts of GPT-OSS: e2m1 with an exponent for each 32 inputs."""

    names, method, target = ("_blocks", "_scales"), "mxfp4", ""

    def __init__(self, values: dict[str, Any]) -> None:
        self.skipped = tuple(values.get("modules_to_not_convert") or ())

    def coding(self, name: str, shape: Sequence[int]) -> Coding | None:
        return Coding("fp4", shape[-1], 32) if name.endswith(".experts") else None

    def read(self, name: str, given: Tensors, shape: Sequence[int]) -> Coded | None:
        blocks, scale = self._need(name, given, "_blocks"), self._need(name, given, "_scales")
        coding = Coding("fp4", shape[-1], 32)
        expected = (*shape[:-1], coding.num_groups)
        if blocks.shape != (*expected, 16) or scale.shape != expected or blocks.dtype is not torch.uint8:
            raise self._wrong(name, f"has blocks {list(blocks.shape)} for a weight of shape {list(shape)}")
        scales = as_bytes(wide_scale(scale))
        return Coded(coding, torch.cat([scales, blocks.flatten(-2)], -1))


FORMATS: dict[str, type[Any]] = {
    "fp8": Fp8, "fbgemm_fp8": Fp8, "mxfp8": Fp8, "compressed-tensors": CompressedTensors, "awq": Awq, "gptq": Gptq,
    "mxfp4": Mxfp4,
}  # fmt: skip


def read_format(config: Any) -> Format | None:
    """The format of the checkpoint of `config`; None without one, and for PACKAGES, which transformers loads.

    Raises InputError with one line for a format that lpr does not know, and for a package that is missing.
    """
    given = quantization_of(config)
    if given is None:
        return None
    method = given.get("quant_method") or ("bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & set(given) else None)
    if method in PACKAGES:
        if importlib.util.find_spec(PACKAGES[method]) is None:
            raise InputError(f"the checkpoint is quantised by {method!r}, whose package is not installed")
        return None
    if method not in FORMATS:
        raise InputError(f"the checkpoint is quantised by {method!r}; lpr knows {', '.join([*FORMATS, *PACKAGES])}")
    try:
        found: Format = FORMATS[method](given)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as failure:
        what = f"{type(failure).__name__}: {failure}"
        raise InputError(f"the checkpoint's quantization_config of {method!r} is damaged: {what}"[:300]) from failure
    return found


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config or of its text part, as a dict."""
    for each in (config, config.get_text_config(decoder=True)):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def is_skipped(name: str, patterns: Sequence[str]) -> bool:
    """True if a module is named by one of `patterns`: its beginning up to a dot, as an expression, or its end."""
    edge = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(rf"(?:{each}){edge}", name) or name.endswith(each) for each in patterns)


def wide_scale(scale: Tensor) -> Tensor:
    """A scale in float32; of bytes that are exponents of 2, as of e8m0."""
    if scale.dtype is torch.uint8:
        if bool((scale == 255).any()):
            raise InputError("a scale is NaN")
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
    return scale.float()


def _check(values: Mapping[str, Any], method: str, **known: Sequence[Any]) -> None:
    for key, allowed in known.items():
        if (found := values.get(key)) not in allowed:
            names = ", ".join(str(each) for each in allowed if each is not None)
            raise InputError(f"{method}: {key} {found!r} is not supported, {names} are")


def _matches(name: str, pattern: str) -> bool:
    """As compressed-tensors compares the name of a module."""
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern == name


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes, uint8 [n, m * 32 / bits], of int32 words [n, m], whose lowest bits are first."""
    if words.dtype is not torch.int32:
        raise InputError(f"packed weights are in {words.dtype}, not int32")
    data = words.contiguous().view(torch.uint8)
    return torch.stack([data & 15, data >> 4], 2).flatten(1) if bits == 4 else data


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Codes above a middle, uint8: those of 8 bits as int8."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes


def _order_of(form: Format, name: str, found: Tensor | None, size: int | None) -> Tensor | None:
    """The inputs by their groups `found` [inputs], which are all of `size`; None if they are in their order."""
    if found is None or not size or bool((found == -1).any()):
        return None
    groups = torch.arange(len(found), device=found.device) // size
    if torch.equal(found.long(), groups):
        return None
    order = found.argsort(stable=True)
    if not torch.equal(found[order].long(), groups):
        raise form._wrong(name, f"has groups of other sizes than {size} (g_idx)")
    return order
