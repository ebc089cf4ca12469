"""What a client can make large, and how large: the one table of the service's limits.

Other modules take their numbers from here. docs/security.md shows the table, and tests/test_serve_limits.py has a test
for each entry.
"""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """One limit. Beyond it the client gets `answer`, and nothing has been computed for it."""

    what: str
    """What is counted, with its unit."""
    most: int
    """The largest value that is accepted."""
    answer: str
    """HTTP status beyond it, or what happens instead."""
    flag: str = ""
    """Flag of lpr.serve that sets another value; `most` is its default."""


CONNECTIONS = Limit("connections of a port", 2048, "503", "--max-connections")
METRICS_CONNECTIONS = Limit("connections of --metrics-port", 32, "503")
HEAD = Limit("bytes of a request's head", 32 << 10, "431")
HEADERS = Limit("headers of a request", 100, "431")
AHEAD = Limit("requests that a connection sends ahead of its answers", 16, "400, or not read")
HEAD_SECONDS = Limit("seconds until a connection's TLS handshake and head are complete", 20, "408")
IDLE_SECONDS = Limit("seconds that a connection stays open between requests", 30, "closed")
UNREAD_SECONDS = Limit("seconds that a client may leave its answer unread", 60, "closed")
BODY_SECONDS = Limit("seconds until a body is complete", 30, "408")
BODIES = Limit("bytes of all incomplete bodies", 128 << 20, "408 for the oldest")
BODY = Limit("bytes of a body", 2 << 20, "413", "--max-body")
CHOICES = Limit("`n`, `best_of` and prompts of one request", 128, "400")
STOPS = Limit("stop strings of a request", 16, "400")
STOP_LENGTH = Limit("characters of a stop string", 1024, "400")
LABEL = Limit("characters of `user` and `prompt_cache_key`", 1024, "400")
QUEUE = Limit("requests that wait for a slot", 256, "429", "--max-queue")
QUEUED_TOKENS = Limit("prompt tokens of waiting requests", 1_000_000, "429", "--max-queued-tokens")


def table() -> dict[str, Limit]:
    """All limits by their names here."""
    return {name: value for name, value in globals().items() if isinstance(value, Limit)}
