"""LoRA adapters of tests: folders as PEFT writes them, and models into whose weights they are merged."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": r".*\.(q|k|o)_proj"},
    {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "alpha_pattern": {"down_proj": 12},
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6},
    },
    {"r": 3, "lora_alpha": 9, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    {"r": 17, "lora_alpha": 17, "target_modules": ATTENTION, "layers_to_transform": [1]},
    {"r": 2, "lora_alpha": 4, "target_modules": ATTENTION, "exclude_modules": ["layers.0.self_attn.k_proj"]},
    {"r": 1, "lora_alpha": 2, "target_modules": ["model.layers.0.self_attn.q_proj", "up_proj"]},
]  # fmt: skip
"""Settings of PEFT's LoraConfig, by which ranks, scalings and targets differ."""


def write_adapter(
    folder: Path, model: PreTrainedModel, modules: Sequence[str], seed: int = 0, spread: float = 0.15, **fields: Any
) -> Path:
    """A random adapter of the modules of `model` with one of these ends; `fields` are those of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(modules), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(tuple(modules)) and isinstance(module, nn.Linear | Conv1D):
            shape = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
            key, rank = f"base_model.model.{name}.lora", config["r"]
            tensors[f"{key}_A.weight"] = torch.randn(rank, shape[1], generator=generator) * spread
            tensors[f"{key}_B.weight"] = torch.randn(shape[0], rank, generator=generator) * spread
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of `model` with an adapter of one rank and scaling in its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, twin = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(model)
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for key, down in tensors.items():
        if found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", key):
            module = twin.get_submodule(found[1])
            change = scaling * tensors[key.replace("lora_A", "lora_B")] @ down
            module.weight.data += change if isinstance(module, nn.Linear) else change.T
    return twin
