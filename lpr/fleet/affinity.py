"""Prefix-affinity routing: keys by which a router sends prompts with a common prefix to the replica that cached it.

A router sees JSON, not tokens, so a key is a digest of the beginning of a prompt's text. A service returns the keys in
the header X-LPR-Prefix of each answer, so a router can record which replica has which and needs no digest of its own.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

FIRST_BYTES = 256  # Bytes that the first key covers. Each next key covers twice as many; a shorter prompt has no key.
MOST_KEYS = 9
MOST_IDS = 32768  # token ids of a prompt that are read: as text they are more than 64 KiB
SESSION_HEADER = "x-session-id"
SESSION_FIELD = "prompt_cache_key"  # OpenAI's field for a session


def prefix_keys(body: Mapping[str, Any]) -> list[str]:
    """Digests of a prompt's first 256, 512, 1024, ... bytes, up to 64 KiB: 16 hex digits each, the shortest first.

    `body` is the parsed JSON of a completion, a chat, a response or an infill. Two prompts that begin alike share their
    first keys.
    """
    text = beginning_of(body)[: FIRST_BYTES << (MOST_KEYS - 1)].encode("utf-8", "replace")
    ends = [FIRST_BYTES << number for number in range(MOST_KEYS)]
    return [hashlib.blake2b(text[:end], digest_size=8).hexdigest() for end in ends if end <= len(text)]


def routing_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """The routing key of a request: its session, else its first prefix key, else "".

    A session is the header X-Session-Id or the field prompt_cache_key. Requests with equal keys belong on one replica.
    """
    for name, value in headers.items():
        if name.lower() == SESSION_HEADER and value:
            return f"session {value}"
    if isinstance(session := body.get(SESSION_FIELD), str) and session:
        return f"session {session}"
    keys = prefix_keys(body)
    return f"prefix {keys[0]}" if keys else ""


def beginning_of(body: Mapping[str, Any]) -> str:
    """The beginning of a request's prompt as text: token ids as numbers, messages after their roles."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, Sequence):
        first = _text(body.get("system") or body.get("instructions"))
        return first + (messages if isinstance(messages, str) else "".join(map(_message, messages)))
    if "input_prefix" in body:
        files = body.get("input_extra") or ()
        extra = "".join(str(each.get("text", "")) for each in files if isinstance(each, Mapping))
        return f"{extra}{body['input_prefix']}{body.get('prompt', '')}"
    prompt = body.get("prompt", "")
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Sequence) and not isinstance(prompt, str):
        prompt = prompt[0]  # of several prompts
    if isinstance(prompt, str):
        return prompt
    return " ".join(map(str, prompt[:MOST_IDS])) if isinstance(prompt, Sequence) else ""


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return ""
    return f"{message.get('role', '')}\n{_text(message.get('content'))}\n"


def _text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")
