"""From committed tokens to text: incremental decoding, stop strings and streaming chunks of one request.

A step commits several tokens at once; `TextStream` is fed one token at a time, so that where a step ends
cannot change the text. What is streamed is never taken back. Three things are therefore held back: an
unfinished character, a suffix that may become a stop string, and a run of byte-fallback tokens that has not
ended (the decoder of Llama-2 and its relatives replaces the *whole* run if any byte of it is invalid, so a
character that looks complete may still turn into U+FFFD).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lpr.config import InputError, SamplingParams

REPLACEMENT = "\ufffd"

# Tokens decoded again with every new one. A window that begins inside a character misreads at most 3 bytes,
# and the 3 characters that may be held back at its end stand for at most 3 bytes each: 12 tokens of a byte.
CONTEXT = 12

# A UTF-8 character that lacks its last byte has 3 bytes; decoders show 1 to 3 replacement characters for it.
MAX_UNFINISHED = 3


class Vocabulary(dict[int, bytes | None]):
    """What a token is to an incremental decoder, found out at its first use and kept.

    `b""` is a token that `decode(skip_special_tokens=True)` drops, one byte is a byte-fallback token, None is
    every other token.
    """

    _known: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ask the tokenizer which tokens it drops and how it decodes byte-fallback tokens."""
        super().__init__()
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            added = tokenizer.added_tokens_decoder.items()
            self.update((token, b"") for token, content in added if content.special)
            # A padded embedding has rows that are no token, which a fast tokenizer's decode drops too.
            self._name: Callable[[int], str | None] = tokenizer.backend_tokenizer.id_to_token
        else:
            self.update((token, b"") for token in tokenizer.all_special_ids)
            self._name = lambda token: ""
        self.has_byte_runs = False
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens: list[Any] = [tokenizer.convert_tokens_to_ids(name) for name in names]
        # Names prove nothing: some tokenizers decode byte tokens by themselves and some print their names.
        if len(set(tokens)) == 256 and None not in tokens:
            decode = decoder_of(tokenizer)
            lead, follow, invalid = tokens[0xC3], tokens[0xA9], tokens[0xFF]
            valid, broken = decode([lead, follow]), decode([lead, follow, invalid])
            self.has_byte_runs = (valid, broken) == ("\u00e9", 3 * REPLACEMENT)
        if self.has_byte_runs:
            self.update((token, bytes([byte])) for byte, token in enumerate(tokens))

    def __missing__(self, token: int) -> bytes | None:
        """Find out about a token that is neither special nor a byte."""
        self[token] = b"" if self._name(token) is None else None
        return self[token]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """The vocabulary of a tokenizer, read once per tokenizer."""
        if tokenizer not in cls._known:
            cls._known[tokenizer] = cls(tokenizer)
        return cls._known[tokenizer]


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """`tokenizer.decode` without special tokens and without clean-up of spaces."""
    cls = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and cls.decode is PreTrainedTokenizerBase.decode
        and cls._decode is PreTrainedTokenizerFast._decode
    ):
        # The same without transformers' conversion of its arguments, which takes longer than the decoding.
        return tokenizer.backend_tokenizer.decode
    decode: Callable[..., Any] = tokenizer.decode
    return partial(decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def num_shared(first: str, second: str) -> int:
    """Length of the longest common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


class IncrementalDecoder:
    """Decodes a growing sequence, a short window of tokens at a time.

    `push` returns the text that a token settles: no later token can change it. The rest of the text so far is
    `pending`. With the prompt P and the output T, the text is what `decode(P + T)` shows beyond `decode(P)`:

        settled + pending == decode(P + T)[num_shared(decode(P), decode(P + T)):]

    Exact for a decoder in which what a token adds depends only on whether it is the first with text, and on
    the bytes before it that are not yet a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        """Read the end of the prompt, from which the output continues."""
        self._vocabulary = Vocabulary.of(tokenizer)
        self._decode = decoder_of(tokenizer)
        self._max_held = 0 if self._vocabulary.has_byte_runs else MAX_UNFINISHED
        self._run: _ByteRun | None = None
        # What the prompt shows of text that the output may still change; subtracted from what settles.
        self._prompt_pending = ""

        prompt = [token for token in prompt_ids if self._vocabulary[token] != b""]
        end = len(prompt)
        while end and self._vocabulary[prompt[end - 1]]:
            end -= 1
        size = CONTEXT
        while size < end and not self._decode(prompt[end - size : end]):
            size *= 2
        self._restart(prompt[max(0, end - size) : end])
        for token in prompt[end:]:
            self.push(token)
        self._prompt_pending = self.pending

    @property
    def pending(self) -> str:
        """Text of the tokens so far that a later token may change."""
        return self._beyond_prompt(self._run.text if self._run else self._held)

    @property
    def readable(self) -> str:
        """The pending text if it consists of whole characters, else an empty string."""
        return self._beyond_prompt(self._run.readable) if self._run else ""

    def push(self, token: int) -> str:
        """Take the next token and return the text that it settles."""
        data = self._vocabulary[token]
        if data == b"":
            return ""
        if data:
            if not self._run:
                first_is_stripped = not self._num_settled and not self._decode([*self._window, token])
                self._run = _ByteRun(first_is_stripped)
            self._run.push(token, data)
            return ""
        settled = self._end_run(self._run) if self._run else ""
        self._window.append(token)
        text = self._decode(self._window)
        num_settled = self._num_settled
        self._settle(text)
        settled += text[num_settled : self._num_settled]
        if len(self._window) >= self._max_window:
            self._slide()
        return self._claim(settled) if self._prompt_pending else settled

    def _settle(self, text: str) -> None:
        """Split the window's text into what is settled and what is held."""
        held = 0
        while held < min(self._max_held, len(text)) and text[-1 - held] == REPLACEMENT:
            held += 1
        self._num_settled = len(text) - held
        self._held = text[self._num_settled :]

    def _restart(self, window: list[int]) -> None:
        self._window = window
        self._max_window = max(2 * CONTEXT, 2 * len(window))
        self._settle(self._decode(window))

    def _slide(self) -> None:
        context = self._window[-CONTEXT:]
        if self._decode(context):
            self._restart(context)
        else:
            # Decoders that strip all spaces would strip the next token's too, if nothing stands before it.
            self._max_window *= 2

    def _end_run(self, run: _ByteRun) -> str:
        self._run = None
        # One byte is context enough: all that matters to the next token is that some text precedes it.
        self._window.append(run.last_token)
        self._num_settled = len(self._decode(self._window))
        return run.text

    def _beyond_prompt(self, text: str) -> str:
        if not self._prompt_pending:
            return text
        return text[num_shared(text, self._prompt_pending) :]

    def _claim(self, settled: str) -> str:
        shared = num_shared(settled, self._prompt_pending)
        self._prompt_pending = self._prompt_pending[shared:] if shared == len(settled) else ""
        return settled[shared:]


class _ByteRun:
    """Consecutive byte-fallback tokens: characters if all of them are valid UTF-8, else all U+FFFD."""

    def __init__(self, first_is_stripped: bool) -> None:
        self._utf8 = getincrementaldecoder("utf-8")()
        self._characters = ""
        self._num_tokens = 0
        self._is_valid = True
        self._first_is_stripped = first_is_stripped
        self.last_token = -1

    def push(self, token: int, data: bytes) -> None:
        self.last_token = token
        self._num_tokens += 1
        if self._is_valid:
            try:
                character = self._utf8.decode(data)
            except UnicodeDecodeError:
                self._is_valid = False
            else:
                if self._num_tokens > 1 or not self._first_is_stripped:
                    self._characters += character

    @property
    def readable(self) -> str:
        return self._characters if self._is_valid and not self._utf8.getstate()[0] else ""

    @property
    def text(self) -> str:
        if self._is_valid and not self._utf8.getstate()[0]:
            return self._characters
        return REPLACEMENT * self._num_tokens


class TextStream:
    """The output of one request as ids and as text, fed one committed token at a time.

    The text continues the prompt seamlessly, as in vLLM and TGI: it is what `tokenizer.decode` (special
    tokens skipped, no clean-up of spaces) shows of prompt and output beyond what it shows of the prompt:

        whole = decode(prompt_ids + token_ids); text == whole[num_shared(decode(prompt_ids), whole):]

    cut right before the first stop string once one has appeared. What they share is all of
    `decode(prompt_ids)` unless the prompt ends inside a character or a run of bytes that the output changes.
    For byte-level tokenizers (GPT-2, Llama-3, Qwen) the text equals `decode(token_ids)` but for that; with
    SentencePiece ones (Llama-2, Mistral) `decode(token_ids)` would lose the space between prompt and output.
    An empty prompt, or one of special tokens only, gives `decode(token_ids)`.

    An end-of-text token finishes with "stop" before anything else is asked, then a stop string with "stop",
    then `max_new_tokens` with "length". Only generated text is searched for stop strings, and characters that
    are still unfinished (shown as U+FFFD) only when the output ends there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Begin the output of a request; without a tokenizer its text stays empty."""
        if tokenizer is None and params.stop:
            raise InputError(f"stop={params.stop!r} needs a tokenizer, and this model was loaded without one")
        self.num_tokens = 0
        """Ids pushed."""
        self._is_closed = False
        self._params = params
        self.stop_ids = (frozenset() if params.ignore_eos else eos_token_ids) | set(params.stop_token_ids)
        """Ids that end the output, with "stop"."""
        self.stop_reason: int | str | None = None
        """What ended the output, if a stop string or an id of `stop_token_ids` that is no end of text did."""
        self._eos_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._decoder: Any = None if tokenizer is None else IncrementalDecoder(tokenizer, prompt_ids)
        self._unread: deque[tuple[int, bool, bool]] = deque()
        """Tokens that were pushed and not decoded, whether each is an end of text, and whether it is the last."""
        self._longest_stop = max(map(len, params.stop), default=0)
        self._stop_prefixes = {stop[:size] for stop in params.stop for size in range(1, len(stop))}
        # Settled text in order: chunks that were taken, chunks that may be taken, and the suffix that may
        # become a stop string.
        self._taken: list[str] = []
        self._safe: list[str] = []
        self._suffix = ""

    @property
    def text(self) -> str:
        """The complete text so far, also what `take` still holds back; joined when asked for."""
        self._read()
        pending = self._decoder.pending if self._decoder and not self._is_closed else ""
        return "".join([*self._taken, *self._safe, self._suffix, pending])

    @property
    def taken(self) -> str:
        """The text that `take` has given so far; joined when asked for."""
        return "".join(self._taken)

    def push(self, token: int) -> str | None:
        """Feed the next committed token; returns "stop" or "length" if it ends the output, else None.

        The ending one belongs to the output: the end-of-text id too, as in `transformers.generate`, although the text
        never shows it, and the token that completed a stop string.
        """
        if self._is_closed:
            raise RuntimeError(f"token {token} pushed after the output ended")
        self.num_tokens += 1
        is_eos = token in self.stop_ids
        is_last = is_eos or self.num_tokens == self._params.max_new_tokens
        if self._decoder:
            self._unread.append((token, is_eos, is_last))
        found_stop = bool(self._params.stop) and self._read()
        self._is_closed = is_last or found_stop
        if is_eos or found_stop:
            if is_eos:
                self.stop_reason = None if token in self._eos_ids else token
            return "stop"
        return "length" if is_last else None

    def extend(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Push a step's tokens up to the one that ends the output; returns how many that were, and as `push`."""
        simple = not self._params.stop and self.num_tokens + len(tokens) < self._params.max_new_tokens
        if simple and not self._is_closed and self.stop_ids.isdisjoint(tokens):
            self.num_tokens += len(tokens)
            if self._decoder:
                self._unread.extend([(token, False, False) for token in tokens])
            return len(tokens), None
        for taken, token in enumerate(tokens, 1):
            reason = self.push(token)
            if reason is not None:
                return taken, reason
        return len(tokens), None

    def close(self) -> None:
        """End the output here, for a reason that is not in it."""
        self._read()
        if not self._is_closed:
            self._safe.append(self._suffix + (self._decoder.pending if self._decoder else ""))
            self._suffix = ""
            self._is_closed = True

    def take(self, num_tokens: int | None = None) -> str:
        """The text that became safe to stream since the last call; after the finish all the rest.

        With `num_tokens`, only so many of the tokens pushed since then are looked at. All results together are the
        final `text`.
        """
        self._read(num_tokens)
        chunk = "".join(self._safe)
        self._safe.clear()
        if chunk:
            self._taken.append(chunk)
        return chunk

    def _read(self, num_tokens: int | None = None) -> bool:
        """Decode tokens that were pushed; returns whether there is a stop string.

        Only stop strings decide anything by the text, so without them it waits until somebody asks for it, or until the
        device is busy.
        """
        assert self._decoder is not None or not self._unread
        found_stop = False
        for _ in range(len(self._unread) if num_tokens is None else min(num_tokens, len(self._unread))):
            token, is_eos, is_last = self._unread.popleft()
            settled = "" if is_eos else self._decoder.push(token)
            unsettled = self._decoder.pending if is_last else self._decoder.readable
            found_stop = self._append(settled, unsettled, is_last) or found_stop
        return found_stop

    def _append(self, settled: str, unsettled: str, is_last: bool) -> bool:
        """Append settled text, search it and the unsettled text that follows it, and hold back what must be.

        Returns whether there is a stop string; if so, or if the token was the last, the text is final.
        """
        self._suffix += settled
        visible = self._suffix + unsettled
        cut, stop = self._find_stop(visible)
        self.stop_reason = stop if stop is not None else self.stop_reason
        if cut is not None or is_last:
            self._safe.append(visible if cut is None else visible[:cut])
            self._suffix = ""
            return cut is not None
        if settled:
            num_safe = len(self._suffix) - self._num_held_back()
            self._safe.append(self._suffix[:num_safe])
            self._suffix = self._suffix[num_safe:]
        return False

    def _find_stop(self, visible: str) -> tuple[int, str] | tuple[None, None]:
        """Where the first stop string begins, and which it is, if there is one."""
        found = [(cut, stop) for stop in self._params.stop if (cut := visible.find(stop)) >= 0]
        return min(found, key=lambda each: each[0], default=(None, None))

    def _num_held_back(self) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        suffix = self._suffix
        for size in range(min(len(suffix), self._longest_stop - 1), 0, -1):
            if suffix[-size:] in self._stop_prefixes:
                return size
        return 0
