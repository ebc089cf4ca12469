"""EngineOptions: how an engine loads and runs its model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lpr.config import InputError
from lpr.core.step_times import StepTimes, read_step_times

KvDtype = Literal["auto", "fp8"]
SelfDraft = Literal["auto", "off", "int8", "fp8", "int4"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and its steps evaluated; none of it changes which tokens come out."""

    revision: str | None = None
    """Branch, tag or commit of the model on the hub. A commit is always the same files; default: the main branch."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's own on a GPU, and on a CPU that multiplies bfloat16 (AVX-512 BF16, AMX), if it is that and
    the model has 50 million parameters or more; else float32."""
    device: str | None = None
    """cpu, cuda or cuda:N. Default: a GPU if there is one."""
    attention: Literal["auto", "sdpa", "triton", "native"] = "auto"
    """sdpa: PyTorch's, with a dense mask. triton: a GPU kernel that reads the tree as bits. native: C++ that
    reads trees and pages on a CPU. auto: what works best."""
    graphs: bool = True
    """Replay the steps of a GPU as CUDA graphs."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Let torch.compile fuse the operators of these steps; the first start with a model takes minutes longer. auto: on,
    for a model that lpr loads itself and whose layers it has no kernels for."""
    tp_backend: Literal["transformers", "deepspeed"] = "transformers"
    """The library that splits the model: transformers by its own plan, or deepspeed, which needs none."""
    self_draft: SelfDraft = "off"
    """Draft with a copy of the model's weights in so many bits, made at start, by as many passes as pay. auto: int4, or
    int8 where int4 has no products in C++, if there is memory for it and tree sizes are automatic. A named form makes
    one pass or more in each step."""
    draft_ranks: int = 0
    """So many replicas of the job, its last ones, hold no more than a low-bit copy of the model, in int8 or the form of
    `self_draft`, and draft while the others verify; with --tp each has as many ranks as the others."""
    costs: Path | StepTimes | None = None
    """JSON table of step times that decide tree sizes, instead of measured ones: makes the steps of a run repeatable.
    Rank 0 reads it for all."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters to load at start, each as NAME=FOLDER or as vLLM's JSON object of "name" and "path"; folders are
    PEFT's."""
    enable_lora: bool = False
    """Prepare for adapters that are loaded later, without any at start: steps are not compiled then."""
    exact: bool = False
    """Give the same logits, bit for bit, for every shape of a step, in half precision too: a fifth to two fifths slower
    on a CPU. A model that cannot is refused."""
    kv_dtype: KvDtype = "auto"
    """fp8: K/V in 8 bits (E4M3, without scales), so that twice the tokens have room. It changes tokens, for all ways to
    decode alike. On a GPU (compute capability 8.9), with attention triton, without exact. auto: as the model."""
    prefix_reuse: bool = True
    """Share the K/V of prompts that begin alike, also with finished requests until their pages are needed."""
    kv_memory: float | None = None
    """Memory for K/V on each device: up to 1 a share of what is free there, above it bytes. Default: 0.9 of a GPU, on a
    CPU room for max_batch_size sequences of 4096 tokens."""
    swap_space: float | None = None
    """GiB of host memory per rank for K/V that has lost its pages to other requests, where copying it is measured to
    be faster than computing it again. 0: none. Default: 4, and at most a quarter of what is free."""


def load_step_times(path: Path) -> StepTimes:
    """The step times in a JSON file; raises InputError."""
    try:
        return read_step_times(json.loads(path.read_text(encoding="utf-8-sig")), f"--costs {path}")
    except InputError:
        raise
    except OSError as failure:
        raise InputError(f"cannot read --costs {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:
        raise InputError(f"--costs {path}: {failure}") from failure


def named_folders(given: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """The adapters of EngineOptions.lora_modules, folders by name; raises InputError."""
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, str] = {}
    for each in given:
        name, _, folder = each.partition("=")
        if each.lstrip().startswith("{"):
            try:
                fields = json.loads(each)
                name, folder = fields["name"], fields["path"]
            except (ValueError, LookupError):
                name = ""
        if not (isinstance(name, str) and isinstance(folder, str) and name and folder) or name in found:
            raise InputError(f"--lora-modules {each}: give NAME=FOLDER, each name once")
        found[name] = folder
    return found
