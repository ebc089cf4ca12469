"""Reading an MTP layer from a checkpoint by its keys: transformers drops them."""

import copy
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from lpr.config import InputError, first_line
from lpr.model.heads.forms import DRAFT_VOCABULARY, KNOWN, Form, form_of
from lpr.model.heads.head import DraftHead
from lpr.model.rewrite.sharded_layers import VocabularyHead

logger = logging.getLogger(__name__)

OWN_FILE = "mtp.safetensors"  # a head beside a checkpoint that has none, as dev/train_head.py writes it
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_head(source: str, model: PreTrainedModel, revision: str | None = None) -> DraftHead | None:
    """The MTP layer of the checkpoint at `source`, a folder or a hub id, for its `model`; None without one.

    A head that cannot be read is left out with a warning that names the reason, because it only drafts.
    """
    try:
        places = _places(source, revision)
        config: Any = model.config.get_text_config(decoder=True)
        found = form_of(places, config.num_hidden_layers)
        if found is None:
            return None
        if config.model_type not in KNOWN:
            raise InputError(f"lpr does not know the heads of model type {config.model_type!r}")
        if getattr(model.config, "quantization_config", None) is not None:
            raise InputError("heads of quantised checkpoints are not read")
        form, prefix = found
        skipped = tuple(prefix + name for name in form.copies)
        names = [key for key in places if key.startswith(prefix) and not key.startswith(skipped)]
        tensors = {key.removeprefix(prefix): tensor for key, tensor in _read(places, names)}
        head = make_head(model, form, tensors)
    except Exception as failure:  # transformers, safetensors and the hub raise many types
        logger.warning("the checkpoint's prediction head is not used: %s", first_line(failure))
        return None
    logger.info("the checkpoint's prediction head drafts (%d tensors)", len(tensors))
    return head


def make_head(model: PreTrainedModel, form: Form, tensors: dict[str, torch.Tensor]) -> DraftHead:
    """The head of `model` from its tensors, named without the prefix; raises InputError if some are missing."""
    config: Any = copy.deepcopy(model.config.get_text_config(decoder=True))
    for name, value in _one_layer(config).items():
        setattr(config, name, value)
    tensors = dict(tensors)
    vocabulary, lm_head = tensors.pop(DRAFT_VOCABULARY, None), None
    if vocabulary is not None:
        vocabulary, lm_head = vocabulary.long(), _rows_of(model.get_output_embeddings(), vocabulary.long())
    own = {form.embedding_norm, form.hidden_norm, form.join, form.final_norm}
    own_keys = {f"{name}.weight" for name in own}
    absent = own_keys - set(tensors)
    if absent:
        raise InputError(f"it lacks {sorted(absent)[0]}")
    state = {f"layers.0.{key.removeprefix(form.layer)}": each for key, each in tensors.items() if key not in own_keys}
    state["norm.weight"] = tensors[f"{form.final_norm}.weight"]
    state["embed_tokens.weight"] = torch.zeros(1, config.hidden_size)  # the model's own are used
    decoder: Any = model.get_decoder()
    block, info = type(decoder).from_pretrained(
        None, config=config, state_dict=state, dtype=model.dtype, output_loading_info=True
    )
    if unfit := sorted(
        str(key) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in info[kind]
    ):
        raise InputError(f"its layer does not fit the model's: {unfit[0]}")
    del block.embed_tokens
    embedding_norm = _norm_like(block.norm, tensors[f"{form.embedding_norm}.weight"])
    hidden_norm = _norm_like(block.norm, tensors[f"{form.hidden_norm}.weight"])
    join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, dtype=model.dtype)
    join.weight = nn.Parameter(tensors[f"{form.join}.weight"].to(model.dtype), requires_grad=False)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    head = DraftHead(block, embedding_norm, hidden_norm, join, form.hidden_first, num_layers, vocabulary, lm_head)
    return head.to(model.device).eval()


def _one_layer(config: Any) -> dict[str, Any]:
    """Config changes for a model of the MTP layer alone: one layer, full attention, experts if the model has any."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None}
    if getattr(config, "layer_types", None):
        changes["layer_types"] = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        changes["mlp_layer_types"] = ["sparse"]
    if hasattr(config, "first_k_dense_replace"):
        changes["first_k_dense_replace"] = 0
    if getattr(config, "mlp_only_layers", None):
        changes["mlp_only_layers"] = []
    return changes


def _rows_of(lm_head: Any, vocabulary: torch.Tensor) -> nn.Linear:
    """The output head for the tokens `vocabulary` only; raises InputError for tokens that the model does not have."""
    if isinstance(lm_head, VocabularyHead):
        raise InputError("a draft vocabulary is not used with --tp, which splits the output head")
    num_tokens, size = lm_head.weight.shape
    if vocabulary.ndim != 1 or not len(vocabulary) or not 0 <= vocabulary.min() <= vocabulary.max() < num_tokens:
        raise InputError("its draft vocabulary is not the model's")
    made = nn.Linear(size, len(vocabulary), bias=lm_head.bias is not None, device="meta")
    for name in ("weight", "bias"):
        if (whole := getattr(lm_head, name)) is not None:
            setattr(made, name, nn.Parameter(whole.detach()[vocabulary.to(whole.device)], requires_grad=False))
    return made


def _norm_like(norm: nn.Module, weight: torch.Tensor) -> nn.Module:
    made = copy.deepcopy(norm)
    made.weight = nn.Parameter(weight.to(norm.weight.dtype), requires_grad=False)  # type: ignore[arg-type]
    return made


def _places(source: str, revision: str | None) -> dict[str, Path]:
    """The file that holds each key of a checkpoint's safetensors."""
    found: dict[str, Path] = {}
    if (index := _file(source, _INDEX, revision)) is not None:
        named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        heads = {name for key, name in named.items() if ".mtp" in f".{key}" or ".layers." in key}
        files = {name: _file(source, name, revision) for name in heads}
        found = {key: path for key, name in named.items() if (path := files.get(name)) is not None}
    elif (whole := _file(source, _WHOLE, revision)) is not None:
        found = dict.fromkeys(_keys(whole), whole)
    if (own := _file(source, OWN_FILE, revision)) is not None:
        found |= dict.fromkeys(_keys(own), own)
    return found


def _file(source: str, name: str, revision: str | None) -> Path | None:
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(source, name, revision=revision or "main", **missing)
    return Path(found) if found is not None else None


def _keys(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _read(places: dict[str, Path], names: Iterable[str]) -> Iterable[tuple[str, torch.Tensor]]:
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(places[name], []).append(name)
    for path, mine in by_file.items():
        with safe_open(path, "pt") as file:
            for name in mine:
                yield name, file.get_tensor(name)
