"""The values of `--model`: a preset, a named run, a folder, a config.json or a hub id.

A preset is a TOML file of architecture facts in lpr/assets/models, so that planning needs neither a checkout nor a
download. configs/ in the checkout holds named runs, which are flags for lpr.generate.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from lpr.config import DecodeConfig, InputError
from lpr.planner.facts import config_from, read_config

_DECODE_FIELDS = {field.name for field in fields(DecodeConfig)}


@dataclass(frozen=True)
class Planned:
    """A model to plan for."""

    name: str
    config: PretrainedConfig
    decode: dict[str, int]
    """Fields of DecodeConfig that the file sets; budgets per rank."""
    origin: str
    """Source of the facts, for the reader."""


def preset_names() -> list[str]:
    """Every preset."""
    folder = files("lpr") / "assets" / "models"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """The tables of a preset that exists."""
    return tomllib.loads((files("lpr") / "assets" / "models" / f"{name}.toml").read_text(encoding="utf-8"))


def package_file(name: str) -> Path:
    """A file of lpr/assets."""
    return Path(str(files("lpr") / "assets" / name))


def measured_values() -> dict[str, Any]:
    """Measured acceptance and host times, which predictions start from (benchmarks.measured writes them)."""
    values: dict[str, Any] = json.loads(package_file("measured.json").read_text(encoding="utf-8"))
    return values


def resolve(source: str) -> Planned:
    """The model that `source` names; raises InputError."""
    if source.lower() in preset_names():
        return _from_preset(source.lower(), f"preset {source.lower()}")
    if source.endswith(".toml"):
        return _from_run(Path(source))
    for name in preset_names():  # a known hub id needs no download
        if read_preset(name)["hub"].lower() == source.lower() and not Path(source).exists():
            return _from_preset(name, f"preset {name}, which has the facts of {source}")
    return Planned(Path(source).name if Path(source).exists() else source, read_config(source), {}, source)


def _from_preset(name: str, origin: str) -> Planned:
    values = read_preset(name)
    return Planned(name, config_from(values["config"]), dict(values["decode"]), origin)


def _from_run(path: Path) -> Planned:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise InputError(f"cannot read {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:
        raise InputError(f"{path} is not TOML: {failure}") from failure
    if "config" in values:
        return Planned(path.stem, config_from(values["config"]), dict(values.get("decode", {})), str(path))
    if not isinstance(values.get("model"), str):
        raise InputError(f"{path} names no model: it is neither a named run nor a preset")
    mesh = values.get("mesh", {"lp": 1, "tp": 1})
    if not isinstance(mesh, dict) or set(mesh) != {"lp", "tp"}:
        raise InputError(f"{path}: mesh must be like {{ lp = 4, tp = 2 }}, not {mesh!r}")
    model = resolve(values["model"])
    decode = {name: value for name, value in values.items() if name in _DECODE_FIELDS}
    return Planned(path.stem, model.config, decode, f"{path}: {model.origin}")
