"""The ranks' side of the service: their processes, the driver on rank 0 and its line to the front."""

import json
import os
import tempfile
from collections.abc import Sequence

SOCKET = "LPR_SERVE_SOCKET"  # environment variable that tells rank 0 where the front listens
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
            "MASTER_PORT")  # fmt: skip
"""Environment variables of a launcher's ranks."""
ORIGIN = "LPR_SERVE_ORIGIN"
"""Environment variable that names one start of the ranks, so that a driver recognises its own shared drafts."""
SECRETS = "LPR_SERVE_SECRETS"
"""Environment variable with flags that are not in a process's command line, which every user can read: JSON."""
KEYS = ("--api-key", "--api-key-file")  # flags with the keys of clients, which ranks do not need
LONGEST_FOLDER = 64
"""Bytes of a folder's name that leave room for a socket's name: Linux takes 107 bytes in all, macOS 103."""
SECRET_FLAGS = (*KEYS, "--draft-store")  # flags that may hold secrets


def socket_folder() -> str | None:
    """The folder of a socket's folder: None for the usual one, unless that is too long for a socket's path."""
    return None if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER else "/tmp"


def split_flags(argv: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of `argv` without the flags `names` and their values, and the words of these."""
    kept: list[str] = []
    taken: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in names:
            kept.append(word)
        else:
            taken += [word] if equals else [word, next(words, "")]
    return kept, taken


def conceal(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Flags for another process: those of its command line, and environment variables with the secret ones."""
    shown, secret = split_flags(argv, SECRET_FLAGS)
    return shown, {SECRETS: json.dumps(secret)}


def concealed() -> list[str]:
    """The flags in this process's environment. They are taken out of it, so that its own children do not get them."""
    return json.loads(os.environ.pop(SECRETS, "[]"))
