"""Checkpoints in the formats of others, packed here as their authors define them, beside the weights that they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fakes.models import tiny_model

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Packed = tuple[dict[str, Tensor], Tensor]
"""A module's tensors by the ends of their names, and the weight [outputs, inputs] in float32 that they mean."""


@dataclass(frozen=True)
class Case:
    """A format."""

    config: dict[str, Any]
    pack: Callable[[Tensor, torch.Generator], Packed]
    model: dict[str, Any] = field(default_factory=dict)


def words(codes: Tensor, bits: int) -> Tensor:
    """Int32 words [n, m / (32 / bits)] of codes [n, m], the first in the lowest bits."""
    each = 32 // bits
    parts = codes.long().unflatten(1, (-1, each)) << (torch.arange(each) * bits)
    return parts.sum(2).to(torch.int32)  # the lowest 32 bits


def fp8(block: tuple[int, int] | None, key: str, scale_dtype: torch.dtype = torch.float32) -> Any:
    """e4m3 with a scale for a block, a row ((1, -1)) or all."""

    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        outputs, inputs = weight.shape
        rows, columns = (outputs, inputs) if block is None else (block[0], inputs if block[1] < 0 else block[1])
        tall, wide = -(-outputs // rows), -(-inputs // columns)
        scale = torch.rand(tall, wide, generator=generator) * 0.003 + 0.0005
        if scale_dtype is torch.uint8:
            exponents = torch.randint(116, 122, (tall, wide), generator=generator)
            stored, scale = exponents.to(torch.uint8), 2.0 ** (exponents - 127)
        else:
            stored = scale.to(scale_dtype)
            scale = stored.float()
        spread = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        values = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = stored.reshape(()) if block is None and key == "weight_scale_inv" else stored
        return {"weight": values, key: stored}, values.float() * spread

    return pack


def _grouped(weight: Tensor, group: int, bits: int, generator: torch.Generator, symmetric: bool) -> Any:
    """Codes [outputs, inputs], scales and zero points [outputs, groups] in half precision, and what they mean."""
    outputs, inputs = weight.shape
    size = inputs if group < 0 else group
    parts = weight.unflatten(1, (-1, size))
    low, high = parts.amin(2), parts.amax(2)
    top = 2**bits - 1
    if symmetric:
        scale = (parts.abs().amax(2) / (2 ** (bits - 1))).half()
        zero = torch.full_like(low, 2 ** (bits - 1)).int()
    else:
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(0, top).int()
    codes = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, top).int()
    dense = (codes - zero[..., None]) * scale.float()[..., None]
    return codes.flatten(1), scale, zero, dense.flatten(1)


def gptq(bits: int, group: int, symmetric: bool, is_first: bool = True, by_activation: bool = False) -> Any:
    """GPTQ, whose first form stores zero points less one."""

    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=generator) if by_activation else torch.arange(inputs)
        codes, scale, zero, dense = _grouped(weight[:, order], group, bits, generator, symmetric)
        back = order.argsort()
        index = (torch.arange(inputs) // (inputs if group < 0 else group))[back]
        stored = (zero - 1).remainder(2**bits) if is_first else zero
        tensors = {
            "qweight": words(codes[:, back], bits).T,
            "qzeros": words(stored.T, bits),
            "scales": scale.T,
            "g_idx": index.int(),
        }
        return tensors, dense[:, back]

    return pack


def awq(group: int) -> Any:
    """AWQ's gemm: eight outputs in a word, in an order of its own."""

    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        codes, scale, zero, dense = _grouped(weight, group, 4, generator, symmetric=False)
        shuffled = [each.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1) for each in (codes, zero)]
        return {"qweight": words(shuffled[0], 4), "qzeros": words(shuffled[1], 4), "scales": scale.T}, dense

    return pack


