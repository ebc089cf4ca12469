"""The one table of the service's limits on what clients send.

Other modules take their numbers from here. docs/security.md shows the table, and tests/serve/test_limits.py has a test
for each entry.
"""

from typing import NamedTuple

from lpr.sched.queue import MOST_PRIORITY


class Limit(NamedTuple):
    """One limit. Beyond it the client gets `answer`, and nothing has been computed for it."""

    what: str  # what is counted, with its unit
    most: int  # the largest value that is accepted
    answer: str  # HTTP status beyond it, or what happens instead
    flag: str = ""  # flag of lpr.serve that sets another value; `most` is its default


CONNECTIONS = Limit("connections of a port", 2048, "503", "--max-connections")
METRICS_CONNECTIONS = Limit("connections of --metrics-port", 32, "503")
HEAD = Limit("bytes of a request's head", 32 << 10, "431")
HEADERS = Limit("headers of a request", 100, "431")
AHEAD = Limit("requests that a connection sends ahead of its answers", 16, "400, or not read")
HEAD_SECONDS = Limit("seconds until a connection's TLS handshake and head are complete", 20, "408")
IDLE_SECONDS = Limit("seconds that a connection stays open between requests", 30, "closed")
UNREAD_SECONDS = Limit("seconds that a client may leave its answer unread", 60, "closed")
BODY_SECONDS = Limit("seconds until a body is complete", 30, "408")
FRAMING = Limit("bytes around the chunks of a body, if they are more than an eighth of it", 2 << 10, "400")
BODIES = Limit("bytes of all incomplete bodies", 128 << 20, "408 for the oldest")
BODY = Limit("bytes of a body", 2 << 20, "413", "--max-body")
CHOICES = Limit("`n`, `best_of` and prompts of one request", 128, "400")
STOPS = Limit("stop strings of a request", 16, "400")
STOP_LENGTH = Limit("characters of a stop string", 1024, "400")
LABEL = Limit("characters of `user` and `prompt_cache_key`", 1024, "400")
LOGIT_BIAS = Limit("tokens of `logit_bias`", 1024, "400")
STOP_IDS = Limit("ids of `stop_token_ids`", 1024, "400")
MESSAGES = Limit("messages of a conversation, with their parts", 4096, "400")
IDS = Limit("token ids of a request's prompts", 1 << 19, "400")
TOKENIZED = Limit("characters of a text for `/tokenize`, if the context holds fewer", 1 << 19, "400")
DETOKENIZED = Limit("tokens of `/detokenize`", 1 << 18, "400")
PIECES = Limit("pieces of other files in `input_extra`", 1024, "400")
FIELDS = Limit("names in `samplers`, `response_fields` or `modalities`, parts of `prediction`", 256, "400")
DEPTH = Limit("levels of a body's JSON", 200, "400")
TEMPLATE_VALUES = Limit("values in `chat_template_kwargs`, and in fields that have no effect", 1024, "400")
CONTEXT = Limit("a prompt's characters per token of the context, in characters of the longest token", 1, "400")
TOOLS = Limit("tools of a request", 512, "400")
TOOL_VALUES = Limit("values in the schemas of a request's tools", 1 << 15, "400")
CALL_VALUES = Limit("values in the arguments of a call that a conversation holds", 1 << 15, "400")
GRAMMAR = Limit("characters of a grammar or a JSON schema", 1 << 17, "400")
REGEX = Limit("characters of a regular expression", 1 << 16, "400")
RULES = Limit("rules of a grammar", 4096, "400")
REFERENCES = Limit("references in a JSON schema", 2048, "400")
GRAMMAR_TIME = Limit("milliseconds of CPU time that a grammar takes to compile", 1000, "400")
GRAMMAR_MEMORY = Limit("MiB that a grammar takes to compile", 256, "400")
BODY_TIME = Limit("milliseconds of CPU time to check a body or to render a conversation", 2000, "400")
BODY_MEMORY = Limit("MiB to check a body or to render a conversation", 512, "400")
PROCESSES = Limit("bodies, conversations and grammars that are worked on at once, all but one of one key", 3, "waits")
ASIDE = Limit("requests that wait for checks beside the event loop; half of them of one key", 64, "429 for that key")
ASIDE_BYTES = Limit("bytes of these requests, likewise", 64 << 20, "429 for that key")
QUEUE = Limit("requests that wait for a slot", 256, "429", "--max-queue")
QUEUED_TOKENS = Limit("prompt tokens of waiting requests", 1_000_000, "429", "--max-queued-tokens")
KEY_REQUESTS = Limit("open requests of one key; 0: half of the room if there are several keys", 0, "429",
                     "--max-requests-per-key")  # fmt: skip
KEY_TOKENS = Limit("prompt tokens of one key's waiting requests; 0: likewise, of --max-queued-tokens", 0, "429",
                   "--max-tokens-per-key")  # fmt: skip
LOGPROBS = Limit("log-probabilities of an answer: tokens x (1 + those of others), echoed ones too", 1 << 19, "400")
UNREAD = Limit("bytes of all streams that their clients leave unread", 64 << 20, "the longest ends")
DELIVERED = Limit("ids of `delivered_token_ids`", 1 << 18, "400")
LOG = Limit("writes to stderr that wait for its reader", 1024, "dropped")
LOGGED_PATH = Limit("characters of a path in the access log", 200, "cut off")
PRIORITY = Limit("`priority`, either way", MOST_PRIORITY, "clamped")


def table() -> dict[str, Limit]:
    return {name: value for name, value in globals().items() if isinstance(value, Limit)}
