"""Sampling parameters of requests that leave them out: vLLM's `--generation-config` and its override."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpr.config import InputError, SamplingParams, read_text

NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_new_tokens",
)  # fmt: skip
"""Names that are read, as vLLM reads them. `max_new_tokens` is the length of an answer whose request gives none."""
FILE = "generation_config.json"


def read_defaults(source: str, own: Mapping[str, Any], override: str | None = None) -> dict[str, Any]:
    """The defaults by their names in SamplingParams; raises InputError.

    `source` is "auto" for `own`, the values of the served model, "vllm" for none, or a file or its folder.
    """
    if source in ("auto", "vllm"):
        where, given = f"the model's {FILE}", dict(own) if source == "auto" else {}
    else:
        path = Path(source) / FILE if Path(source).is_dir() else Path(source)
        where = f"--generation-config {path}"
        given = _object(read_text(path, "--generation-config"), where)
    return {**_checked(given, where), **read_override(override)}


def read_override(text: str | None) -> dict[str, Any]:
    """The values of --override-generation-config; raises InputError."""
    where = "--override-generation-config"
    given = _object(text, where) if text is not None else {}
    for name in given:
        if name not in NAMES:
            raise InputError(f"{where}: {name!r} is none of {', '.join(NAMES)}")
    return _checked(given, where)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as failure:
        raise InputError(f"{where} is not JSON: {failure}") from failure
    if not isinstance(value, dict):
        raise InputError(f"{where} is not a JSON object")
    return value


def _checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The known values; raises InputError for one that no request may have."""
    values = {name: given[name] for name in NAMES if given.get(name) is not None}
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"]) if type(values["top_k"]) is int else values["top_k"]
    try:
        SamplingParams(**values)
    except InputError as failure:
        raise InputError(f"{where}: {failure}") from failure
    return values
