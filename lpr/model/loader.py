"""Loading a model, its tokenizer and its end-of-text tokens; every error is one line."""

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lpr.config import InputError, first_line, named_line
from lpr.core.digest import digest_of
from lpr.files import asset
from lpr.model.families import position_limit
from lpr.model.heads.head import DraftHead
from lpr.model.heads.read import read_head
from lpr.model.low_bit.checkpoint import Unreadable, begin_reading, check_names, end_reading
from lpr.model.low_bit.formats import quantization_of, read_format
from lpr.model.multimodal import check_generate, decoder_class, is_text, text_keys
from lpr.model.parallel import TensorParallel, load_sharded
from lpr.model.rewrite.merged_loading import laid_side_by_side
from lpr.model.rewrite.sharded_layers import local

_LOADING = threading.RLock()  # loading patches functions of transformers, so one thread at a time may load
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
"""Config fields with the number of positions."""
FEWEST_HALVED = 50_000_000
"""Least number of parameters for which `auto` keeps bfloat16 on a CPU: a smaller model fits into the CPU's cache, where
float32 is as fast."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bundled_model() -> str:
    """Folder of the small code model that comes with lpr."""
    return str(asset("bundled"))


@dataclass
class Loaded:
    model: PreTrainedModel
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    max_positions: int | None  # longest sequence that the model's positions allow; None if its config has no limit
    limit_reason: str = ""  # the reason if that is shorter than the model's own limit
    head: DraftHead | None = None  # the checkpoint's prediction head
    is_ours: bool = False  # True if it was loaded by lpr: it has no other user, so its weights may be repacked


def choose_device(device: str | torch.device | None) -> torch.device:
    """The given device, or the first GPU, or the CPU."""
    try:
        chosen = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as failure:
        raise InputError(f"device {device!r} cannot be used: {first_line(failure)}") from failure
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """`auto` is the checkpoint's dtype on an accelerator; on a CPU float32, or bfloat16 if `_halved`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def multiplies_bfloat16() -> bool:
    """True if this processor has instructions for bfloat16 products (AVX-512 BF16, AMX)."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _halved(config: Any, device: torch.device) -> bool:
    """True if `auto` is bfloat16 on this CPU: the checkpoint is in it, and the processor multiplies it."""
    is_plain = getattr(config, "quantization_config", None) is None and config.dtype is torch.bfloat16
    return device.type == "cpu" and is_plain and multiplies_bfloat16()


def load(
    source: str,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    tp: TensorParallel | None = None,
    revision: str | None = None,
    with_head: bool = False,
) -> Loaded:
    """Load the causal LM at `source`, a folder or a hub id; raises InputError with one line when that fails.

    `revision` is a branch, a tag or a commit of the hub. With `tp`, only this rank's part of the model; all ranks of
    the group call this together. `with_head` also reads a prediction head, whole, if there is one.
    """
    with _LOADING:
        return _load(source, dtype, device, tp, revision, with_head)


def _load(
    source: str, dtype: str | torch.dtype, device: str | torch.device | None, tp: TensorParallel | None,
    revision: str | None, with_head: bool,
) -> Loaded:  # fmt: skip
    where, path = choose_device(device), Path(source)
    transformers_logging.disable_progress_bar()
    _check_folder(source)
    if revision is not None and path.is_dir():
        raise InputError(f"--revision {revision}: {source!r} is a folder; only models of the hub have revisions")
    try:
        config = AutoConfig.from_pretrained(source, revision=revision or "main")
        form, quantised = read_format(config), quantization_of(config)
        if form is not None:
            begin_reading(config, form)
        decoder = decoder_class(config)
        how: Any = {"config": config, "revision": revision or "main", "output_loading_info": True}
        read: Any = partial(decoder.from_pretrained, source, **how)
        chosen = choose_dtype(dtype, where)
        model: Any
        if tp is not None:
            model, info = load_sharded(config, chosen, where, tp, partial(_laid, where, read))
        elif dtype == "auto" and _halved(config, where):
            model, info = read(dtype=torch.bfloat16)
            if model.num_parameters() < FEWEST_HALVED:
                model = model.float()
        else:
            model, info = _read_to(where, partial(_laid, where, read), chosen)
    except InputError:
        raise
    except Unreadable as failure:
        raise InputError(f"cannot load a model from {source!r}: {failure}") from failure
    except torch.cuda.OutOfMemoryError as failure:
        raise InputError(lack_of_memory(f"the weights of {source!r}", where)) from failure
    except Exception as failure:  # transformers raises dozens of types here
        raise InputError(f"cannot load a model from {source!r}: {named_line(failure)}") from failure
    if form is not None:
        end_reading(model, quantised)
    _check_weights(source, model, info)
    check_names(model, info["unexpected_keys"])
    model = model.to(where)
    if decoder is not AutoModelForCausalLM or not is_text(config):
        check_generate(model)
    has_tokenizer = not path.is_dir() or any(path.glob("tokenizer*"))
    head = read_head(source, model, revision) if with_head else None
    return replace(wrap(model, load_tokenizer(source, revision) if has_tokenizer else None), is_ours=True, head=head)


def _check_weights(source: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise InputError unless `source` has exactly the weights of `model`, except for multimodal towers."""
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:  # transformers initialises missing weights randomly
        lacking = f"{len(absent)} tensors that the model needs, the first: {absent[0]}"
        raise InputError(f"the weights in {source!r} lack {lacking}")
    if unused := text_keys(model, info["unexpected_keys"]):
        left = f"{len(unused)} tensors of its text part that the model has no place for, the first: {unused[0]}"
        raise InputError(f"the weights in {source!r} have {left}")


