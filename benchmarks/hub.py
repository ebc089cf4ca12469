"""Public data sets by name, `hub:classeval` in place of a file's path, where there is a network.

Each is one file of one commit of its repository on the Hugging Face hub, so that a result's prompts can be had again.
A file that was fetched once is read from the hub's cache, also without a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.utils import logging

from lpr.config import InputError

PREFIX = "hub:"


@dataclass(frozen=True)
class HubFile:
    """Where a data set's records are: a dataset repository, a commit of it and a file in it."""

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
"""HumanEval and GSM8K are published as parquet only, which `benchmarks.common.read_records` needs pyarrow for."""


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
