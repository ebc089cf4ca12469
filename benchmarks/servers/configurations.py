"""The servers under comparison: how each is started, and with which settings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lpr.config import InputError

HOW_TO_INSTALL = Path(__file__).with_name("README.md")


@dataclass(frozen=True)
class Configuration:
    """One server with one setting."""

    peer: str
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _vllm(environment: Mapping[str, str] | None = None, **speculative: object) -> Configuration:
    flags = ["--speculative-config", json.dumps(speculative)] if speculative else []
    return Configuration("vllm", flags, environment or {})


ROOT = str(Path(__file__).parents[2])
"""This checkout, whose extension is built for vLLM's version of Python."""
CONFIGURATIONS: Mapping[str, Configuration] = {
    "lpr-plain": Configuration("lpr", ("--window-size", "0", "--trie-nodes", "0", "--share-drafts", "none")),
    "lpr": Configuration("lpr", ("--share-drafts", "none")),
    "lpr-learns": Configuration("lpr"),
    "vllm-plain": _vllm(),
    "vllm-suffix": _vllm(method="suffix", suffix_decoding_max_cached_requests=0),
    "vllm-suffix-learns": _vllm(method="suffix"),
    **{
        f"{name}{tokens}": made(num_speculative_tokens=tokens)
        for tokens in (3, 5, 10)
        for name, made in {
            "vllm-ngram": partial(_vllm, method="ngram", prompt_lookup_max=4, prompt_lookup_min=2),
            "vllm-suffix": partial(_vllm, method="suffix"),
            "lpr-in-vllm": partial(_vllm, {"PYTHONPATH": ROOT}, model="lpr.vllm.Proposer"),
        }.items()
    },
    "llama-plain": Configuration("llama"),
    "llama-ngram-mod": Configuration("llama", ("--spec-type", "ngram-mod")),
    "llama-ngram-simple": Configuration("llama", ("--spec-type", "ngram-simple")),
}
"""Those that learn draft for one request from the texts of others; llama.cpp's ngram-mod, vllm-suffix3 and its like and
lpr-in-vllm always do. A number is that of the most tokens of a draft."""


@dataclass(frozen=True)
class Places:
    """Where the peers and their models are."""

    model: Path
    vllm: Path | None = None
    llama: Path | None = None
    threads: int = 0  # CPU threads of each server; 0 leaves its default.
    slots: int = 16  # Most requests that a server decodes at once.
    length: int = 4096  # Most tokens of a sequence.


def command_of(name: str, dtype: str, port: int, places: Places) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a server; raises InputError if it is not there."""
    configuration = CONFIGURATIONS[name]
    build = {"lpr": _lpr_command, "vllm": _vllm_command, "llama": _llama_command}[configuration.peer]
    command, more = build(dtype, port, places)
    return [*command, *configuration.flags], {**os.environ, **more, **configuration.environment}


def _lpr_command(dtype: str, port: int, places: Places) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "lpr.serve", "--model", str(places.model), "--port", str(port), "--dtype", dtype]
    command += ["--max-batch-size", str(places.slots), "--no-access-log"]
    return command, {"OMP_NUM_THREADS": str(places.threads)} if places.threads else {}


def _vllm_command(dtype: str, port: int, places: Places) -> tuple[list[str], dict[str, str]]:
    program = _program(places.vllm, "bin/vllm", "--vllm")
    command = [str(program), "serve", str(places.model), "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(places.length), "--max-num-seqs", str(places.slots)]
    more = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": ""}
    if places.threads:
        more["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{places.threads - 1}"
    return command, more


def _llama_command(dtype: str, port: int, places: Places) -> tuple[list[str], dict[str, str]]:
    program, weights = (
        _program(places.llama, "llama-server", "--llama"),
        _program(places.llama, f"{dtype}.gguf", "--llama"),
    )
    command = [str(program), "-m", str(weights), "--port", str(port), "--parallel", str(places.slots)]
    command += ["--ctx-size", str(places.slots * places.length)]
    # Without a type given, keys and values would be float16.
    kind = {"float32": "f32", "bfloat16": "bf16"}.get(dtype, "f16")
    command += ["--cache-type-k", kind, "--cache-type-v", kind]
    return command + (["--threads", str(places.threads)] if places.threads else []), {}


def _program(folder: Path | None, name: str, flag: str) -> Path:
    if folder is None or not (folder / name).exists():
        where = "is not given" if folder is None else f"has no {name}"
        raise InputError(f"{flag} {where}; see --help for how to install it")
    return (folder / name).absolute()
