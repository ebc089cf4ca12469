"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors (Hu et al. 2021).

Every config field that affects PEFT's computation is supported or refused by name; the weights must be those that the
config names.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lpr.config import InputError, first_line
from lpr.model.parallel import num_kv_heads

MOST_RANK = 512
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
        "lora_dropout", "loftq_config", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
        "revision", "runtime_config", "task_type", "velora_config",
    }
)  # fmt: skip
"""Config fields without effect on a trained adapter; all other unknown fields are refused."""
_HARMLESS_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that do not change the model's weights."""


class Config(msgspec.Struct):
    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    init_lora_weights: bool | str = True
    bias: str = "none"

    def targets(self, name: str, module: nn.Module, head: nn.Module | None) -> bool:
        """True if PEFT adapts the module `name`."""
        if _is_named(name, self.exclude_modules):
            return False
        if isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear":
            return isinstance(module, nn.Linear | Conv1D) and module is not head
        if not _is_named(name, self.target_modules):
            return False
        chosen = self.layers_to_transform
        if isinstance(self.target_modules, str) or chosen is None or chosen == []:
            return True
        given = self.layers_pattern or r"[^.]*"
        patterns = [given] if isinstance(given, str) else given
        found = [re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns]
        layer = next((int(each[1]) for each in found if each is not None), None)
        return layer in ([chosen] if isinstance(chosen, int) else chosen)

    def rank(self, name: str) -> int:
        return int(_by_pattern(self.rank_pattern, name, self.r))

    def scaling(self, name: str) -> float:
        rank = self.rank(name)
        return _by_pattern(self.alpha_pattern, name, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class Pair:
    """A low-rank pair that adds `up @ down @ x` to a product; `up` includes the scaling."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]


@dataclass(frozen=True)
class LoraFiles:
    """The contents of an adapter's files, before they are matched with a model."""

    path: Path
    config: Config
    tensors: Mapping[str, Mapping[str, Tensor]]  # by module name: A [rank, inputs] and B [outputs, rank]
    digest: str  # 128 bits of config and weights in hexadecimal: adapters with one digest are the same

    def pairs(self, model: Any, tp: int = 1) -> dict[str, Pair]:
        """By module name, its pair, unsplit and in float32; raises InputError. `tp` ranks share the weights."""
        modules, head = dict(model.named_modules()), model.get_output_embeddings()
        wanted = {name for name, module in modules.items() if self.config.targets(name, module, head)}
        for name in sorted(self.tensors):
            if name not in wanted:
                why = "target_modules does not name" if name in modules else "this model does not have"
                raise self._refused(f"it has weights for {name}, which {why}")
        for name in sorted(wanted):
            if name not in self.tensors:
                raise self._refused(f"it has no weights for {name}, which target_modules names")
        heads = num_kv_heads(model.config.get_text_config(decoder=True)) if tp > 1 else 1
        return {name: self._pair(name, modules[name], modules[name] is head, heads) for name in sorted(wanted)}

    def _pair(self, name: str, module: Any, is_head: bool, num_heads: int) -> Pair:
        tensors, rank = self.tensors[name], self.config.rank(name)
        if is_head or not isinstance(module, nn.Linear | Conv1D) or "experts" in name.split("."):
            kind = "the output head" if is_head else f"a {type(module).__name__}"
            raise self._refused(f"it adapts {name}, {kind}; linear layers outside of experts are supported")
        sizes = module.weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        shapes = (rank, sizes[0]), (sizes[1], rank)
        for key, shape in zip("AB", shapes, strict=True):
            found = tuple(tensors[key].shape) if key in tensors else None
            is_cut = key == "B" and found == (num_heads * sizes[1], rank) and name.endswith((".k_proj", ".v_proj"))
            if found != shape and not is_cut:  # ranks with one of the key/value heads have no more of these layers
                what = f"shape {list(found)}" if found is not None else "no tensor"
                raise self._refused(f"lora_{key} of {name} has {what}, and config and model want {list(shape)}")
        return Pair(tensors["A"].float(), tensors["B"].float() * self.config.scaling(name))

    def _refused(self, why: str) -> InputError:
        return InputError(f"the adapter in {str(self.path)!r} cannot be used: {why}")


def read_lora(folder: str | Path) -> LoraFiles:
    """Read an adapter's folder; raises InputError with one line if it is damaged or not supported."""
    path = Path(folder)
    try:
        given, weights = (path / "adapter_config.json").read_bytes(), (path / "adapter_model.safetensors").read_bytes()
        fields = json.loads(given)
        config = msgspec.convert(fields, Config)
        tensors = load(weights)
    except OSError as failure:
        raise InputError(f"cannot read the adapter {failure.filename}: {failure.strerror}") from failure
    except Exception as failure:  # of safetensors, json and msgspec
        raise InputError(f"the adapter in {str(path)!r} cannot be read: {first_line(failure)}") from failure
    found: dict[str, dict[str, Tensor]] = {}
    files = LoraFiles(path, config, found, hashlib.blake2b(given + b"\0" + weights, digest_size=16).hexdigest())
    if (why := _unsupported(fields, config)) is not None:
        raise files._refused(f"{why} in its adapter_config.json is not supported")
    for key, tensor in tensors.items():
        named = _KEY.fullmatch(key)
        if named is None or not tensor.is_floating_point():
            raise files._refused(f"its tensor {key} is not supported; pairs of lora_A and lora_B are")
        found.setdefault(named[1], {})[named[2]] = tensor
    return files


def _unsupported(fields: Mapping[str, Any], config: Config) -> str | None:
    """The first unsupported field of a config, with its value; None without one."""
    known = {"peft_type": config.peft_type == "LORA", "bias": config.bias == "none"}
    known["init_lora_weights"] = config.init_lora_weights in _HARMLESS_STARTS
    ranks = (config.r, *(config.rank_pattern or {}).values())
    known["r" if not 0 < config.r <= MOST_RANK else "rank_pattern"] = all(0 < rank <= MOST_RANK for rank in ranks)
    obeyed = _WITHOUT_EFFECT.union(config.__struct_fields__)
    known |= {name: name in obeyed or not value for name, value in fields.items() if name not in known}
    name = next((name for name, is_supported in known.items() if not is_supported), None)
    return None if name is None else f"{name}={json.dumps(fields.get(name))[:80]}"


def _is_named(name: str, given: str | list[str] | None) -> bool:
    """True if a module name matches PEFT's list of suffixes or its regular expression."""
    if isinstance(given, str):
        return re.fullmatch(given, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in given or ())


def _by_pattern(patterns: Mapping[str, float] | None, name: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default
