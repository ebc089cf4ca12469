"""`--config FILE.toml`: values of flags by their names, typed, and one line for what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lpr.cli.config_file import defaults
from lpr.config import InputError


@dataclass
class Group:
    """Flags that belong together."""

    size: int = 4
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError("size must be at least 1")


@dataclass
class Args:
    """Flags of a command."""

    output: Path | None = None
    lp: int = 1
    tp: int = 1
    group: Group = field(default_factory=Group)


def read(argv: list[str], base: dict[str, dict[str, object]] | None = None) -> Args:
    return defaults(argv, Args, {"group": Group}, base)


def test_a_file_gives_defaults_and_the_last_one_counts(tmp_path: Path) -> None:
    first, last = tmp_path / "first.toml", tmp_path / "last.toml"
    first.write_text("lp = 7\n")
    last.write_text('output = "out.jsonl"\nrate = 2\nmesh = { lp = 2, tp = 4 }\n')
    found = read(["--config", str(first), f"--config={last}"], {"group": {"size": 9}})
    assert found == Args(Path("out.jsonl"), 2, 4, Group(9, 2.0))
    assert read([]) == Args() and read([], {"group": {"size": 9}}).group.size == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht = 3", "unknown key 'widht'; keys are flags with underscores"),
        ("group = { size = 3 }", "unknown key 'group'"),
        ('size = "three"', "size = 'three': Expected `int`, got `str`"),
        ("size = 0", "size must be at least 1"),
        ("size = ", "is not TOML"),
        ("mesh = { lp = 2 }", "mesh must be like { lp = 4, tp = 2 }, not {'lp': 2}"),
        ("mesh = { lp = 2, tp = true }", "mesh must be like"),
        ("lp = 2\nmesh = { lp = 2, tp = 1 }", "lp is given twice, in mesh and by itself"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read(["--config", str(path)])
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read --config .*: No such file"):
        read(["--config", str(tmp_path / "none.toml")])
