"""Values of lpr's own types on command lines; imports no torch, so that the service's front can use it."""

from __future__ import annotations

from typing import Any

import tyro

from lpr.core.step_times import StepTimes

flag_types = tyro.constructors.ConstructorRegistry()
"""A context manager around `tyro.cli`, in which flags of lpr's own types are read."""


@flag_types.primitive_rule
def _step_times_are_files(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """--costs names a file: rank 0 alone reads it, after the arguments are parsed."""
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
