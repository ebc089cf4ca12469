"""`--config FILE.toml`: values for a command's flags, by the flags' names with underscores.

Imports no torch, so that the service's front can use it.
"""

import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from lpr.config import InputError, read_text

T = TypeVar("T")


def defaults(
    argv: Sequence[str], kind: type[T], groups: Mapping[str, type], base: Mapping[str, Mapping[str, Any]] | None = None
) -> T:
    """The flags' defaults: those of the dataclass `kind`, or of the `--config` file in `argv`; raises InputError.

    `groups` are the fields of `kind` that are dataclasses, whose fields are flags too; `base` overrides some of their
    defaults.
    """
    base = base or {}
    path = None  # the last one is used, in either form
    for word, after in pairwise([*argv, None]):
        if word is not None and word.startswith("--config="):
            path = word.removeprefix("--config=")
        elif word == "--config" and after is not None:
            path = after
    if path is not None:
        return read_config(Path(path), kind, groups, base)
    return kind(**{group: groups[group](**values) for group, values in base.items()})


def read_config(path: Path, kind: type[T], groups: Mapping[str, type], base: Mapping[str, Mapping[str, Any]]) -> T:
    """The values of a TOML file, over `base` and the defaults of `kind`; raises InputError."""
    text = read_text(path, "--config")
    try:
        values = tomllib.loads(text)
    except ValueError as failure:
        raise InputError(f"--config {path} is not TOML: {failure}") from failure
    group_of = {field.name: "" for field in fields(cast(Any, kind)) if field.name not in (*groups, "config")}
    hints = dict(get_type_hints(kind))
    for group, each in groups.items():
        group_of |= {field.name: group for field in fields(each)}
        hints |= get_type_hints(each)
    parts: dict[str, dict[str, Any]] = {"": {}, **{group: dict(base.get(group, {})) for group in groups}}
    for name, value in _with_mesh(path, values).items():
        if name not in group_of:
            raise InputError(f"--config {path}: unknown key {name!r}; keys are flags with underscores")
        try:
            parts[group_of[name]][name] = _read(value, hints[name])
        except msgspec.ValidationError as failure:
            raise InputError(f"--config {path}: {name} = {value!r}: {failure}") from failure
    try:
        return kind(**parts[""], **{group: each(**parts[group]) for group, each in groups.items()})
    except InputError as failure:
        raise InputError(f"--config {path}: {failure}") from failure


def _read(value: Any, hint: Any) -> Any:
    """A TOML value as a field's type; raises msgspec.ValidationError."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return Path(msgspec.convert(value, str)) if Path in members else msgspec.convert(value, hint)


def _with_mesh(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a TOML file, with `mesh = { lp = 4, tp = 2 }` expanded to the two flags."""
    if "mesh" not in values:
        return values
    others = {name: value for name, value in values.items() if name != "mesh"}
    mesh = values["mesh"]
    if not isinstance(mesh, dict) or set(mesh) != {"lp", "tp"} or not all(type(n) is int for n in mesh.values()):
        raise InputError(f"--config {path}: mesh must be like {{ lp = 4, tp = 2 }}, not {mesh!r}")
    if twice := sorted(set(mesh) & set(others)):
        raise InputError(f"--config {path}: {twice[0]} is given twice, in mesh and by itself")
    return {**others, **mesh}
