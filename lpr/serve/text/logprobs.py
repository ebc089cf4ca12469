"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lpr.protocol import TokenLogprobs
from lpr.serve.text.tokens import Tokens


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


def for_prompt(tokens: Tokens, ids: Sequence[int], found: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
    """The same for a prompt, whose first token has none: `found` begins after it, and may end before the prompt."""
    first = tokens.text_of(ids[0])
    shown = 0 if ids[0] in tokens.bos_ids else len(first)  # a BOS token is no part of the text
    rest = for_completion(tokens, ids[1 : 1 + len(found)], found, shown)
    head = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [head[name], *values] for name, values in rest.items()}


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two pieces of such log-probabilities as one."""
    return {name: first[name] + second[name] for name in first}


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
