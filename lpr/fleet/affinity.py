"""What a router can send alike requests to the same replica by, where their prompt's K/V may still be cached.

A router sees JSON, not tokens, so the keys are digests of how a prompt's text begins. A service names them in the
header X-LPR-Prefix of each answer: a router that keeps which replica said which needs no digest of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

FIRST_BYTES = 256
"""The first key covers so many bytes, each next one twice as many; a shorter prompt has no key."""
MOST_KEYS = 9
SESSION_HEADER = "x-session-id"
SESSION_FIELD = "prompt_cache_key"
"""OpenAI's name for the same."""


def prefix_keys(body: Mapping[str, Any]) -> list[str]:
    """Digests of a prompt's first 256, 512, 1024, ... bytes, up to 64 KiB: 16 hex digits each, the shortest first.

    `body` is the parsed JSON of a completion, a chat or an infill. Two prompts that begin alike share their first keys.
    """
    text = beginning_of(body)[: FIRST_BYTES << (MOST_KEYS - 1)].encode("utf-8", "replace")
    digest, at, keys = hashlib.blake2b(digest_size=8), 0, []
    for number in range(MOST_KEYS):
        end = FIRST_BYTES << number
        if len(text) < end:
            break
        digest.update(text[at:end])
        keys.append(digest.hexdigest())
        at = end
    return keys


def routing_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """What decides where a request goes: its session if it names one, else how its prompt begins, else nothing ("").

    A session is the header X-Session-Id or the field prompt_cache_key. Requests of equal keys belong together.
    """
    for name, value in headers.items():
        if name.lower() == SESSION_HEADER and value:
            return f"session {value}"
    if isinstance(session := body.get(SESSION_FIELD), str) and session:
        return f"session {session}"
    keys = prefix_keys(body)
    return f"prefix {keys[0]}" if keys else ""


def beginning_of(body: Mapping[str, Any]) -> str:
    """How the prompt of a request begins, as text: token ids as numbers, messages behind their roles."""
    if isinstance(messages := body.get("messages"), Sequence):
        return "".join(map(_message, messages))
    if "input_prefix" in body:
        files = body.get("input_extra") or ()
        extra = "".join(str(each.get("text", "")) for each in files if isinstance(each, Mapping))
        return f"{extra}{body['input_prefix']}{body.get('prompt', '')}"
    prompt = body.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and prompt:
        first = prompt[0]
        if isinstance(first, str):
            return first
        ids = first if isinstance(first, Sequence) else prompt
        return " ".join(map(str, ids[:MOST_IDS]))
    return ""


MOST_IDS = 32768
"""Token ids that are looked at: they are more than 64 KiB as text."""


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return ""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return f"{message.get('role', '')}\n{content or ''}\n"
