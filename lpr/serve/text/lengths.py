"""A lower bound of a text's tokens by its characters: too long texts are refused before they are tokenised.

A token stands for some of the text's characters, so C characters have at least C / L tokens if no token stands for more
than L of them. That holds for tokenizers which keep every character: a byte-level vocabulary, or one with a token for
every byte. Others (WordPiece, or Unigram with one token for any unknown run) get no bound, and neither do normalizers
that delete characters. Unicode's compositions make one character of at most four. Special tokens that swallow the space
around them have spaces left out of the count.
"""

import json
import math
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LETTERS = string.ascii_letters.encode()
_SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]
_SHRINK = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Most characters of which each normalizer makes one."""
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}
"""Pre-tokenizers that keep all characters, unless they are told to remove some."""


@dataclass(frozen=True)
class Lengths:
    longest: int  # characters that a token stands for, at most
    most_letters: int  # ASCII letters of a token, at most
    counts_space: bool  # False if special tokens can stand for any number of spaces

    def least_tokens(self, text: str) -> int:
        count = len(text) if self.counts_space else len(text) - sum(map(text.count, _SPACES))
        least = math.ceil(count / self.longest)
        if text.isascii():  # Unicode's compositions hide letters elsewhere
            least = max(least, math.ceil(_num_letters(text) / self.most_letters))
        return least


def lengths_of(source: str) -> Lengths | None:
    """The lengths of a fast tokenizer's JSON, or None if its tokens can stand for any number of characters."""
    tokenizer = json.loads(source)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    vocabulary = list(model["vocab"]) if isinstance(model.get("vocab"), dict) else []
    normalizers = list(_parts(tokenizer.get("normalizer"), "normalizers"))
    splitters = list(_parts(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    by_bytes = any(part["type"] == "ByteLevel" for part in (*normalizers, *splitters))
    names_of_bytes = byte_characters().values() if by_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    is_whole = (by_bytes or model.get("byte_fallback")) and all(name in model["vocab"] for name in names_of_bytes)
    if model["type"] != "BPE" or not is_whole:
        return None
    shrink = 1
    for part in normalizers:
        if part["type"] == "Replace":
            old, new = part["pattern"].get("String", ""), part["content"]
            factor = 1 if old and len(new) >= len(old) else 0
        else:
            factor = _SHRINK.get(part["type"], 0)
        if not factor:
            return None
        shrink *= factor
    for part in splitters:
        if part["type"] not in _KEEPING or part.get("behavior") == "Removed":
            return None
    names = [*vocabulary, *(each["content"] for each in added)]
    return Lengths(
        longest=max(1, shrink * max(map(len, names))),
        most_letters=max(1, max(map(_num_letters, names))),
        counts_space=not any(each.get("lstrip") or each.get("rstrip") for each in added),
    )


def _num_letters(name: str) -> int:
    encoded = name.encode()
    return len(encoded) - len(encoded.translate(None, _LETTERS))


def _parts(written: Any, sequence: str) -> Iterator[Any]:
    """A part of a tokenizer, or the parts of which it is a sequence."""
    if written is None:
        return
    if written["type"] == "Sequence":
        for each in written[sequence]:
            yield from _parts(each, sequence)
    else:
        yield written


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    # Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and above.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + index) for index, byte in enumerate(others)}
