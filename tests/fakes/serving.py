"""A real service in processes of its own, for tests: `with serving(model, lp=2) as service`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx

START = 180.0
"""Seconds that a loaded machine may take."""
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
SIZES = ("--window-size", "0", "--trie-nodes", "8")
"""Flags of a service whose sizes need not be measured when it starts."""
SMALL = (*SIZES, "--max-batch-size", "2")
TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)


def make_model(folder: Path) -> Path:
    """The bundled model with all tokens for filling in the middle, and a chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lpr.model.loader import bundled_model

    source = bundled_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    added = tokenizer.add_special_tokens({"additional_special_tokens": list(FIM)})
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[-added:] = 0.1 * weight[:added]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(Path(source) / "generation_config.json", folder)
    return folder


@contextlib.contextmanager
def serving(
    model: Path | str | None = None, *flags: str, lp: int = 1, files: int | None = None
) -> Iterator[SimpleNamespace]:
    """A service on a free port: `url`, `process`, `client`, `log()`, `stop()` that returns the exit code.

    It may open so many `files`, and no more.
    """
    command = [sys.executable, "-m", "lpr.serve", "--dtype", "float32", "--port", "0", "--lp", str(lp), *flags]
    command += ["--model", str(model)] if model is not None else []
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and "listening on" not in line:
            lines.append(line)
        found = re.search(r"listening on (\S+)", line)
        assert found, "".join(lines)
        os.set_blocking(process.stdout.fileno(), False)

        def log() -> str:
            with contextlib.suppress(TypeError):  # TextIOWrapper's, if nothing is there
                lines.append(process.stdout.read() or "")
            return "".join(lines)

        def stop(number: int = signal.SIGTERM) -> int:
            process.send_signal(number)
            return process.wait(60)

        with httpx.Client(base_url=found[1], timeout=120) as client:
            end = time.monotonic() + START
            while client.get("/readyz").status_code != 200:
                assert process.poll() is None, log()
                assert time.monotonic() < end, f"not ready: {client.get('/readyz').text} {log()}"
                time.sleep(0.1)
            yield SimpleNamespace(url=found[1], process=process, client=client, log=log, stop=stop)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
