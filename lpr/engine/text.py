"""From committed tokens to text: incremental decoding, stop strings and streaming chunks of one request.

A step commits several tokens at once; `TextStream` takes them one at a time, so the end of a step cannot change the
text. Streamed text is never taken back. Three things are therefore held back: an unfinished character, a suffix that
may become a stop string, and a run of byte-fallback tokens that has not ended (Llama-2's decoder and its relatives
replace the *whole* run if any byte of it is invalid, so a character that looks complete may still turn into U+FFFD).

`tokenizers.decoders.DecodeStream` (0.23) is not used: it raises if a byte run turns out to be invalid, emits the prompt
again if that ends inside a character, decodes invalid bytes in quadratic time, and does not support slow tokenizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lpr.config import InputError, SamplingParams
from lpr.engine.stop_search import StopSearch

REPLACEMENT = "\ufffd"

# Number of previous tokens decoded with every new one. A window that begins inside a character misreads at most 3
# bytes, and each of up to 3 characters held back at its end has at most 3 bytes: 12 one-byte tokens.
CONTEXT = 12

# A UTF-8 character that lacks its last byte has up to 3 bytes; decoders show 1 to 3 replacement characters for it.
MAX_UNFINISHED = 3


class Vocabulary(dict[int, bytes | None]):
    """The kind of each token, determined at its first use.

    `b""`: a token that `decode` drops; one byte: a byte-fallback token; None: any other token.
    """

    _known: WeakKeyDictionary[Any, dict[bool, Vocabulary]] = WeakKeyDictionary()

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special: bool = True) -> None:
        """Read from the tokenizer which tokens it drops and how it decodes byte-fallback tokens."""
        super().__init__()
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            added = tokenizer.added_tokens_decoder.items()
            self.update((token, b"") for token, content in added if content.special and skip_special)
            # A padded embedding has ids without a token. A fast tokenizer's decode drops them too.
            self._name: Callable[[int], str | None] = tokenizer.backend_tokenizer.id_to_token
        else:
            self.update((token, b"") for token in tokenizer.all_special_ids if skip_special)
            self._name = lambda token: ""
        self.has_byte_runs = False
        tokens: list[Any] = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)]
        # Names do not identify byte fallback: some tokenizers decode byte tokens singly, and some print their names.
        if len(set(tokens)) == 256 and None not in tokens:
            decode = decoder_of(tokenizer)
            valid = [tokens[byte] for byte in "é".encode()]
            self.has_byte_runs = (decode(valid), decode([*valid, tokens[0xFF]])) == ("é", 3 * REPLACEMENT)
        if self.has_byte_runs:
            self.update((token, bytes([byte])) for byte, token in enumerate(tokens))

    def __missing__(self, token: int) -> bytes | None:
        """Classify a token that is neither special nor a byte."""
        self[token] = b"" if self._name(token) is None else None
        return self[token]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, skip_special: bool = True) -> Vocabulary:
        """The vocabulary of a tokenizer, with or without special tokens, read once per tokenizer."""
        known = cls._known.setdefault(tokenizer, {})
        if skip_special not in known:
            known[skip_special] = cls(tokenizer, skip_special)
        return known[skip_special]


def decoder_of(tokenizer: PreTrainedTokenizerBase, skip_special: bool = True) -> Callable[[list[int]], str]:
    """`tokenizer.decode` with or without special tokens, and without clean-up of spaces."""
    cls = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and cls.decode is PreTrainedTokenizerBase.decode
        and cls._decode is PreTrainedTokenizerFast._decode
    ):
        # The same without transformers' conversion of its arguments, which takes longer than the decoding.
        plain = tokenizer.backend_tokenizer.decode
        return plain if skip_special else partial(plain, skip_special_tokens=False)
    decode: Callable[..., Any] = tokenizer.decode
    return partial(decode, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def num_shared(first: str, second: str) -> int:
    """Length of the longest common prefix of two texts."""
    if first.startswith(second) or second.startswith(first):
        return min(len(first), len(second))
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


class IncrementalDecoder:
    """Decodes a growing sequence, a short window of tokens at a time.

    `push` returns the text that becomes final with a token: no later token can change it. The rest of the text so far
    is `pending`. With the prompt P and the output T, the text is what `decode(P + T)` shows beyond `decode(P)`:

        final + pending == decode(P + T)[num_shared(decode(P), decode(P + T)):]

    Exact for a decoder in which what a token adds depends only on whether it is the first with text, and on
    the bytes before it that are not yet a character.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], skip_special: bool = True
    ) -> None:
        """Read the end of the prompt, from which the output continues."""
        self._vocabulary = Vocabulary.of(tokenizer, skip_special)
        self._decode = decoder_of(tokenizer) if skip_special else decoder_of(tokenizer, False)
        self._max_held = 0 if self._vocabulary.has_byte_runs else MAX_UNFINISHED
        # Consecutive byte-fallback tokens: their bytes, the last token, and whether the decoder strips the first.
        self._run = bytearray()
        self._byte_token = -1
        self._first_is_stripped = False
        self._num_final = 0
        # Text that the prompt shows and the output may still change; subtracted from the output's text.
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
        return self._beyond_prompt(self._held + self._run_text(REPLACEMENT))

    @property
    def readable(self) -> str:
        """The pending text if it consists of whole characters, else an empty string."""
        return self._beyond_prompt(self._run_text(""))

    def push(self, token: int) -> str:
        """Take the next token and return the text that becomes final with it."""
        data = self._vocabulary[token]
        if data is not None:
            if data and not self._run:
                self._first_is_stripped = not self._num_final and not self._decode([*self._window, token])
            self._run += data
            self._byte_token = token if data else self._byte_token
            return ""
        final = self._run_text(REPLACEMENT)
        if self._run:
            self._run.clear()
            # One byte is context enough: the next token only depends on whether some text precedes it.
            self._window.append(self._byte_token)
            self._num_final = len(self._decode(self._window))
        final += self._push_text([token])
        if self._prompt_pending:
            shared = num_shared(final, self._prompt_pending)
            self._prompt_pending = self._prompt_pending[shared:] if shared == len(final) else ""
            final = final[shared:]
        return final

    def extend(self, tokens: Sequence[int]) -> str:
        """As `push` of each; tokens that have text of their own are decoded together."""
        if self._run or self._prompt_pending or any([self._vocabulary[token] is not None for token in tokens]):
            return "".join([self.push(token) for token in tokens])
        return self._push_text(tokens)

    def _push_text(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        start = self._num_final
        final = self._decode_window()[start : self._num_final]
        if len(self._window) >= self._max_window:
            # Decoders that strip all spaces would strip the next token's too, if no text precedes it.
            context = self._window[-CONTEXT:]
            self._restart(context if self._decode(context) else self._window)
        return final

    def _run_text(self, unfinished: str) -> str:
        """The text of the run of bytes: characters if all of them are valid UTF-8, else `unfinished` for each byte."""
        try:
            return self._run.decode()[int(self._first_is_stripped) :]
        except UnicodeDecodeError:
            return unfinished * len(self._run)

    def _decode_window(self) -> str:
        """The window's text, of which the last characters are held while they are unfinished."""
        text = self._decode(self._window)
        held = min(self._max_held, len(text) - len(text.rstrip(REPLACEMENT)))
        self._num_final = len(text) - held
        self._held = text[self._num_final :]
        return text

    def _restart(self, window: list[int]) -> None:
        self._window = window
        self._max_window = max(2 * CONTEXT, 2 * len(window))
        self._decode_window()

    def _beyond_prompt(self, text: str) -> str:
        return text[num_shared(text, self._prompt_pending) :]


class TextStream:
    """The output of one request as ids and as text, fed one committed token at a time.

    The text continues the prompt, as in vLLM and TGI: it is what `tokenizer.decode` (special tokens skipped unless
    `params.skip_special_tokens` is false, no clean-up of spaces) shows of prompt and output beyond what it shows of
    the prompt:

        whole = decode(prompt_ids + token_ids); text == whole[num_shared(decode(prompt_ids), whole):]

    cut right before the first stop string. What they share is all of `decode(prompt_ids)` unless the prompt ends inside
    a character or a run of bytes that the output changes. For byte-level tokenizers (GPT-2, Llama-3, Qwen) the text
    equals `decode(token_ids)` but for that; with SentencePiece ones (Llama-2, Mistral) `decode(token_ids)` would lose
    the space between prompt and output. An empty prompt, or one of special tokens only, gives `decode(token_ids)`.

    An end-of-text token finishes with "stop" first, then a stop string with "stop", then `max_new_tokens` with
    "length". Only generated text is searched for stop strings, and characters that are still unfinished (shown as
    U+FFFD) only when the output ends there.
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
        self.num_tokens = 0  # ids pushed
        self._is_closed = False
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_ids = self._eos_ids | set(params.stop_token_ids)  # ids that end the output, with "stop"
        self.stop_reason: int | str | None = None
        """The stop string, or the id of `stop_token_ids` that is no end of text, that ended the output."""
        skip = params.skip_special_tokens
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, prompt_ids, skip)
        self._unread: deque[tuple[int, bool, bool]] = deque()
        """Tokens pushed and not decoded: the id, whether it ends the text, and whether it is the last one."""
        # The final text in order: taken chunks, chunks to be taken, and the suffix that may become a stop string.
        self._taken: list[str] = []
        self._safe: list[str] = []
        self._suffix = ""
        self._search = StopSearch(params.stop)

    @property
    def text(self) -> str:
        """The complete text so far, also what `take` still holds back; joined at each call."""
        self._read()
        pending = self._decoder.pending if self._decoder and not self._is_closed else ""
        return "".join([*self._taken, *self._safe, self._suffix, pending])

    @property
    def taken(self) -> str:
        """The text that `take` has given so far; joined at each call."""
        return "".join(self._taken)

    def push(self, token: int) -> str | None:
        """Feed the next committed token; returns "stop" or "length" if it ends the output, else None.

        The last token belongs to the output: also an end-of-text id, as in `transformers.generate`, although the text
        never shows it, and the token that completed a stop string.
        """
        if self._is_closed:
            raise RuntimeError(f"token {token} pushed after the output ended")
        self.num_tokens += 1
        is_eos = token in self.stop_ids
        is_last = is_eos or self.num_tokens == self._params.max_new_tokens
        if self._decoder:
            self._unread.append((token, is_eos, is_last))
        # Only stop strings need the text: without them decoding is deferred to `take`, or until the device is busy.
        found_stop = bool(self._params.stop) and self._read()
        self._is_closed = is_last or found_stop
        if is_eos:
            self.stop_reason = None if token in self._eos_ids else token
        return "stop" if is_eos or found_stop else "length" if is_last else None

    def extend(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Push a step's tokens up to the one that ends the output; returns their number, and the reason as `push`."""
        simple = 0
        if not self._params.stop and not self._is_closed:  # the tokens before the one that may end the output
            simple = max(0, min(len(tokens), self._params.max_new_tokens - self.num_tokens - 1))
            if not self.stop_ids.isdisjoint(tokens[:simple]):
                simple = next(place for place, token in enumerate(tokens) if token in self.stop_ids)
            self.num_tokens += simple
            if self._decoder:
                self._unread.extend([(token, False, False) for token in tokens[:simple]])
        for taken, token in enumerate(tokens[simple:], simple + 1):
            reason = self.push(token)
            if reason is not None:
                return taken, reason
        return len(tokens), None

    def abandon(self) -> None:
        """End the output after the text that was taken; tokens that are not decoded get no text."""
        self._unread.clear()
        self._safe.clear()
        self._suffix, self._decoder, self._is_closed = "", None, True

    def close(self) -> None:
        """End the output here, for a reason outside it."""
        self._read()
        if not self._is_closed:
            self._safe.append(self._suffix + (self._decoder.pending if self._decoder else ""))
            self._suffix = ""
            self._is_closed = True

    def take(self, num_tokens: int | None = None) -> str:
        """The text that became final since the last call; after the output's end, all the rest.

        With `num_tokens`, at most that many of the newly pushed tokens are decoded. The concatenated results are the
        final `text`.
        """
        self._read(num_tokens)
        chunk, self._safe = "".join(self._safe), []
        if chunk:
            self._taken.append(chunk)
        return chunk

    def _read(self, num_tokens: int | None = None) -> bool:
        """Decode pushed tokens, at most `num_tokens`; True if a stop string is among them."""
        found_stop, count = False, len(self._unread) if num_tokens is None else min(num_tokens, len(self._unread))
        together = 0 if self._params.stop or not count else count - self._unread[count - 1][2]
        if together > 1 and self._decoder is not None:  # none of these tokens ends the text
            final = self._decoder.extend([self._unread.popleft()[0] for _ in range(together)])
            self._append(final, self._decoder.readable, False)
            count -= together
        for _ in range(count):
            assert self._decoder is not None
            token, is_eos, is_last = self._unread.popleft()
            final = "" if is_eos else self._decoder.push(token)
            found_stop |= self._append(final, self._decoder.pending if is_last else self._decoder.readable, is_last)
        return found_stop

    def _append(self, final: str, pending: str, is_last: bool) -> bool:
        """Append final text, search it and the pending text for stop strings, and hold back what may become one.

        True if a stop string is found; then, and after the last token, no text is held back.
        """
        found = self._search.find(final, pending)
        visible = self._suffix + final + pending
        if found is not None or is_last:
            cut = len(visible)
            if found is not None:
                cut, self.stop_reason = len(self._suffix) + found[0], found[1]
            self._safe.append(visible[:cut])
            self._suffix = ""
            return found is not None
        if final:
            text = self._suffix + final
            num_safe = len(text) - self._search.num_possible
            self._safe.append(text[:num_safe])
            self._suffix = text[num_safe:]
        return False
