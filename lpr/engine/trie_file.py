"""The shared suffix index on disk (`--trie`), so that a later run drafts from the outputs of earlier ones.

A file has only the tokens; the links are rebuilt (1M tokens in 0.4 s). It is
a safetensors file with one int32 tensor, `tokens`, and one metadata entry, `lpr_trie`, a JSON object:

    version          1
    fingerprint      the tokenizer that gives the tokens their meaning, see `fingerprint_of`
    capacity_tokens  of the index that was saved
    num_tokens       ends of documents included
    num_documents
    checksum         of the tokens and the other entries

It is replaced atomically: a killed run leaves the earlier file, and the last of several writers wins. It holds users'
outputs, so only its owner can read it (0600, new folders 0700), independent of the earlier file's mode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lpr.config import InputError
from lpr.core.suffix_index import END, SuffixIndex
from lpr.files import checksum_of, replace_file
from lpr.model.loader import tokenizer_digest

VERSION = 1
FILE_NAME = "trie.safetensors"
_KEY = "lpr_trie"


def trie_path(path: str | Path) -> Path:
    """The trie file of `path`: itself if it is a .safetensors file, else one in the folder `path`."""
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


def fingerprint_of(tokenizer: Any | None, vocab_size: int) -> str:
    """A hash of the tokenizer, or of the vocabulary size without one."""
    return f"vocabulary of {vocab_size}" if tokenizer is None else f"tokenizer {tokenizer_digest(tokenizer):016x}"


def check_writable(path: str | Path) -> None:
    """Make the folder of a trie file and write a byte in it; raises InputError."""
    path = trie_path(path)
    try:
        replace_file(path, b"\n", probe=True, private=True)
    except OSError as failure:
        raise InputError(f"cannot write a trie to {path}: {failure.strerror or failure}") from failure


def write_trie(path: str | Path, trie: SuffixIndex, fingerprint: str) -> Path:
    """Replace the trie file at `path` by one of `trie`; returns the file. Raises InputError, the old file kept."""
    path = trie_path(path)
    tokens = np.array(trie.history(), "<i4")
    facts = {
        "version": VERSION,
        "fingerprint": fingerprint,
        "capacity_tokens": trie.capacity_tokens,
        "num_tokens": len(tokens),
        "num_documents": num_documents(tokens),
    }
    header = json.dumps({**facts, "checksum": checksum_of(facts, tokens.tobytes())})
    try:
        replace_file(path, save({"tokens": tokens}, {_KEY: header}), private=True)
    except OSError as failure:
        raise InputError(f"cannot write a trie to {path}: {failure.strerror or failure}") from failure
    return path


def read_trie(path: str | Path, fingerprint: str | None = None) -> np.ndarray:
    """The history in a trie file, int32 [num_tokens], documents separated by END.

    Raises InputError if the file cannot be read, is no trie file, is damaged, or has another `fingerprint`.
    """
    path = trie_path(path)
    try:
        with safe_open(path, framework="numpy") as file:
            header = (file.metadata() or {}).get(_KEY)
            facts = _facts(path, header)
            if fingerprint is not None and facts["fingerprint"] != fingerprint:
                raise InputError(
                    f"the trie {path} was made with another vocabulary ({facts['fingerprint']}) than this model's "
                    f"({fingerprint}): give each tokenizer its own trie"
                )
            tokens = file.get_tensor("tokens")
    except SafetensorError as failure:
        raise InputError(f"{path} is no trie file, or damaged: {failure}; delete it to start anew") from failure
    except OSError as failure:
        raise InputError(f"cannot read the trie {path}: {failure.strerror or failure}") from failure
    checksum = facts.pop("checksum", None)
    if tokens.dtype != np.int32 or tokens.ndim != 1 or checksum != checksum_of(facts, tokens.tobytes()):
        raise InputError(f"the trie {path} is damaged: its checksum does not fit its content; delete it to start anew")
    return tokens


def read_history(path: str | Path, fingerprint: str, vocab_size: int) -> np.ndarray:
    """The history in a trie file for a model of `vocab_size` tokens; raises InputError as `read_trie`."""
    history = read_trie(path, fingerprint)
    if len(history) and not END <= history.min() <= history.max() < vocab_size:
        raise InputError(f"the trie {path} holds token ids outside the vocabulary of {vocab_size}")
    return history


def num_documents(tokens: np.ndarray) -> int:
    """Documents in a history, an unfinished last one included."""
    return int(np.count_nonzero(tokens == END)) + int(len(tokens) > 0 and tokens[-1] != END)


def _facts(path: Path, header: str | None) -> dict[str, Any]:
    if header is None:
        raise InputError(f"{path} is a safetensors file, but no trie of lpr: give another path")
    try:
        facts = json.loads(header)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not {"fingerprint", "version"} <= facts.keys():
        raise InputError(f"the trie {path} is damaged: its header is not readable; delete it to start anew")
    if facts["version"] != VERSION:
        raise InputError(
            f"the trie {path} has version {facts['version']!r} and this lpr reads version {VERSION}: give another path"
        )
    return facts