def packed(bits: int, group: int, symmetric: bool = True, by_activation: bool = False) -> Any:
    """compressed-tensors' pack-quantized."""

    def pack(weight: Tensor, generator: torch.Generator) -> Packed:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=generator) if by_activation else torch.arange(inputs)
        codes, scale, zero, dense = _grouped(weight[:, order], group, bits, generator, symmetric)
        back = order.argsort()
        tensors = {
            "weight_packed": words(codes[:, back], bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zero.T, bits).T
        if by_activation:
            tensors["weight_g_idx"] = (torch.arange(inputs) // group)[back].int()
        return tensors, dense[:, back]

    return pack


def int8(weight: Tensor, generator: torch.Generator) -> Packed:
    """compressed-tensors' int-quantized, with a scale a row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def compressed(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    args = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": None, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


DYNAMIC = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


def gptq_config(**given: Any) -> dict[str, Any]:
    """A quantization_config of GPTQ."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **given}


def awq_config(group: int) -> dict[str, Any]:
    """A quantization_config of AWQ."""
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


CASES = {
    "fp8-tensor": Case({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8(None, "weight_scale_inv")),
    "fp8-blocks": Case(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, fp8((128, 128), "weight_scale_inv"),
        {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48},
    ),
    "fp8-small-blocks": Case({"quant_method": "fp8", "weight_block_size": [32, 16]}, fp8((32, 16), "weight_scale_inv")),
    "mxfp8": Case(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, fp8((1, 32), "weight_scale_inv", torch.uint8)
    ),
    "fbgemm-fp8": Case(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8((1, -1), "weight_scale")
    ),
    "ct-fp8-channel": Case(
        compressed("float-quantized", DYNAMIC, type="float", num_bits=8, strategy="channel"),
        fp8((1, -1), "weight_scale", torch.bfloat16),
    ),
    "ct-fp8-tensor": Case(
        compressed("float-quantized", DYNAMIC, type="float", num_bits=8, strategy="tensor"), fp8(None, "weight_scale")
    ),
    "ct-fp8-block": Case(
        compressed("float-quantized", DYNAMIC, type="float", num_bits=8, strategy="block", block_structure=[32, 32]),
        fp8((32, 32), "weight_scale"),
    ),
    "ct-w8a16-channel": Case(compressed("pack-quantized", num_bits=8, strategy="channel"), packed(8, -1)),
    "ct-w8a16-int": Case(compressed("int-quantized", num_bits=8, strategy="channel"), int8),
    "ct-w4a16": Case(compressed("pack-quantized", group_size=32), packed(4, 32)),
    "ct-w4a16-asymmetric": Case(
        compressed("pack-quantized", group_size=16, symmetric=False), packed(4, 16, symmetric=False)
    ),
    "ct-w4a16-by-activation": Case(
        compressed("pack-quantized", group_size=32, actorder="group"), packed(4, 32, by_activation=True)
    ),
    "awq": Case(awq_config(32), awq(32)),
    "awq-rows": Case(awq_config(-1), awq(-1)),
    "gptq": Case(gptq_config(), gptq(4, 32, True)),
    "gptq-asymmetric": Case(gptq_config(sym=False), gptq(4, 32, False)),
    "gptq-by-activation": Case(gptq_config(desc_act=True), gptq(4, 32, True, by_activation=True)),
    "gptq-v2": Case(
        gptq_config(group_size=-1, sym=False, checkpoint_format="gptq_v2"), gptq(4, -1, False, is_first=False)
    ),
    "gptq-8-bits": Case(gptq_config(bits=8, sym=False), gptq(8, 32, False)),
}  # fmt: skip


def write(folder: Path, case: Case, model_type: str = "llama", **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint of `case` to `folder`, and return the model of its dequantised weights."""
    model = tiny_model(model_type, **{**case.model, **overrides})
    generator, head = torch.Generator().manual_seed(3), model.get_output_embeddings()
    layers = {name for name, each in model.named_modules() if type(each) is torch.nn.Linear and each is not head}
    model.save_pretrained(folder)
    stored, dense = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name in list(stored):
        module, _, ending = name.rpartition(".")
        if case.pack is not None and (module in layers or re.search(r"\.experts\.\d+\.", name)) and ending == "weight":
            parts, dense[name] = case.pack(stored.pop(name), generator)
            stored |= {f"{module}.{key}": each for key, each in parts.items()}
        elif case.config["quant_method"] == "mxfp4" and name.endswith("experts." + ending) and "bias" not in ending:
            parts, dense[name] = mxfp4(stored.pop(name), generator)
            stored |= {f"{module}.{ending}_{key}": each for key, each in parts.items()}
        else:
            dense[name] = stored[name]
    finish(folder, dense, None)
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    finish(folder, stored, case.config)
    return reference.eval()


def mxfp4(weight: Tensor, generator: torch.Generator) -> Packed:
    """Blocks of 32 inputs with an exponent each, of experts [experts, inputs, outputs]."""
    rows = weight.transpose(1, 2)
    shape = (*rows.shape[:2], rows.shape[2] // 32, 16)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    exponents = torch.randint(122, 125, shape[:3], generator=generator)
    values = FP4[torch.stack([codes & 15, codes >> 4], 4).int()].flatten(3) * 2.0 ** (exponents - 127)[..., None]
    return {"blocks": codes, "scales": exponents.to(torch.uint8)}, values.flatten(2).transpose(1, 2)


def finish(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None) -> None:
    """Write tensors and the config's quantization_config."""
    save_file({name: each.contiguous().clone() for name, each in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    values = {key: each for key, each in json.loads(path.read_text()).items() if key != "quantization_config"}
    path.write_text(json.dumps({**values, "quantization_config": config} if config else values))
