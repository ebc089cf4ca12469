"""Prompts of public data sets, from files or by names such as `hub:classeval`.

A name stands for one file at one commit of a repository on the Hugging Face hub, so results can be reproduced. A file
that was fetched once is read from the hub's cache, without a network too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.utils import logging
from transformers import AutoTokenizer

from benchmarks.common import DataOptions, ModelOptions
from lpr import bundled_model
from lpr.config import InputError

PREFIX = "hub:"
PROMPT_FIELDS = ("skeleton", "prompt", "question", "turns")
"""Fields that may hold a record's prompt: ClassEval; HumanEval and traces; GSM8K; MT-Bench."""


class HubFile(NamedTuple):
    """A dataset repository, a commit of it and a file in it."""

    repository: str
    commit: str
    file: str


FILES = {
    "classeval": HubFile("FudanSELab/ClassEval", "66a08db8c1e18de83868bc28dace89f6a0f1a141", "ClassEval_data.json"),
    "humaneval": HubFile(
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "openai_humaneval/test-00000-of-00001.parquet",
    ),
    "gsm8k": HubFile("openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", "main/test-00000-of-00001.parquet"),
    "mt_bench": HubFile(
        "HuggingFaceH4/mt_bench_prompts", "e3a795c5e9a82ee40611c416b8a7786c73198991", "raw/question.jsonl"
    ),
}
"""HumanEval and GSM8K are published as parquet only, which `read_records` needs pyarrow for."""


def load_prompts(path: str, count: int, template: str | Path | None = None) -> list[str]:
    """The first `count` prompts of a data set, a file or a name such as hub:gsm8k; raises InputError.

    With `template`, a model's folder or hub id, each is a user's message in that model's chat template.
    """
    prompts = []
    for record in read_records(fetch(path) if path.startswith(PREFIX) else Path(path))[:count]:
        found = [record[name] for name in PROMPT_FIELDS if name in record] if isinstance(record, dict) else []
        if not found:
            raise InputError(f"{path}: a record has none of the fields {', '.join(PROMPT_FIELDS)}")
        prompts.append(found[0][0] if isinstance(found[0], list) else found[0])
    if not prompts:
        raise InputError(f"{path} holds no prompts")
    return prompts if template is None else in_chat_template(prompts, template)


def prompts_of(options: DataOptions, count: int | None = None) -> list[str]:
    """Prompts `--skip` to `--prompts` (or to `count`) of a data set; raises InputError if there are none."""
    found = load_prompts(options.data, options.prompts if count is None else count, template_of(options))
    if len(found) <= options.skip:
        raise InputError(f"{options.data} has no prompts after the first {options.skip}")
    return found[options.skip :]


def template_of(options: ModelOptions) -> str | Path | None:
    """The model whose chat template is asked for, None without `--chat-template`."""
    return (options.model or bundled_model()) if options.chat_template else None


def in_chat_template(prompts: list[str], model: str | Path) -> list[str]:
    """Each prompt as the only message of a chat; raises InputError if the model has no template.

    The text begins with the template's special tokens, so it is encoded without further ones.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    except (OSError, ValueError) as error:
        raise InputError(f"--chat-template: {str(error).strip().splitlines()[0]}") from error


def read_records(path: Path) -> list[Any]:
    """The records of a file in JSON lines, as one JSON array, or in parquet (needs pyarrow); raises InputError."""
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ImportError as error:
        raise InputError(
            f"{path.name} is parquet, which needs pyarrow: pip install pyarrow, or give JSON lines"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def fetch(name: str) -> Path:
    """The file of the data set `name` ("hub:gsm8k"), fetched unless the cache has it; raises InputError."""
    wanted = FILES.get(name.removeprefix(PREFIX))
    if wanted is None:
        raise InputError(f"no data set {name}; there are {', '.join(PREFIX + known for known in FILES)}")
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would write a line per retry
    try:
        return Path(hf_hub_download(wanted.repository, wanted.file, repo_type="dataset", revision=wanted.commit))
    except Exception as error:  # its HTTP library, and with it the errors, differs between versions
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot fetch {name} ({wanted.repository}, {wanted.file}): {why} Without a network, give --data a file."
        ) from error
    finally:
        logging.set_verbosity(level)
