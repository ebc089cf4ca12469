"""The jobs of rank 0: complete the lines of a file, or show one prompt."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lpr.cli.display import Run, comparison_table, show_stream
from lpr.cli.jsonl import OrderedWriter, PromptLine
from lpr.cli.trace import traced
from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.core.suffix_index import as_learnt
from lpr.engine.engine import Engine
from lpr.engine.request import Completion, Request
from lpr.engine.stats import DecodeStats
from lpr.engine.trie_file import check_writable, read_trie, trie_path

DEMO_PROMPT = '''\
class Account:
    """A bank account with a balance."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        """Add amount to the balance."""
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        """Subtract amount from the balance."""
'''
# Sampled, because the small bundled model soon repeats itself in greedy decoding. With this seed it completes the
# method, writes another one and ends.
DEMO_SAMPLING = {"max_new_tokens": 200, "temperature": 0.6, "seed": 5}
"""Default sampling parameters of the built-in prompt."""


def check_trie(path: Path | None) -> None:
    """Raise InputError for a trie that cannot be read or written, before the model is loaded."""
    if path is not None:
        if trie_path(path).exists():
            read_trie(path)
        check_writable(path)


@dataclass(frozen=True)
class Keeping:
    """The files of a job besides its prompts and output."""

    trie: Path | None = None  # trie to draft from, and to save at the end
    trace: Path | None = None  # HTML page that shows the steps
    trace_steps: int = 0

    @contextmanager
    def around(self, engine: Engine, loads: bool = True) -> Iterator[None]:
        """Context: loads the trie and records steps; writes both at the end, also of an interrupted run.

        The trie is not saved after a lost rank: the restarted job learns again from its output file, so that it drafts
        like an uninterrupted one. With `loads` False the engine has loaded the trie already.
        """
        if loads and self.trie is not None and trie_path(self.trie).exists():
            engine.load_trie(self.trie)
        try:
            with traced(self.trace, self.trace_steps, engine):
                yield
        except KeyboardInterrupt:
            self._save(engine)
            raise
        self._save(engine)

    def _save(self, engine: Engine) -> None:
        if self.trie is not None:
            engine.save_trie(self.trie)


@dataclass
class FileJob:
    """Complete every line of a prompts file into an output file."""

    writer: OrderedWriter
    sampling: SamplingParams
    facts: dict[str, Any]  # facts of the job that each record includes
    keeping: Keeping
    as_json: bool
    adapter: str | None = None  # the adapter of lines that name none
    takes_over: bool = False
    """True if the engine has the trie and the finished lines, because its rank ran when the driver was lost."""

    def __post_init__(self) -> None:
        self.lines = self.writer.lines
        self.console = Console(stderr=True)
        self.total = DecodeStats()
        self.num_bad = sum("error" in record for record in self.writer.kept)

    def run(self, engine: Engine) -> int:
        """Complete the lines without a record in the output; 2 if any line failed, else 0."""
        with self.writer, self.keeping.around(engine, loads=not self.takes_over):
            self._complete(engine)
        return 2 if self.num_bad else 0

    def _complete(self, engine: Engine) -> None:
        if not self.takes_over:
            # With these, a restarted job drafts like an uninterrupted one.
            finished = [record for record in self.writer.kept if record.get("token_ids")]
            engine.learn(*[as_learnt(engine.encode(each["prompt"]), each["token_ids"]) for each in finished])
        # Request ids are line numbers, so that a rank that replaces a lost driver can map them to lines.
        undone = [line for line in self.lines if line.number not in self.writer.done]
        submitted = {engine.requests[line.number]: line for line in undone if line.number in engine.requests}
        left = deque(line for line in undone if line.number not in engine.requests)
        kept = len(self.writer.done)
        began = time.perf_counter()
        speed = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("completing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), speed)
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task("", total=len(self.lines), completed=kept, rate="")
            while left or submitted:
                # One more request than slots, so that a free slot has its next prompt at once.
                while left and len(submitted) <= engine.scheduler.capacity:
                    self._submit(engine, left.popleft(), submitted)
                for request in engine.step():
                    if request.finish_reason is not None:
                        self._finish(request, submitted.pop(request))
                rate = f"{self.total.tokens_per_step:.2f} tokens/step" if self.total.num_steps else ""
                progress.update(bar, completed=len(self.writer.done), rate=rate)
        self._report(engine, kept, time.perf_counter() - began)

    def _submit(self, engine: Engine, line: PromptLine, submitted: dict[Request, PromptLine]) -> None:
        try:
            if line.error is not None:
                raise InputError(line.error)
            params = replace(self.sampling, **line.sampling)
            adapter = line.model if line.model in engine.adapters else self.adapter
            known = {"id": line.number, "prediction": line.prediction, "adapter": adapter}
            submitted[engine.submit(line.prompt, params, **known)] = line
        except InputError as failure:
            message = str(failure) if line.error else f"line {line.number}: {failure}"
            self._complain(message)
            self._write(line, {"finish_reason": "error", "error": message})

    def _complain(self, message: str) -> None:
        self.num_bad += 1
        self.console.print(f"lpr.generate: {message}", markup=False, highlight=False, soft_wrap=True)

    def _write(self, line: PromptLine, record: dict[str, Any]) -> None:
        self.writer.write(line.number, {**line.extra, "line": line.number, "prompt": line.prompt, **record})

    def _finish(self, request: Request, line: PromptLine) -> None:
        done = request.completion()
        self.total.add(done.stats)
        record = {
            **_record(done),
            "num_steps": done.stats.num_steps,
            "tokens_per_step": round(done.stats.tokens_per_step, 4),
            **self.facts,
            **_logprobs(done),
        }
        if done.error is not None:
            record["error"] = done.error
            self._complain(f"line {line.number}: {done.error}")
        self._write(line, record)

    def _report(self, engine: Engine, kept: int, seconds: float) -> None:
        total, completed = self.total, len(self.lines) - self.num_bad
        record = {
            "prompts": len(self.lines),
            "completed": completed,
            "kept_from_earlier_attempt": kept,
            "num_tokens": total.num_tokens,
            "num_steps": total.num_steps,
            "tokens_per_step": round(total.tokens_per_step, 4),
            "seconds": round(seconds, 3),
            **self.facts,
            "payload_bytes_per_step": engine.payload_bytes,
            "sources": {name: vars(count) for name, count in total.sources.items()},
        }
        if self.as_json:
            print(json.dumps(record))
            return
        failed = f", {self.num_bad} lines could not be completed" if self.num_bad else ""
        self.console.print(
            f"{completed} of {len(self.lines)} prompts, {total.num_tokens} tokens in {total.num_steps} steps "
            f"({total.tokens_per_step:.2f} tokens/step), {seconds:.1f} s{failed}", highlight=False, soft_wrap=True,
        )  # fmt: skip


@dataclass
class ShowJob:
    """Complete one prompt on the console, then compare with plain decoding."""

    prompt: str
    params: SamplingParams
    decode: DecodeConfig
    keeping: Keeping
    as_json: bool
    adapter: str | None = None

    def run(self, engine: Engine) -> int:
        """Stream with lookahead, decode plainly, print the table."""
        self.console = Console(quiet=self.as_json)
        show = partial(show_stream, self.console, self.prompt)
        ahead = self._timed("lookahead", engine, self.decode, self.keeping, show)
        alone = replace(self.decode, window_size=0, guess_set_size=0, trie_nodes=0, first_token_ms=0, per_token_ms=0)
        plain = self._timed("autoregressive", engine, alone, Keeping(), list)
        for _, done in (ahead, plain):
            if done.error is not None:
                raise InputError(done.error)
        ahead[0].equal = ahead[1].token_ids == plain[1].token_ids
        self._report(engine, [plain[0], ahead[0]], ahead[1])
        return 0

    def _timed(
        self,
        name: str, engine: Engine, decode: DecodeConfig, keeping: Keeping,
        show: Callable[[Iterable[tuple[str, int]]], object],
    ) -> tuple[Run, Completion]:  # fmt: skip
        """Complete the prompt once, after a few tokens as a warm-up; `show` gets the text as it is committed."""
        engine.configure(decode)
        few = min(4, self.params.max_new_tokens)
        engine.generate([self.prompt], replace(self.params, max_new_tokens=few, min_new_tokens=0), adapter=self.adapter)
        engine.configure(decode)
        with keeping.around(engine):
            began = time.perf_counter()
            request = engine.submit(self.prompt, self.params, adapter=self.adapter)
            show(_pieces(engine, request))
            done = request.completion()
        return Run(name, done.stats.num_steps, done.stats.num_tokens, time.perf_counter() - began, None), done

    def _report(self, engine: Engine, runs: Sequence[Run], done: Completion) -> None:
        params, lp, tp = self.params, engine.comm.size, engine.comm.tp_size
        how = f"temperature {params.temperature}, seed {params.seed}" if params.temperature else "greedy"
        ranks = f"{lp * tp} ranks" if lp * tp > 1 else "1 process"
        ranks += f" (lp {lp} x tp {tp})" if tp > 1 else ""
        self.console.print()
        self.console.print(comparison_table(f"{how}, {ranks} on {engine.model.device}", runs))
        if self.as_json:
            record = {
                "prompt": self.prompt,
                **_record(done),
                **_logprobs(done),
                "runs": [{**vars(run), "tokens_per_step": round(run.tokens_per_step, 4)} for run in reversed(runs)],
                "sources": {name: vars(count) for name, count in done.stats.sources.items()},
            }
            print(json.dumps(record))


def _record(done: Completion) -> dict[str, Any]:
    return {"text": done.text, "token_ids": done.token_ids, "finish_reason": done.finish_reason}


def _logprobs(done: Completion) -> dict[str, Any]:
    if done.logprobs is None:
        return {}
    return {"logprobs": [{"logprob": each.logprob, "top": [*each.top]} for each in done.logprobs]}


def _pieces(engine: Engine, request: Request) -> Iterator[tuple[str, int]]:
    """Text that each step makes final, and the number of its tokens."""
    while request.finish_reason is None:
        engine.step()
        yield from ((chunk.text, len(chunk.token_ids)) for chunk in request.take())
