"""Fill-in-the-middle prompts of each family of code models, found by its special tokens.

A model belongs to the first row of `FAMILIES` whose three markers (two for Mistral) are in its vocabulary. Rows that
share markers differ in the tokens for files and repositories. `prefix`, `suffix`, `middle` are token names; "psm" is
prefix, suffix, middle, "spm" puts the suffix first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lpr.serve.text.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Family:
    """The FIM format of a family of models."""

    name: str
    prefix: str
    suffix: str
    middle: str | None  # None: the prefix comes last, and the model continues it
    source: str  # where the order and the tokens are documented
    order: Literal["psm", "spm"] = "psm"
    repository: str | None = None  # token before the repository's name
    file: str | None = None  # token before a file's name
    comment: str | None = None  # heading of other files without a token for them, as a format of `name`
    needs: tuple[str, ...] = ()  # further tokens that this row is recognised by
    ends: tuple[str, ...] = ()  # tokens that end the middle, in addition to the model's end of text
    bare_suffix: bool = False  # the suffix is encoded without the leading space that SentencePiece invents


FAMILIES = (
    Family(
        name="codegemma", prefix="<|fim_prefix|>", suffix="<|fim_suffix|>", middle="<|fim_middle|>",
        file="<|file_separator|>", needs=("<|file_separator|>",), ends=("<|file_separator|>",),
        source="https://huggingface.co/google/codegemma-7b (Usage: code completion); arXiv 2406.11409, section 2",
    ),
    Family(
        name="qwen-coder", prefix="<|fim_prefix|>", suffix="<|fim_suffix|>", middle="<|fim_middle|>",
        repository="<|repo_name|>", file="<|file_sep|>", needs=("<|repo_name|>", "<|file_sep|>"),
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
              "<|im_end|>", "<|endoftext|>"),
        source="https://github.com/QwenLM/Qwen2.5-Coder (File-level and repository-level fill-in-the-middle); "
               "arXiv 2409.12186, section 3.2",
    ),
    Family(
        name="granite-4", prefix="<|fim_prefix|>", suffix="<|fim_suffix|>", middle="<|fim_middle|>",
        ends=("<|fim_pad|>", "<|end_of_text|>"),
        source="https://www.ibm.com/granite/docs/models/granite (FIM)",
    ),
    Family(
        name="glm", prefix="<|code_prefix|>", suffix="<|code_suffix|>", middle="<|code_middle|>",
        ends=("<|user|>", "<|endoftext|>"),
        source="https://huggingface.co/zai-org/GLM-4.5 (tokenizer_config.json, added tokens)",
    ),
    Family(
        name="falcon-h1-coder", prefix="<|prefix|>", suffix="<|suffix|>", middle="<|middle|>",
        source="https://huggingface.co/tiiuae/Falcon-H1-Tiny-Coder-90M (fill-in-the-middle)",
    ),
    Family(
        name="seed-coder", prefix="<[fim-prefix]>", suffix="<[fim-suffix]>", middle="<[fim-middle]>", order="spm",
        comment="<filename>{name}\n",
        source="arXiv 2506.03524, section on fill-in-the-middle: suffix, prefix, middle",
    ),
    Family(
        name="mellum", prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>", order="spm",
        repository="<reponame>", file="<filename>", needs=("<reponame>", "<filename>", "<|im_start|>"),
        source="https://huggingface.co/JetBrains/Mellum-4b-base; arXiv 2510.05788, section 3: S-P-M order",
    ),
    Family(
        name="starcoder2", prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>",
        repository="<repo_name>", file="<file_sep>", needs=("<repo_name>", "<file_sep>"),
        ends=("<file_sep>", "<repo_name>", "<|endoftext|>"),
        source="arXiv 2402.19173, section 5.1; https://huggingface.co/bigcode/starcoder2-15b",
    ),
    Family(  # also granite-3b..34b-code, stable-code, codeshell
        name="starcoder", prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>",
        repository="<reponame>", file="<filename>", needs=("<reponame>", "<filename>"),
        ends=("<filename>", "<reponame>", "<|endoftext|>"),
        source="arXiv 2305.06161, section 3.3 and appendix; https://huggingface.co/bigcode/starcoder; "
               "https://huggingface.co/ibm-granite/granite-8b-code-base-4k; "
               "https://huggingface.co/stabilityai/stable-code-3b (Fill in the Middle)",
    ),
    Family(  # Yi-Coder, CodeShell and others with the three markers only
        name="fim-underscore", prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>"),
        source="https://huggingface.co/01-ai/Yi-Coder-9B (tokenizer); markers and order as StarCoder's",
    ),
    Family(
        name="santacoder", prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>",
        ends=("<|endoftext|>", "<fim-pad>"),
        source="arXiv 2301.03988, section 4; https://huggingface.co/bigcode/santacoder (Fill-in-the-middle)",
    ),
    Family(
        name="deepseek-coder", prefix="<\uff5cfim\u2581begin\uff5c>", suffix="<\uff5cfim\u2581hole\uff5c>",
        middle="<\uff5cfim\u2581end\uff5c>", comment="#{name}\n",
        source="https://github.com/deepseek-ai/DeepSeek-Coder (Code Insertion, Repository Level Code Completion); "
               "arXiv 2401.14196, section 3.1.2",
    ),
    Family(
        name="codellama", prefix="\u2581<PRE>", suffix="\u2581<SUF>", middle="\u2581<MID>",
        ends=("\u2581<EOT>",), bare_suffix=True,
        source="https://github.com/meta-llama/codellama (llama/generation.py, infilling_prompt_tokens); "
               "arXiv 2308.12950, section 2.3",
    ),
    Family(
        name="codestral", prefix="[PREFIX]", suffix="[SUFFIX]", middle=None, order="spm",
        comment="+++++ {name}\n", bare_suffix=True,
        source="https://github.com/mistralai/mistral-common (encode_fim): suffix, prefix, and no middle marker",
    ),
)  # fmt: skip


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
