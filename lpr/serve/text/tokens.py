"""Tokenising in the front with the driver's fast tokenizer, received as JSON, without transformers.

transformers imports torch (4 s and 300 MB); the underlying `tokenizers` library does not, and is sufficient. The front
tokenises instead of the driver, because a long prompt would delay the driver's steps, and because acceptance depends on
a request's length.
"""

import sys
from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer

from lpr.serve.text.lengths import byte_characters, lengths_of

LONG = 1 << 14  # texts of more characters are not encoded on the event loop, because this takes more than 10 ms
_MARGIN = 64
"""Number of tokens between a cut in a text and the wanted tokens, so that these are the same as in the whole text."""
_MARK = "\u263a"
"""Prefixed to a text to which no leading space must be added; codellama and mistral-common use the same character."""


class Tokens:
    """The tokenizer of the served model, of a fast tokenizer's JSON."""

    def __init__(self, source: str) -> None:
        self._plain, self._literal = Tokenizer.from_str(source), Tokenizer.from_str(source)
        for tokenizer in (self._plain, self._literal):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._literal.encode_special_tokens = True
        self._texts: dict[int, str] = {}
        self.lengths = lengths_of(source)  # the longest tokens; None if a token can stand for any number of characters
        with_special = self._plain.encode("a").ids
        without = self._plain.encode("a", add_special_tokens=False).ids
        starts = (at for at in range(len(with_special)) if with_special[at : at + len(without)] == without)
        self.bos_ids: list[int] = with_special[: next(starts, 0)]  # what the tokenizer puts before every text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, as `tokenizer(text)["input_ids"]` of transformers."""
        return _ids(self._plain, text, add_special_tokens)

    def encode_piece(self, text: str, leading_space: bool = True) -> list[int]:
        """The ids of a part of a client's file: without special tokens, even if the text contains their names.

        `leading_space` False omits the space that SentencePiece tokenizers add before a text.
        """
        if leading_space:
            return _ids(self._literal, text)
        mark = _ids(self._literal, _MARK)
        marked = _ids(self._literal, _MARK + text)
        return marked[len(mark) :] if marked[: len(mark)] == mark else _ids(self._literal, text)

    def tail(self, text: str, num_tokens: int) -> str:
        """The end of a text, long enough for its last `num_tokens` tokens."""
        cut = len(text) - self._most(num_tokens)
        if cut <= 0:
            return text
        line = text.rfind("\n", max(0, cut - LONG), cut)  # tokens after a line break do not depend on earlier text
        return text[line + 1 if line >= 0 else cut :]

    def head(self, text: str, num_tokens: int) -> str:
        """The beginning of a text, long enough for its first `num_tokens` tokens."""
        cut = self._most(num_tokens)
        if cut >= len(text):
            return text
        line = text.find("\n", cut, cut + LONG)
        return text[: line + 1 if line >= 0 else cut]

    def _most(self, num_tokens: int) -> int:
        return sys.maxsize if self.lengths is None else (num_tokens + _MARGIN) * self.lengths.longest

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._plain.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def id_of(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary, or None."""
        found = self._plain.token_to_id(name)
        return None if found is None else int(found)

    def text_of(self, token: int) -> str:
        """One token as text; a part of a character shows as U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.bytes_of(token).decode("utf-8", "replace")
        return text

    def bytes_of(self, token: int) -> bytes:
        name = self._plain.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return self._added[token].encode()
        if self._byte_of:
            return bytes(self._byte_of[character] for character in name if character in self._byte_of)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\u2581", " ").encode()

    @cached_property
    def added(self) -> dict[str, int]:
        """Ids of the added tokens, special or not, by their text."""
        return {name: token for token, name in self._added.items()}

    @cached_property
    def special(self) -> frozenset[str]:
        added = self._plain.get_added_tokens_decoder().values()
        return frozenset(str(token.content) for token in added if token.special)

    @cached_property
    def _added(self) -> dict[int, str]:
        return {int(token): str(added.content) for token, added in self._plain.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Byte of each character of a byte-level vocabulary; empty for other vocabularies."""
        if "ByteLevel" not in repr(self._plain.decoder):
            return {}
        return {character: byte for byte, character in byte_characters().items()}


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    if len(text) <= LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    # The same, but other threads can run meanwhile: `encode` keeps the interpreter's lock, for a second per MiB.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
