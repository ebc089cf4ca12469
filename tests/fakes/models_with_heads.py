"""Checkpoints with prediction heads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dev import families
from dev.family_table import FAMILIES
from lpr.model.heads.forms import Form


def checkpoint_with_head(folder: Path, model_type: str, form: Form) -> None:
    """A random checkpoint whose last layer has the names of an MTP layer."""
    config = families.tiny_config(next(each for each in FAMILIES if each.model_type == model_type))
    num_layers, size = config.num_hidden_layers, config.hidden_size
    for name, last in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None):
            setattr(config, name, [*getattr(config, name), last])
    config.num_hidden_layers += 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and weight.dim() > 1:
                weight.normal_(0, 0.12)
    model.save_pretrained(folder)
    last, prefix = f"model.layers.{num_layers}.", form.prefix.format(num_layers)
    tensors = {
        key.replace(last, prefix + form.layer): each for key, each in load_file(folder / "model.safetensors").items()
    }
    norms = [prefix + name for name in (form.embedding_norm, form.hidden_norm, form.final_norm)]
    weight = tensors["model.norm.weight"]
    tensors |= {f"{name}.weight": weight.clone() for name in norms}
    tensors |= {f"{prefix}{name}weight": torch.ones(1) for name in form.copies if name != "layers.1."}
    tensors[f"{prefix}{form.join}.weight"] = torch.randn(size, 2 * size) / 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    changed = {name: written[name][:num_layers] for name in ("layer_types", "mlp_layer_types") if written.get(name)}
    (folder / "config.json").write_text(json.dumps(written | changed | {"num_hidden_layers": num_layers}))
