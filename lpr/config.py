"""What a user may decide, as frozen dataclasses that are validated once, here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

Auto = Literal["auto"]  # a size that follows from measured step times and from the acceptance of drafts
Whole = Annotated[int, Meta(ge=0, lt=2**31)]  # a whole number that ranks can send each other and native code takes
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Seed = Annotated[int, Meta(ge=-(2**63))]
LEAST, MOST = 1e-38, 1e38  # logits are float32, and so is what changes them: beyond these it would be 0 or infinite
Finite = Annotated[float, Meta(ge=-MOST, le=MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
NotEmpty = Annotated[str, Meta(min_length=1)]


PAGE_SIZE = 16  # tokens of a page of the KV cache
MAX_LOGPROBS = 20  # most alternatives whose log-probabilities a request can ask for


class InputError(ValueError):
    """User input that cannot work; the message is one line that names the cause."""


def first_line(failure: BaseException | str) -> str:
    """The first line of an error's message; the name of its type if the message is empty."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if lines else type(failure).__name__


def named_line(failure: Exception) -> str:
    """The type and the first line of an error, at most 300 characters."""
    return f"{type(failure).__name__}: {first_line(failure)}"[:300]


def read_text(path: Path, what: str) -> str:
    """The text of a file in UTF-8, with or without a byte order mark; raises InputError, which says `what` it is."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise InputError(f"cannot read {what} {path}: {reason}") from failure


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


@cache
def _struct_of(kind: type) -> type[msgspec.Struct]:
    return msgspec.defstruct(kind.__name__, [*get_type_hints(kind, include_extras=True).items()], kw_only=True)


def validate(config: Any) -> None:
    """Convert the fields of a frozen dataclass to their annotated types; raises InputError that names the field."""
    kind: Any = type(config)
    struct = _struct_of(kind)
    values = {name: _plain(getattr(config, name)) for name in struct.__struct_fields__}
    try:
        found = msgspec.convert(values, struct)
    except msgspec.ValidationError as failure:
        reason, _, place = str(failure).replace("`", "").partition(" - at $.")
        name = place.split("[")[0]
        is_auto = "| str" in reason or "enum" in reason
        wanted = 'a whole number or "auto"' if is_auto else reason.removeprefix("Expected ")
        if get_origin(choices := get_type_hints(kind).get(name)) is Literal:
            wanted = " or ".join(get_args(choices))
        raise InputError(f"{name}={shortened(values[name])} must be {wanted}") from None
    vars(config).update(msgspec.structs.asdict(found))


def _plain(value: Any) -> Any:
    """A value in types that commands carry: numpy's floats become floats, iterables and dicts become tuples."""
    if isinstance(value, (int, str)) or value is None:
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        value = value.items()
    return tuple(map(_plain, value)) if isinstance(value, Iterable) else value


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How a step's token tree is drafted and evaluated.

    None of these fields can change which tokens come out, only how many steps it takes. By default the engine times
    the model when it starts and gives every step the tree that promises the most tokens per second, which may be no
    draft at all (lpr.core.budget); sizes given as numbers are spent in every step. W, N and G are those of lookahead
    decoding (Fu et al. 2024), trie_nodes is the decoding length of trie drafts (Zhao et al. 2024).
    """

    window_size: Whole | Auto = "auto"
    """W: columns of the Jacobi window. 0 switches the window and its n-gram pool off."""
    ngram_size: Count | Auto = "auto"
    """N: length of the n-grams that the window yields; the window has N-1 levels. auto: 5, as in the paper."""
    guess_set_size: Whole | Auto = "auto"
    """G: pooled n-grams, per first token, that may be verified in one step. auto: W, as in the paper."""
    trie_nodes: Whole | Auto = "auto"
    """Node budget of drafts from the request's trie, the shared trie and recycled candidates. 0 switches them off."""
    max_nodes: Count = 128
    """Most nodes per rank of a tree whose sizes are automatic."""
    branch_length: Count = 128
    """Longest branch of a draft, in tokens below the root; a long copied passage is one long branch."""
    num_candidates: Annotated[int, Meta(ge=0, le=64)] = 8
    """k: most likely next tokens kept per evaluated node, recycled as drafts. 0 switches recycling off."""
    draft_heads: Literal["auto", "on", "off"] = "auto"
    """Draft also from the multi-token-prediction head of a checkpoint that has one; trie drafts must be on, and --tp
    off. auto: on a CPU, if sizes are fixed. on: also if they are automatic, and on a GPU, where heads have not been run
    yet and rule out compiling; an error without a head that works."""
    trie_capacity: Count = 1_000_000
    """Tokens that the trie shared between requests remembers; the oldest outputs are forgotten first."""
    max_batch_size: Count = 8
    """Sequences decoded in one step; further requests wait."""
    max_length: Annotated[int, Meta(ge=2)] | None = None
    """Longest prompt plus output, in tokens. Default: the model's own limit."""
    kv_tokens: Count | None = None
    """Tokens whose K/V each rank holds, of running requests and of prefixes that further ones may share. Default: as
    the engine option kv_memory says."""
    prefill_chunk: Count = 2048
    """Most tokens of prompts that a rank computes in one step; a longer prompt takes several steps. With automatic
    sizes, a step in which others decode has no more than take half a second, or 512 if even these take longer."""
    home_ranks: Whole | Auto = "auto"
    """Ranks that work on a request's tree. auto: all for a single request, one where there are as many requests as
    ranks, and `max_batch_size` then holds per rank. 0: always all."""
    first_token_ms: Whole = 0
    """Wanted time to the first token (TTFT), in milliseconds; requests that can still keep it come first. 0: none."""
    per_token_ms: Whole = 0
    """Wanted time per token after it (TPOT), in milliseconds: requests wait, and prompts are filled in smaller pieces,
    while others would miss it. 0: none. Both go by the step times of automatic sizes."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, with the arithmetic in the message; fill in what follows from other fields."""
        validate(self)
        if self.ngram_size == "auto":
            object.__setattr__(self, "ngram_size", 5)
        if self.guess_set_size == "auto" and self.window_size != "auto":
            object.__setattr__(self, "guess_set_size", self.window_size)
        levels = "a window has ngram_size-1 levels"
        _require(int(self.ngram_size) >= 2, f"ngram_size={self.ngram_size} must be at least 2: {levels}")
        _require(
            self.adaptive or not (self.first_token_ms or self.per_token_ms),
            "first_token_ms and per_token_ms go by step times, which only automatic sizes have: leave one of "
            "window_size, trie_nodes and guess_set_size at auto",
        )
        sizes = self.resolved()
        _require(
            sizes.window_size <= 4096 and sizes.ngram_size <= 64 and sizes.num_nodes <= 16384,
            f"window_size={self.window_size}, ngram_size={self.ngram_size}, guess_set_size={self.guess_set_size}, "
            f"trie_nodes={self.trie_nodes} make {sizes.num_nodes} nodes a step; the limit is 16384 "
            "(window_size 4096, ngram_size 64)",
        )

    @classmethod
    def autoregressive(cls, **overrides: Any) -> DecodeConfig:
        """Plain decoding, one token a step: no window and no trie."""
        return cls(**{"window_size": 0, "trie_nodes": 0, **overrides})

    def carries_trees(self, num_ranks: int) -> bool:
        """True if results travel with their nodes, because a rank may not serve all requests."""
        return num_ranks > 1 and self.home_ranks != 0

    @property
    def adaptive(self) -> bool:
        """True if the size of a step's tree follows from measured step times."""
        return "auto" in (self.window_size, self.trie_nodes, self.guess_set_size)

    def resolved(self, num_ranks: int = 1, nodes_per_rank: int | None = None) -> TreeSizes:
        """The sizes of a tree that `num_ranks` ranks evaluate: W, G and the trie's nodes grow with their number.

        Of automatic sizes, these are the most that a step may spend: `nodes_per_rank` (default: `max_nodes`) on each
        rank, a quarter of them for the Jacobi window where it earns more than they would elsewhere.
        """
        most = (self.max_nodes if nodes_per_rank is None else nodes_per_rank) * num_ranks
        levels = int(self.ngram_size) - 1
        window = most // (4 * levels) if self.window_size == "auto" else self.window_size * num_ranks
        guesses = window if self.guess_set_size == "auto" else self.guess_set_size * num_ranks
        if self.trie_nodes != "auto":
            trie = self.trie_nodes * num_ranks
        else:
            trie = max(0, most - window * levels + 1 - guesses * levels) if window else most
        return TreeSizes(
            window_size=window,
            ngram_size=int(self.ngram_size),
            guess_set_size=guesses,
            trie_nodes=trie,
            branch_length=self.branch_length,
            num_candidates=self.num_candidates,
            trie_capacity=self.trie_capacity,
        )

    def for_one_rank(self, num_ranks: int) -> DecodeConfig:
        """The same with sizes that one rank spends as `num_ranks` would together, for counting their steps."""
        sizes = self.resolved(num_ranks)
        names = ("window_size", "guess_set_size", "trie_nodes")
        return replace(self, **{name: getattr(sizes, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class TreeSizes:
    """A DecodeConfig's sizes as numbers, for all ranks together: what the core works with."""

    window_size: int = 0  # W; 0: no window and no pool
    ngram_size: int = 5  # N
    guess_set_size: int = 0  # G
    trie_nodes: int = 0  # nodes of drafts from tries and recycled candidates
    branch_length: int = DecodeConfig.branch_length  # deepest draft
    num_candidates: int = DecodeConfig.num_candidates  # k
    num_guesses: int = 0  # most guesses of the model's prediction head for a draft; 0: no head runs
    trie_capacity: int = DecodeConfig.trie_capacity  # tokens that a trie remembers

    @property
    def longest_branch(self) -> int:
        """No node of a tree can be deeper than this."""
        window = self.window_size + self.ngram_size - 3 if self.window_size else 0
        return max(self.branch_length, window)

    @property
    def num_window_nodes(self) -> int:
        """Nodes of a full Jacobi window without the root: W * (N-1) - 1."""
        return max(0, self.window_size * (self.ngram_size - 1) - 1)

    @property
    def num_guess_nodes(self) -> int:
        """Nodes of G pooled n-grams, whose first token is the root: G * (N-1)."""
        return self.guess_set_size * (self.ngram_size - 1) if self.window_size else 0

    @property
    def num_recycled(self) -> int:
        """Candidates that a step gathers per node: none where no draft would use them."""
        return self.num_candidates if self.trie_nodes else 0

    @property
    def num_nodes(self) -> int:
        """Most nodes that a step's tree may have, the root included."""
        return 1 + self.num_window_nodes + self.num_guess_nodes + self.trie_nodes

    def of_ranks(self, some: int, num_ranks: int) -> TreeSizes:
        """The part of these sizes, which `num_ranks` ranks spend together, that `some` of them spend on a tree."""
        if some == num_ranks:
            return self
        names = ("window_size", "guess_set_size", "trie_nodes")
        return replace(self, **{name: getattr(self, name) * some // num_ranks for name in names})

    def owned_capacity(self, num_ranks: int) -> int:
        """Most nodes of a tree that one of `num_ranks` ranks may own: an equal part, and slack.

        A rank with few pending tokens takes more than its part, and the ancestors that it evaluates are not its own.
        """
        if num_ranks == 1:
            return self.num_nodes
        return min(self.num_nodes, -(-self.num_nodes // num_ranks) + min(32, self.longest_branch))

    def evaluated_capacity(self, num_ranks: int) -> int:
        """Most nodes of a tree that one of `num_ranks` ranks may evaluate: its own and their ancestors."""
        return min(self.num_nodes, self.owned_capacity(num_ranks) + self.longest_branch)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Which tokens a request wants: the only thing besides the model and the prompt that decides its text."""

    max_new_tokens: Count = 64
    """Most tokens to emit."""
    temperature: NotNegative = 0.0
    """0 is greedy; from 1e-38 to 1e38 the next token is sampled from softmax(logits / temperature)."""
    top_k: Whole = 0
    """Sample among the k most likely tokens. 0: no limit."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that together reach this probability. 1: no limit."""
    min_p: Share = 0.0
    """Sample among tokens at least this times as likely as the most likely one. 0: no limit."""
    seed: Seed = 0
    """Key of the sampling noise: the same seed gives the same text."""
    stop: tuple[NotEmpty, ...] = ()
    """Strings that end the output, or one; the text ends before the first of them."""
    stop_token_ids: tuple[Whole, ...] = ()
    """Token ids that end the output, besides the model's end-of-text tokens; the text does not show them."""
    ignore_eos: bool = False
    """Go on after an end-of-text token (for measurements)."""
    min_new_tokens: Whole = 0
    """No end-of-text token and none of `stop_token_ids` before so many tokens."""
    repetition_penalty: Positive = 1.0
    """Divides (if negative: multiplies) the logits of tokens that the prompt or the output holds. 1: none."""
    no_repeat_ngram_size: Whole = 0
    """No n-gram of this many tokens twice in prompt and output. 0: off."""
    presence_penalty: Finite = 0.0
    """Subtracted from the logits of tokens that the output holds, as in OpenAI's API. 0: none."""
    frequency_penalty: Finite = 0.0
    """Subtracted from them as often as the output holds the token. 0: none."""
    logit_bias: tuple[tuple[Whole, Finite], ...] = ()
    """Pairs of a token id and what is added to its logit; a dict will do."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Say the log-probability of every emitted token, and of so many of the most likely ones at its place.

    They are the model's own, before penalties, temperature and limits. None: say none."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. The tokens that end the output are never part of it."""
    grammar: str = ""
    """Let the output keep to a grammar in llguidance's JSON form. Empty: any output."""
    forced_ids: tuple[Whole, ...] = ()
    """Begin the output with these token ids, whatever the model would choose: `logprobs` then say what it thinks of a
    text that is known."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        lists = {name: getattr(self, name) or () for name in ("stop", "stop_token_ids", "logit_bias", "forced_ids")}
        stop = (self.stop,) if isinstance(self.stop, str) else lists["stop"]
        vars(self).update({**lists, "stop": stop})
        validate(self)
        _require(self.seed < 2**64, f"seed={self.seed} must fit in 64 bits")
        given = f"temperature={self.temperature}"
        _require(not 0 < self.temperature < LEAST, f"{given} must be 0 or from {LEAST} to {MOST}")
        given = f"min_new_tokens={self.min_new_tokens}"
        most = f"max_new_tokens={self.max_new_tokens}"
        _require(self.min_new_tokens <= self.max_new_tokens, f"{given} must be from 0 to {most}")

    def vary(self, **changes: int) -> SamplingParams:
        """A copy with other values, which are known to be valid: nothing is validated again."""
        other = copy(self)
        vars(other).update(changes)
        return other