def _read_to(where: torch.device, read: Any, dtype: str | torch.dtype) -> Any:
    """A whole model, read directly to its device: host copies of several replicas might not fit into memory."""
    return read(dtype=dtype) if where.type == "cpu" else read(dtype=dtype, device_map={"": where})


def _laid(where: torch.device, read: Any, **how: Any) -> Any:
    """The model that `read` returns, on a GPU with its projections' weights contiguous."""
    with laid_side_by_side(where) if where.type == "cuda" else nullcontext():
        return read(**how)


def load_tokenizer(source: str, revision: str | None = None) -> Any:
    """The tokenizer at `source`, a folder or a hub id, without the model's weights; raises InputError."""
    _check_folder(source)
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main")
    except Exception as failure:  # as for models, of many types
        raise InputError(f"cannot load the tokenizer of {source!r}: {named_line(failure)}") from failure


def _check_folder(source: str) -> None:
    """Raise InputError for a missing folder, which transformers would search on the hub."""
    path = Path(source)
    looks_local = path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1
    if looks_local and not path.is_dir():
        raise InputError(f"model folder {source!r} does not exist")


def wrap(model: PreTrainedModel, tokenizer: Any | None) -> Loaded:
    """A model that is in memory already, with its tokenizer, if any."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in _LENGTHS]
    known = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    exact = position_limit(config)
    return Loaded(model, tokenizer, ids, *(exact if exact and (not known or exact[0] < known) else (known,)))


def lack_of_memory(what: str, device: torch.device) -> str:
    """A one-line message for an OutOfMemoryError, with the memory sizes of `device`."""
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    held = torch.cuda.memory_allocated(device) / 2**30
    sizes = f"{total:.1f} GiB, of which lpr holds {held:.1f} and {free:.1f} are free"
    return f"{what} do not fit on {device}: it has {sizes}; use more GPUs with --tp, or a smaller dtype"


def plain_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's parts of `named` tensors; quantised ones (subclasses such as torchao's) as values, scales, ..."""
    for name, whole in named:
        tensor = local(whole)
        if is_traceable_wrapper_subclass(tensor):
            parts, _ = tensor.__tensor_flatten__()
            yield from plain_tensors((f"{name}.{part}", getattr(tensor, part)) for part in parts)
        else:
            yield name, tensor


def model_digest(model: PreTrainedModel) -> int:
    """64-bit digest of a model's config and this rank's weights: two sums over each tensor's bits, on its device.

    The second sum weights each word by its place, which detects exchanged values.
    """
    return digest_of("\n".join([model.config.to_json_string(), *_sums(model)]))


def head_digest(head: DraftHead | None) -> int:
    return digest_of("\n".join(_sums(head))) if head is not None else 0


def _sums(module: nn.Module) -> Iterator[str]:
    for name, tensor in plain_tensors(module.state_dict().items()):
        words = tensor.detach().contiguous().view(torch.uint8).flatten()
        total = places = 0
        for piece in words.split(1 << 24):  # bounds the memory that the widened copy takes
            place = torch.arange(piece.numel(), device=piece.device, dtype=torch.int64) % 65521 + 1
            total += int(piece.sum(dtype=torch.int64))
            places = places * 31 + int((piece * place).sum())
        yield f"{name} {tuple(tensor.shape)} {total} {places}"


def tokenizer_digest(tokenizer: Any | None) -> int:
    """64-bit digest of a tokenizer's vocabulary and rules."""
    if tokenizer is None:
        return 0
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return digest_of(repr(sorted(tokenizer.get_vocab().items())))
    # Each call of the tokenizer sets these two, so they depend on its last use.
    return digest_of(json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None}))
