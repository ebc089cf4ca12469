"""Flags of the command line as a dataclass, by `tyro`. Imports no torch, so that the service's front can use it."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from lpr.config import InputError
from lpr.core.step_times import StepTimes

T = TypeVar("T")

_UNREADABLE = {
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: ('.*')": r"\1: \2 is not a whole number",
    r"Error parsing (\S+): could not convert string to float: ('.*')": r"\1: \2 is not a number",
    r"Error parsing (\S+): no type matching (\S+) could be instantiated from \[('.*')\]\.": r"\1: \3 is none of \2",
}
"""tyro's messages for unreadable values, and replacements in the words of --help."""
_types = tyro.constructors.ConstructorRegistry()
"""A context manager around `tyro.cli`, in which flags of lpr's own types are read."""


def read_flags(
    kind: type[T], program: str, argv: Sequence[str] | None = None, default: T | None = None, quiet: bool = False
) -> T:
    """An instance of the dataclass `kind` by the flags in `argv` (None: those of this process).

    Raises InputError with one line for invalid or missing flags, and SystemExit(0) after `--help`. A `quiet` process
    prints no help.
    """
    complaint = io.StringIO()
    arguments = None if argv is None else list(argv)
    more: Any = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(complaint), _types:
            return tyro.cli(kind, prog=program, args=arguments, console_outputs=not quiet, **more)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise InputError(_first_paragraph(complaint.getvalue()) or "bad arguments; see --help") from None


def _first_paragraph(panel: str) -> str:
    """The first paragraph of tyro's panel, without its title and the hints after empty lines and rules."""
    lines = [line.strip(" │╰╯") for line in panel.splitlines()[1:]]
    parts = " ".join("\n" if set(line) <= set("-─") else line for line in lines).split("\n")
    said = next((part.strip() for part in parts if part.strip()), "")
    for words, plainer in _UNREADABLE.items():
        said = re.sub(words, plainer, said)
    return said


@_types.primitive_rule
def _step_times_are_files(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Parses --costs as a path: only rank 0 reads the file, after the arguments are parsed."""
    if info.type is not StepTimes:
        return None

    def from_words(words: list[str]) -> StepTimes:
        raise ValueError("give the path of a JSON file")

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE",
        instance_from_str=from_words,
        is_instance=lambda value: isinstance(value, StepTimes),
        str_from_instance=lambda value: ["FILE"],
    )
