"""One description of a request for the front, the driver and the engine: what is asked, what comes back, what failed.

The engine's command log (lpr.engine.commands) and the service's socket (lpr.serve.messages) carry these structs. No
torch here: the front must not load it.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Self

import msgspec

from lpr.config import SamplingParams

RequestId = int | str


class ErrorCode(StrEnum):
    """Why a request is refused or fails. The HTTP status follows from it (lpr.serve.errors.STATUS)."""

    # The request is wrong.
    BAD_REQUEST = "bad_request"
    INVALID_VALUE = "invalid_value"
    INVALID_JSON = "invalid_json"
    MISSING_PARAMETER = "missing_required_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    TOO_LONG = "context_length_exceeded"
    NO_FIM = "fim_not_supported"
    NO_CHAT_TEMPLATE = "no_chat_template"
    NOT_INSTALLED = "not_installed"
    MISSING_KEY = "missing_api_key"
    INVALID_KEY = "invalid_api_key"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_NOT_FOUND = "request_not_found"
    CANCELLED = "cancelled"
    BODY_TIMEOUT = "body_timeout"
    BODY_TOO_LARGE = "body_too_large"
    MEDIA_TYPE = "unsupported_media_type"
    HOST = "host_not_allowed"
    # The service cannot take it now.
    OVERLOADED = "queue_full"
    NO_MESH = "no_mesh"
    LOADING = "loading"
    SHUTTING_DOWN = "shutting_down"
    # It was accepted, and cannot be finished.
    TIMEOUT = "timeout"
    DRAINED = "drained"
    RANKS_LOST = "ranks_lost"
    GENERATION_FAILED = "generation_failed"
    INTERNAL = "internal_error"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request has ended with `finish_reason` "error"."""

    code: ErrorCode
    message: str  # one line


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Complete a prompt, or continue an output of which a part was delivered.

    The one description of a request, from the validated body of a service, or a call of the engine, to its requests.
    """

    id: RequestId
    token_ids: list[int]  # the prompt, followed by the output tokens that were delivered already
    params: SamplingParams
    num_prompt: int  # length of the prompt in `token_ids`
    priority: int = 0  # lower is earlier (see lpr.sched.queue)
    has_processors: bool = False
    """True if logits processors apply: they are code, so each rank submits the request itself."""
    tenant: str = ""
    """Requests share drafts and K/V with requests of the same tenant only; "" is a tenant like any other."""
    adapter: str = ""
    """Digest of the adapter whose weights apply; requests share drafts and K/V with those of the same one only."""
    share: str = ""  # requests of different shares get slots by weight (lpr.sched.fair_shares): a share is a key's name
    weight: float = 1.0  # of its share
    learns: bool = True  # True if the request shares drafts with other requests of its tenant
    details: bool = False  # True if chunks name the draft source of each token
    arrived: float = 0.0  # arrival in seconds, on the clock of the process that submits; -inf goes first
    prediction: list[int] = []
    """Tokens that the output is expected to follow where it can: a draft source of this request alone."""
    predicted: tuple[int, int] = (0, 0)  # tokens drafted from the prediction so far, and those of them in the output

    @classmethod
    def of(cls, prompt_ids: list[int], params: SamplingParams, delivered: Sequence[int] = (), **fields: Any) -> Self:
        """A request that has no number yet, with the output `delivered` so far."""
        tokens = [*prompt_ids, *delivered] if delivered else prompt_ids
        return cls(0, tokens, params, len(prompt_ids), **fields)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt; not to be written to."""
        return self.token_ids if self.num_prompt == len(self.token_ids) else self.token_ids[: self.num_prompt]

    @property
    def delivered(self) -> list[int]:
        """The output tokens that were delivered already."""
        return self.token_ids[self.num_prompt :]


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop a request. A finished or unknown one is ignored."""

    id: RequestId


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort all requests and end all ranks."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, before penalties, temperature and top-k/top-p/min-p."""

    logprob: float  # of the chosen token
    top: list[tuple[int, float]] = []  # the most likely tokens and theirs, most likely first


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """The work that a request took since the ranks began or resumed it."""

    num_steps: int = 0  # decode steps
    num_fill_steps: int = 0  # steps of chunked prefill
    num_cached: int = 0  # prompt tokens found in the prefix cache
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = []  # accepted speculative tokens by depth in the tree; the first is depth 1
    by_source: dict[str, tuple[int, int]] = {}  # drafted and accepted nodes by draft source
    num_tokens: int = 0  # tokens emitted in these steps


class Chunk(msgspec.Struct, array_like=True):
    """What one step added to a request, and where in its output that begins."""

    id: RequestId
    token_ids: list[int]
    text: str = ""
    """Text that is final now. It may lag behind the ids by an incomplete character or a possible stop string.

    In the engine, complete once the chunk is taken."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while the request goes on."""
    failure: Failure | None = None
    logprobs: list[TokenLogprobs] | None = None
    """Per token, if the request asks for them."""
    sources: list[str] | None = None
    """Draft source of each token, if the request asks for `details`."""
    usage: Usage | None = None
    """In the last chunk."""
    stop_reason: int | str | None = None
    """The stop string, or the id of `stop_token_ids`, that ended the request."""
    start: int = 0
    """Output tokens before these."""
    start_character: int = 0
    """Characters of the output before this text."""
    predicted: tuple[int, int] = (0, 0)
    """As in Submit, up to the end of this chunk."""

    def after(self, num_tokens: int, num_characters: int) -> Self:
        """The part behind so many delivered tokens and characters; raises ProtocolError if the chunk begins later."""
        cut, cut_text = num_tokens - self.start, num_characters - self.start_character
        if (self.token_ids and cut < 0) or (self.text and cut_text < 0):
            raise ProtocolError(f"request {self.id} goes on at token {self.start}, and {num_tokens} were delivered")
        if cut <= 0 and cut_text <= 0:
            return self
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[max(0, cut) :],
            text=self.text[max(0, cut_text) :],
            logprobs=None if self.logprobs is None else self.logprobs[max(0, cut) :],
            sources=None if self.sources is None else self.sources[max(0, cut) :],
            start=num_tokens,
            start_character=num_characters,
        )


class ProtocolError(RuntimeError):
    """A message is malformed or does not follow from the messages before it."""


class MeshError(RuntimeError):
    """Base of CommError and DesyncError: the ranks cannot go on together."""
