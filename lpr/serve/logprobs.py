"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lpr.serve.messages import TokenLogprobs
from lpr.serve.tokens import Tokens


def for_completion(
    tokens: Tokens, ids: Sequence[int], found: Sequence[TokenLogprobs], offset: int
) -> dict[str, list[Any]]:
    """The shape of /v1/completions; `offset` is where the text of the first token begins."""
    texts = [tokens.text_of(token) for token in ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [
            {**{tokens.text_of(other): value for other, value in each.top}, tokens.text_of(token): each.logprob}
            for token, each in zip(ids, found, strict=True)
        ],
        "text_offset": offsets,
    }


def for_chat(tokens: Tokens, ids: Sequence[int], found: Sequence[TokenLogprobs], num_top: int) -> dict[str, list[Any]]:
    """The shape of /v1/chat/completions, with the `num_top` most likely tokens."""
    return {
        "content": [
            {
                **_token(tokens, token, each.logprob),
                "top_logprobs": [_token(tokens, other, value) for other, value in each.top[:num_top]],
            }
            for token, each in zip(ids, found, strict=True)
        ]
    }


def _token(tokens: Tokens, token: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.text_of(token), "logprob": logprob, "bytes": list(tokens.bytes_of(token))}
