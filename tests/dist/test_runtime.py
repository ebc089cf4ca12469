"""What launchers leave in the environment, and where sockets go; real processes are in tests/slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from lpr.config import InputError
from lpr.dist.runtime import World
from lpr.serve.ranks import socket_folder

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    "left, wanted",
    [
        ({}, 1),
        ({"WORLD_SIZE": ""}, 1),
        ({"WORLD_SIZE": "two"}, 1),
        ({"WORLD_SIZE": "2"}, 1),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, 1),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 2),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "1"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "a", "WORLD_SIZE": "2"}, "no RANK"),
        ({"RANK": "two", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "a"}, "WORLD_SIZE must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "no rank of WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)
def test_what_launchers_leave_behind(monkeypatch: pytest.MonkeyPatch, left: dict[str, str], wanted: int | str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    if isinstance(wanted, int):
        assert World.from_environment().size == wanted
        return
    with pytest.raises(InputError, match=wanted):
        World.from_environment()


def test_a_long_temporary_folder_has_no_room_for_a_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for length, folder in ((20, None), (200, "/tmp")):
        monkeypatch.setattr("tempfile.tempdir", "/" + "t" * length)
        assert socket_folder() == folder
