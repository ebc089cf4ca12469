"""What the front has of one request's output, by positions, and so what of each step is new to it.

After a lost driver the two can be apart by a step in either way: the ranks that go on may have taken a step that nobody
told the front of, or the front may have got a step that they have to take again, with other trees and so other borders.
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.core.state import TokenLogprobs as Found
from lpr.core.tree import Source
from lpr.engine.request import Chunk as EngineChunk
from lpr.engine.request import Request
from lpr.engine.stats import At, DecodeStats
from lpr.serve.messages import Chunk, TokenLogprobs, Usage

UNKNOWN_SOURCE = "unknown"
"""Source of a token whose step a lost driver has counted."""


class Delivery:
    """The way of one request's output to the front."""

    def __init__(self, request: Request, num_tokens: int, num_characters: int, details: bool) -> None:
        """Go on behind the `num_tokens` tokens and `num_characters` characters of output that the front has.

        With `details`, chunks say of each token which draft source named it. The request's queue holds no chunk of a
        step before this.
        """
        self.request = request
        self._has_tokens, self._has_characters = num_tokens, num_characters
        self._details = details
        self._at_token, self._at_character = request.num_output, len(request.text_stream.taken)
        self._counted: dict[At, int] = dict(request.stats.accepted)

    def missed(self) -> Chunk | None:
        """What the request has brought already and the front has not got; None if there is nothing."""
        request, start, character = self.request, self._has_tokens, self._has_characters
        ids, text = request.token_ids[start:], request.text_stream.taken[character:]
        if not ids and not text:
            return None
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = _sent(request.logprobs[len(request.logprobs) - len(ids) :])
        sources = [UNKNOWN_SOURCE] * len(ids) if self._details else None
        self._has_tokens, self._has_characters = start + len(ids), character + len(text)
        return Chunk(
            int(request.id), ids, text, logprobs=logprobs, sources=sources, start=start, start_character=character
        )

    def new(self, chunk: EngineChunk) -> Chunk | None:
        """What of a step's chunk the front has not got; None if that is nothing. Chunks come in their order."""
        request = self.request
        start, character = self._has_tokens, self._has_characters
        cut, cut_text = max(0, start - self._at_token), max(0, character - self._at_character)
        sources = self._sources(len(chunk.token_ids))[cut:] if self._details else None
        self._at_token += len(chunk.token_ids)
        self._at_character += len(chunk.text)
        ids, text = chunk.token_ids[cut:], chunk.text[cut_text:]
        if not ids and not text and chunk.finish_reason is None:
            return None
        self._has_tokens, self._has_characters = start + len(ids), character + len(text)
        ended = chunk.finish_reason is not None
        return Chunk(
            int(request.id),
            ids,
            text,
            chunk.finish_reason,
            request.error,
            logprobs=None if chunk.logprobs is None else _sent(chunk.logprobs[cut:]),
            sources=sources,
            usage=usage_of(request) if ended else None,
            stop_reason=request.text_stream.stop_reason if ended else None,
            start=start,
            start_character=character,
        )

    def _sources(self, count: int) -> list[str]:
        """Which draft source named each of a step's tokens; the last one is the model's own."""
        accepted = dict(self.request.stats.accepted)
        by_depth = {
            depth: Source(source).name.lower()
            for (source, depth), number in accepted.items()
            if depth and number > self._counted.get((source, depth), 0)
        }
        self._counted = accepted
        return [by_depth.get(depth, "model") for depth in range(1, count + 1)]


def usage_of(request: Request) -> Usage:
    """What a finished request took."""
    stats: DecodeStats = request.stats
    depths: dict[int, int] = {}
    for (source, depth), count in stats.accepted.items():
        if source != Source.ROOT:
            depths[depth] = depths.get(depth, 0) + count
    sources = stats.sources
    return Usage(
        num_steps=stats.num_steps,
        num_fill_steps=stats.num_fill_steps,
        num_cached=request.num_cached_tokens,
        drafted=sum(each.drafted for each in sources.values()),
        accepted=sum(each.accepted for each in sources.values()),
        accepted_per_depth=[depths.get(depth, 0) for depth in range(1, max(depths, default=0) + 1)],
        by_source={name: (each.drafted, each.accepted) for name, each in sources.items()},
        num_tokens=stats.num_tokens,
    )


def _sent(found: Sequence[Found]) -> list[TokenLogprobs]:
    return [TokenLogprobs(each.logprob, list(each.top)) for each in found]
