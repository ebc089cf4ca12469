"""Grammar-constrained decoding with llguidance: a JSON schema, a regular expression or a context-free grammar.

The processor is a function of its arguments: it rolls back to where a path leaves the last one.
"""

import ctypes
import resource
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lpr.config import InputError
from lpr.core.grammar import matcher
from lpr.model.transfer import to_device

MOST_KEPT, MOST_BYTES = 64, 256 << 20
"""Most cached compiled grammars, and their bytes: the choices of a request share a grammar, and clients send the same
one again."""
BYTES_PER_SECOND = 64 << 20
"""Lower bound of a grammar's memory, per second of its compilation: the growth of the process misses memory that reuses
freed blocks. `multipleOf` with a large number takes 0.4 s and 23 MB."""


class Compiler:
    """Compiles grammars in a thread while steps run: llguidance releases the GIL.

    It holds llguidance's form of a tokenizer, which takes seconds to build for a large vocabulary.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._known: Any = None
        self._compiled: OrderedDict[str, Future[tuple[Any, int]]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")

    def begin(self, grammar: str) -> Future[tuple[Any, int]]:
        """Compile a grammar, unless it is cached; the result is its matcher and its size in bytes."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > 1 and (len(self._compiled) > MOST_KEPT or self._num_bytes() > MOST_BYTES):
            self._compiled.popitem(last=False)
        return self._compiled[grammar]

    def _num_bytes(self) -> int:
        done = [each for each in self._compiled.values() if each.done()]
        return sum(each.result()[1] for each in done if each.exception() is None)

    def matcher(self, grammar: str) -> Any:
        return self.begin(grammar).result()[0].deep_copy()

    def _compile(self, grammar: str) -> tuple[Any, int]:
        if self._known is None:
            import llguidance.hf

            self._known = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocab_size)
        with suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
        before, began = memory_used(), time.thread_time()
        found = matcher(self._known, grammar)
        least = int((time.thread_time() - began) * BYTES_PER_SECOND)
        return found, max(len(grammar), least, memory_used() - before)


def memory_used() -> int:
    """Resident bytes of this process; 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


_compilers: WeakKeyDictionary[Any, dict[int, Compiler]] = WeakKeyDictionary()  # by tokenizer and size of the vocabulary


def compiler_of(tokenizer: Any, vocab_size: int) -> Compiler:
    """The compiler of a tokenizer for a model with this vocabulary."""
    known = _compilers.setdefault(tokenizer, {})
    if vocab_size not in known:
        known[vocab_size] = Compiler(tokenizer, vocab_size)
    return known[vocab_size]


def begin(grammar: str, tokenizer: Any | None, vocab_size: int) -> Future[tuple[Any, int]] | None:
    """Compile a grammar before a request needs it, which reports errors; None if grammars are not supported here."""
    if tokenizer is None or find_spec("llguidance") is None:
        return None
    return compiler_of(tokenizer, vocab_size).begin(grammar)


@lru_cache(MOST_KEPT)
def _problem(grammar: str) -> str:
    """The reason why a grammar is invalid; "" if it is valid."""
    import llguidance

    found: str = llguidance.LLMatcher.validate_grammar(grammar)
    return found.strip().splitlines()[0] if found else ""


class Grammar:
    """A logits processor that allows only tokens with which the output can still match a grammar."""

    def __init__(self, grammar: str, num_prompt: int, tokenizer: Any) -> None:
        """Constrain the output after the first `num_prompt` tokens to `grammar`, in llguidance's JSON form.

        Raises InputError if llguidance is not installed, the grammar is invalid, or there is no tokenizer.
        """
        if find_spec("llguidance") is None:
            raise InputError("grammars need the package llguidance: pip install 'lpr[grammar]'")
        if tokenizer is None:
            raise InputError("grammar needs a tokenizer, and this model was loaded without one")
        if problem := _problem(grammar):
            raise InputError(f"grammar: {problem}")
        self._grammar, self._num_prompt, self._tokenizer = grammar, num_prompt, tokenizer
        for compiler in _compilers.get(tokenizer, {}).values():  # while the request waits and its prompt is evaluated
            compiler.begin(grammar)
        self._matcher: Any = None
        self._path: list[int] = []
        self._mask: np.ndarray = np.empty(0, np.int32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores [1, V] after a path [1, L]: -inf for tokens that the grammar forbids."""
        try:
            self._fill(input_ids[0, self._num_prompt :].tolist(), scores.shape[1])
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # a Rust panic ends the request, not the rank
            raise RuntimeError(f"llguidance has failed: {failure}") from failure
        bits = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")[: scores.shape[1]]
        allowed = to_device(bits.astype(bool), scores.device)
        return scores.masked_fill(~allowed[None], float("-inf"))

    def _fill(self, path: list[int], vocab_size: int) -> None:
        """Set the mask of the tokens that may follow `path`."""
        import llguidance.numpy

        if self._matcher is None:
            self._matcher = compiler_of(self._tokenizer, vocab_size).matcher(self._grammar)
            self._mask = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._follow(path)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot go on: {self._matcher.get_error()}")

    def _follow(self, path: list[int]) -> None:
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._matcher.rollback(len(self._path) - shared)
        self._path = path[:shared]
        for token in path[shared:]:
            # Behind a text that nothing can follow only its end is allowed, which llguidance does not take.
            if self._matcher.is_stopped() and self._allows(token):
                break
            if not self._matcher.consume_token(token):
                raise ValueError(f"the output left its grammar: {self._matcher.get_error()}")
            self._path.append(token)

    def _allows(self, token: int) -> bool:
        import llguidance.numpy

        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        return bool(self._mask[0, token // 32] >> token % 32 & 1)
