"""Fill-in-the-middle prompts of each family of code models, found by its special tokens.

A model belongs to the first family of lpr/assets/fim.toml whose three markers (two for Mistral) are in its vocabulary.
Families that share markers differ in the tokens for files and repositories. `prefix`, `suffix`, `middle` are token
names; "psm" is prefix, suffix, middle, "spm" puts the suffix first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from lpr.files import asset
from lpr.serve.text.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Family:
    """The FIM format of a family of models."""

    name: str
    prefix: str
    suffix: str
    middle: str | None = None  # None: the prefix comes last, and the model continues it
    source: str  # where the order and the tokens are documented
    order: Literal["psm", "spm"] = "psm"
    repository: str | None = None  # token before the repository's name
    file: str | None = None  # token before a file's name
    comment: str | None = None  # heading of other files without a token for them, as a format of `name`
    needs: tuple[str, ...] = ()  # further tokens that this row is recognised by
    ends: tuple[str, ...] = ()  # tokens that end the middle, in addition to the model's end of text
    bare_suffix: bool = False  # the suffix is encoded without the leading space that SentencePiece invents


_TABLE = msgspec.toml.decode(asset("fim.toml").read_bytes(), type=dict[Literal["family"], tuple[Family, ...]])
FAMILIES = _TABLE["family"]


@dataclass(frozen=True)
class Extra:
    """A piece of another file, shown to the model before the file with the hole."""

    text: str
    filename: str


class Filler:
    def __init__(self, family: Family, tokens: Tokens) -> None:
        self.family = family
        self._tokens = tokens
        self._prefix = _id(tokens, family.prefix)
        self._suffix = _id(tokens, family.suffix)
        self._middle = [] if family.middle is None else [_id(tokens, family.middle)]
        self._repository = tokens.id_of(family.repository) if family.repository else None
        self._file = tokens.id_of(family.file) if family.file else None
        found = (tokens.id_of(name) for name in family.ends)
        self.end_ids = tuple(token for token in found if token is not None)
        """Ids that end the middle, in addition to the model's end of text."""

    def prompt(self, prefix: str, suffix: str, extra: Sequence[Extra] = (), filename: str = "") -> list[int]:
        """The ids of a prompt for the hole between `prefix` and `suffix`."""
        return self._assemble(self._before(prefix), self._after(suffix), self._context(extra, filename))

    def fitted(self, room: int, prefix: str, suffix: str, extra: Sequence[Extra]) -> tuple[list[int], bool]:
        """Such a prompt of at most `room` tokens, and whether it was truncated.

        The text nearest to the hole stays. A quarter of the room is the suffix's, the rest the prefix's, and each lends
        what it does not use. Other files get what both leave, the last first.
        """
        left = max(0, room - len(self._assemble([], [], [])))
        before = self._before(self._tokens.tail(prefix, left))
        after = self._after(self._tokens.head(suffix, left))
        context = self._context(extra, most=left)
        wanted = len(before) + len(after) + len(context)
        share = max(left // 4, left - len(before))
        after = after[: max(0, share)]
        num_before = max(0, left - len(after))
        before = before[max(0, len(before) - num_before) :]
        num_context = max(0, left - len(after) - len(before))
        context = context[len(context) - num_context :] if num_context < len(context) else context
        kept = len(before) + len(after) + len(context)
        return self._assemble(before, after, context), kept < wanted

    def _before(self, prefix: str) -> list[int]:
        return self._tokens.encode_piece(prefix) if prefix else []

    def _after(self, suffix: str) -> list[int]:
        return self._tokens.encode_piece(suffix, leading_space=not self.family.bare_suffix) if suffix else []

    def _assemble(self, before: list[int], after: list[int], context: list[int]) -> list[int]:
        parts = [[self._prefix, *before], [self._suffix, *after]]
        if self.family.order == "spm":
            parts.reverse()
        return [*self._tokens.bos_ids, *context, *parts[0], *parts[1], *self._middle]

    def _context(self, extra: Sequence[Extra], filename: str = "", most: int | None = None) -> list[int]:
        """Other files, then the name of the file with the hole; empty without other files.

        Of more than `most` tokens, some at the beginning may be missing.
        """
        if not extra:
            return []
        parts = [self._heading(filename or "current")] if self._file is not None or filename else []
        count = 0
        for piece in reversed(extra):
            if most is not None and count > most:
                break
            text = piece.text if most is None else self._tokens.tail(piece.text, most)
            ids = self._tokens.encode_piece(text if text.endswith("\n") else text + "\n", leading_space=False)
            parts.append([*self._heading(piece.filename or "file"), *ids])
            count += len(parts[-1])
        else:
            if self._repository is not None:
                parts.append([self._repository, *self._tokens.encode_piece("repository\n", leading_space=False)])
        return [token for part in reversed(parts) for token in part]

    def _heading(self, filename: str) -> list[int]:
        if self._file is not None:
            return [self._file, *self._tokens.encode_piece(filename + "\n", leading_space=False)]
        heading = (self.family.comment or "# {name}\n").format(name=filename)
        return self._tokens.encode_piece(heading, leading_space=False)


def filler(tokens: Tokens, name: str = "auto") -> Filler | None:
    """The filler of the family `name`, by default of the first whose tokens are there; None if there is none."""
    for family in FAMILIES:
        markers = [family.prefix, family.suffix, *([family.middle] if family.middle else [])]
        wanted = [*markers, *family.needs] if name == "auto" else markers
        if name in ("auto", family.name) and all(tokens.id_of(token) is not None for token in wanted):
            return Filler(family, tokens)
    return None


def _id(tokens: Tokens, name: str) -> int:
    found = tokens.id_of(name)
    assert found is not None, name
    return found
