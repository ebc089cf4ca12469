"""`python -m lpr.generate`, alone or under torchrun: complete prompts from a file, or show what lpr does."""

from __future__ import annotations

import gc
import json
import sys
import time
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lpr.cli.display import Run, comparison_table, show_stream
from lpr.cli.jsonl import OrderedWriter, PromptLine, read_prompts
from lpr.cli.trace import check_trace, traced
from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, CommError, agree
from lpr.dist.runtime import World, join
from lpr.engine.engine import Engine
from lpr.engine.exchange import DesyncError
from lpr.engine.lead import Leader, follow
from lpr.engine.request import Completion, Request
from lpr.engine.stats import DecodeStats
from lpr.engine.trie_file import check_writable, read_trie, trie_path
from lpr.model.loader import bundled_model, digest

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
_RANK_0_SPEAKS = 10.0
"""Seconds that the other ranks stay after bad input; the launcher ends them as soon as rank 0 has left."""
# Sampled, because the small bundled model soon repeats itself when it is greedy.
DEMO_PARAMS = SamplingParams(max_new_tokens=200, temperature=0.6)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Complete prompts with lookahead-parallel decoding: the tokens of plain decoding, in fewer steps.

    Without --prompts and --prompt, completes a built-in code prompt and compares with plain decoding.
    """

    model: str | None = None
    """Model folder or hub id. Default: the small code model that comes with lpr."""
    prompts: Path | None = None
    """JSONL file with a "prompt" per line."""
    output: Path | None = None
    """JSONL file for the completions, in the order of the prompts."""
    prompt: str | None = None
    """Complete this text and show it, instead of a file."""
    trie: Path | None = None
    """Folder or .safetensors file: draft from what earlier runs wrote, and keep what this one writes."""
    trace: Path | None = None
    """HTML file that shows every step: its token tree, what each rank evaluated, what was accepted."""
    trace_steps: int = 500
    """Steps that --trace shows at most, the first ones; a request's part in a step counts as one."""
    costs: Path | None = None
    """JSON table of step times to size trees by, instead of measured ones: makes the steps of a run repeatable."""
    config: Path | None = None
    """TOML file with values for any of these flags; flags given here win."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON line to stdout instead of text and tables."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's own on a GPU, float32 on a CPU."""
    device: str | None = None
    """cpu, cuda or cuda:N. Default: a GPU if there is one."""
    tp: int = 1
    """Ranks that share one replica of the model (tensor parallel); neighbours, so that they share a machine."""
    lp: int | None = None
    """Replicas (lookahead parallel). Default: as many as the ranks make; lp times tp must be their number."""
    tp_backend: Literal["transformers", "deepspeed"] = "transformers"
    """Who splits the model: transformers by its own plan, or deepspeed, also where there is no plan."""
    graphs: bool = True
    """Replay the steps of a GPU as CUDA graphs."""
    compile: bool = False
    """Let torch.compile fuse operators of these steps; starting takes a minute longer."""
    timeout: float = 300.0
    """Seconds that a rank waits for the others before it gives up."""
    sampling: Annotated[SamplingParams, tyro.conf.OmitArgPrefixes] = SamplingParams()
    decode: Annotated[DecodeConfig, tyro.conf.OmitArgPrefixes] = DecodeConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 (a rank was lost), 2 (bad input) or 130 (interrupted)."""
    world = World(0, 1, 0, 0, False)
    try:
        world = World.from_environment()
        args = parse(sys.argv[1:] if argv is None else argv, quiet=world.rank != 0)
        return run(args, world)
    except InputError as failure:
        if world.rank == 0:
            print(f"lpr.generate: error: {failure}", file=sys.stderr)
        elif world.launched:
            time.sleep(_RANK_0_SPEAKS)  # the first rank to leave ends the job, and rank 0 has to say why before that
        return 2
    except (CommError, DesyncError) as failure:
        print(f"lpr.generate: rank {world.rank}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if world.rank == 0:
            print("lpr.generate: interrupted; what was finished is written", file=sys.stderr)
        return 130
    except SystemExit as leaving:  # the argument parser has said why
        return int(leaving.code or 0)


def parse(argv: Sequence[str], quiet: bool = False) -> Args:
    """Arguments from `argv` over those of its `--config` file; raises InputError or SystemExit."""
    default = Args()
    for index, word in enumerate(argv):
        if word == "--config" and index + 1 < len(argv):
            default = read_config(Path(argv[index + 1]))
        elif word.startswith("--config="):
            default = read_config(Path(word.removeprefix("--config=")))
    args = tyro.cli(Args, prog="lpr.generate", args=list(argv), default=default, console_outputs=not quiet)
    if args.prompts is not None and args.output is None:
        raise InputError("--prompts needs --output FILE.jsonl for the completions")
    if args.output is not None and args.prompts is None:
        raise InputError("--output needs --prompts FILE.jsonl")
    if args.prompts is not None and args.output is not None and args.prompts.resolve() == args.output.resolve():
        raise InputError(f"--prompts and --output are the same file, {args.output}: the prompts would be lost")
    if args.prompts is not None and args.prompt is not None:
        raise InputError("give either --prompts FILE.jsonl or --prompt TEXT")
    for name in ("prompts", "output"):
        other = getattr(args, name)
        if args.trace is not None and other is not None and args.trace.resolve() == other.resolve():
            raise InputError(f"--trace and --{name} are the same file, {args.trace}: give the trace one of its own")
    if args.trace_steps < 1:
        raise InputError(f"--trace-steps {args.trace_steps} must be at least 1")
    return args


def read_config(path: Path) -> Args:
    """The arguments that a TOML file sets; its keys are the flags' names with underscores."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise InputError(f"cannot read --config {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:
        raise InputError(f"--config {path} is not TOML: {failure}") from failure
    groups: dict[str, dict[str, Any]] = {"": {}, "sampling": {}, "decode": {}}
    homes = {field.name: "" for field in fields(Args) if field.name not in ("sampling", "decode", "config")}
    homes |= {field.name: "sampling" for field in fields(SamplingParams)}
    homes |= {field.name: "decode" for field in fields(DecodeConfig)}
    if "mesh" in values:
        values = _mesh_sizes(path, values)
    for name, value in values.items():
        if name not in homes:
            raise InputError(f"--config {path}: unknown key {name!r}; keys are flags with underscores")
        groups[homes[name]][name] = Path(value) if name in ("prompts", "output", "trie", "trace", "costs") else value
    try:
        return Args(
            **groups[""], sampling=SamplingParams(**groups["sampling"]), decode=DecodeConfig(**groups["decode"])
        )
    except (InputError, TypeError) as failure:
        raise InputError(f"--config {path}: {failure}") from failure


def _mesh_sizes(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a TOML file with `mesh = { lp = 4, tp = 2 }` in place of the two flags."""
    others = {name: value for name, value in values.items() if name != "mesh"}
    mesh = values["mesh"]
    if not isinstance(mesh, dict) or set(mesh) != {"lp", "tp"} or not all(type(n) is int for n in mesh.values()):
        raise InputError(f"--config {path}: mesh must be like {{ lp = 4, tp = 2 }}, not {mesh!r}")
    if twice := sorted(set(mesh) & set(others)):
        raise InputError(f"--config {path}: {twice[0]} is given twice, in mesh and by itself")
    return {**others, **mesh}


def run(args: Args, world: World) -> int:
    """Join the world, load the same engine on every rank, and let rank 0 lead."""
    world.mesh_shape(args.tp, args.lp)
    device = world.device(args.device)
    with join(world, device, args.timeout, args.tp) as comm:
        engine, job = prepare(args, world, device, comm)
        if job is None:
            follow(engine)
            return 0
        leader = Leader(engine)
        try:
            with job:
                code = job.run(leader)
        except InputError:
            leader.close()  # the other ranks have nothing to complain of
            raise
        leader.close()
        return code


def prepare(args: Args, world: World, device: str | None, comm: Comm) -> tuple[Engine, FileJob | ShowJob | None]:
    """This rank's engine and, on rank 0, its job; raises the same InputError on every rank if anything is wrong."""
    job: FileJob | ShowJob | None = None
    failure = None
    try:
        if world.rank == 0:
            check_trie(args.trie)
            check_trace(args.trace)
            job = FileJob(args, world) if args.prompts is not None else ShowJob(args)
    except InputError as error:
        failure = str(error)
    agree(comm, failure, {"set of arguments": digest(repr(args))})
    costs = None
    try:
        costs = read_costs(args.costs) if args.costs is not None else None
    except InputError as error:
        failure = str(error)
    agree(comm, failure, {"table of step times": digest(json.dumps(costs.to_json()) if costs is not None else "")})
    model = args.model or bundled_model()
    engine = Engine.from_pretrained(
        model, args.decode, args.dtype, device, comm, costs, graphs=args.graphs, tp_backend=args.tp_backend
    )
    if world.rank == 0 and engine.model.graph_reason is not None:
        reason = engine.model.graph_reason
        print(f"lpr.generate: steps run without CUDA graphs, which is slower: {reason}", file=sys.stderr)
    # What is loaded stays: without this, each full collection walks a million objects, in the middle of some step.
    gc.freeze()
    return engine, job


def read_costs(path: Path) -> StepTimes:
    """The table of step times in a file; raises InputError."""
    try:
        return StepTimes.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as failure:
        raise InputError(f"cannot read --costs {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:
        raise InputError(f"--costs {path}: {failure}") from failure


def check_trie(path: Path | None) -> None:
    """Refuse a trie that cannot be read or kept, before the model is loaded; raises InputError."""
    if path is not None:
        if trie_path(path).exists():
            read_trie(path)
        check_writable(path)


@contextmanager
def kept_trie(path: Path | None, leader: Leader) -> Iterator[None]:
    """Let all ranks draft from the trie at `path`, and save it at the end, also of an interrupted run.

    Not after a lost rank: the restarted job learns again from its output file, and drafts as an undisturbed one.
    """
    if path is None:
        yield
        return
    if trie_path(path).exists():
        leader.load_trie(path)
    try:
        yield
    except KeyboardInterrupt:
        leader.engine.save_trie(path)
        raise
    leader.engine.save_trie(path)


class FileJob:
    """Complete every line of a prompts file into an output file."""

    def __init__(self, args: Args, world: World) -> None:
        """Read the prompts and open the output; raises InputError. After a restart, finished lines are kept."""
        assert args.prompts is not None and args.output is not None
        self.args = args
        self.world = world
        self.mesh = dict(zip(("lp", "tp"), world.mesh_shape(args.tp), strict=True))
        self.lines = read_prompts(args.prompts)
        self.writer = OrderedWriter(args.output, self.lines, resume=world.attempt > 0)
        self.console = Console(stderr=True)
        self.total = DecodeStats()
        self.num_bad = sum("error" in record for record in self.writer.kept)

    def __enter__(self) -> Self:
        self.writer.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self.writer.__exit__(*failure)

    def run(self, leader: Leader) -> int:
        """Complete the lines that are not done yet; 2 if some line could not be, else 0."""
        with kept_trie(self.args.trie, leader), traced(self.args.trace, self.args.trace_steps, leader.engine):
            self._complete(leader)
        return 2 if self.num_bad else 0

    def _complete(self, leader: Leader) -> None:
        if self.writer.kept:  # the drafts of a restarted job are those of an undisturbed one
            leader.learn([record.get("token_ids", []) for record in self.writer.kept])
        todo = deque(line for line in self.lines if line.number not in self.writer.done)
        kept = len(self.lines) - len(todo)
        flying: dict[Request, PromptLine] = {}
        began = time.perf_counter()
        columns = (
            TextColumn("completing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )  # fmt: skip
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task("", total=len(self.lines), completed=kept, rate="")
            while todo or leader.busy:
                # One more than the slots, so that a freed slot never waits for its next prompt.
                while todo and len(flying) <= self.args.decode.max_batch_size:
                    self._submit(leader, todo.popleft(), flying)
                for chunk in leader.step():
                    if chunk.finish_reason is not None:
                        self._finish(chunk.request, flying.pop(chunk.request))
                rate = f"{self.total.tokens_per_step:.2f} tokens/step" if self.total.num_steps else ""
                progress.update(bar, completed=len(self.writer.done), rate=rate)
        self._report(leader, kept, time.perf_counter() - began)

    def _submit(self, leader: Leader, line: PromptLine, flying: dict[Request, PromptLine]) -> None:
        try:
            if line.error is not None:
                raise InputError(line.error)
            flying[leader.submit(line.prompt, self.args.sampling)] = line
        except InputError as failure:
            message = str(failure) if line.error else f"line {line.number}: {failure}"
            self._complain(message)
            self.writer.write(line.number, {"line": line.number, "prompt": line.prompt, "error": message})

    def _complain(self, message: str) -> None:
        self.num_bad += 1
        self.console.print(f"lpr.generate: {message}", markup=False, highlight=False, soft_wrap=True)

    def _finish(self, request: Request, line: PromptLine) -> None:
        done = request.completion()
        self.total.add(done.stats)
        failed = {}
        if done.error is not None:
            failed = {"error": done.error}
            self._complain(f"line {line.number}: {done.error}")
        self.writer.write(
            line.number,
            {
                **line.extra,
                "line": line.number,
                "prompt": line.prompt,
                "text": done.text,
                "token_ids": done.token_ids,
                "finish_reason": done.finish_reason,
                "num_steps": done.stats.num_steps,
                "tokens_per_step": round(done.stats.tokens_per_step, 4),
                "world_size": self.world.size,
                "mesh": self.mesh,
                **failed,
            },
        )

    def _report(self, leader: Leader, kept: int, seconds: float) -> None:
        total = self.total
        record = {
            "prompts": len(self.lines),
            "completed": len(self.lines) - self.num_bad,
            "kept_from_earlier_attempt": kept,
            "num_tokens": total.num_tokens,
            "num_steps": total.num_steps,
            "tokens_per_step": round(total.tokens_per_step, 4),
            "seconds": round(seconds, 3),
            "world_size": self.world.size,
            "mesh": self.mesh,
            "payload_bytes_per_step": leader.engine.payload_bytes,
            "sources": {name: vars(count) for name, count in total.sources.items()},
        }
        if self.args.json:
            print(json.dumps(record))
            return
        failed = f", {self.num_bad} lines could not be completed" if self.num_bad else ""
        self.console.print(
            f"{record['completed']} of {len(self.lines)} prompts, {total.num_tokens} tokens in {total.num_steps} steps "
            f"({total.tokens_per_step:.2f} tokens/step), {seconds:.1f} s{failed}",
            highlight=False,
            soft_wrap=True,
        )


class ShowJob:
    """Complete one prompt before the reader's eyes, then compare with plain decoding."""

    def __init__(self, args: Args) -> None:
        """Show the prompt of `args`, or the built-in one."""
        self.args = args
        self.prompt = DEMO_PROMPT if args.prompt is None else args.prompt
        self.params = args.sampling
        if args.prompt is None and self.params == SamplingParams():
            self.params = DEMO_PARAMS
        self.console = Console(quiet=args.json)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def run(self, leader: Leader) -> int:
        """Stream with lookahead, decode plainly, print the table."""
        settings = {"lookahead": self.args.decode, "autoregressive": DecodeConfig.autoregressive()}
        runs: list[Run] = []
        completions: list[Completion] = []
        for name, decode in settings.items():
            leader.configure(decode)
            self._complete(leader, replace(self.params, max_new_tokens=min(4, self.params.max_new_tokens)))  # warm-up
            leader.configure(decode)
            trie, trace = (None, None) if runs else (self.args.trie, self.args.trace)
            with kept_trie(trie, leader), traced(trace, self.args.trace_steps, leader.engine):
                began = time.perf_counter()
                if not runs:
                    request = leader.submit(self.prompt, self.params)
                    show_stream(self.console, self.prompt, self._pieces(leader, request))
                    done = request.completion()
                else:
                    done = self._complete(leader, self.params)
            runs.append(Run(name, done.stats.num_steps, done.stats.num_tokens, time.perf_counter() - began, None))
            completions.append(done)
        for done in completions:
            if done.error is not None:
                raise InputError(done.error)
        runs[0].equal = completions[0].token_ids == completions[1].token_ids
        self._report(leader, runs, completions[0])
        return 0

    def _complete(self, leader: Leader, params: SamplingParams) -> Completion:
        request = leader.submit(self.prompt, params)
        for _ in self._pieces(leader, request):
            pass
        return request.completion()

    def _pieces(self, leader: Leader, request: Request) -> Iterator[tuple[str, int]]:
        while request.finish_reason is None:
            for chunk in leader.step():
                yield chunk.text, len(chunk.token_ids)

    def _report(self, leader: Leader, runs: list[Run], done: Completion) -> None:
        engine, params = leader.engine, self.params
        how = f"temperature {params.temperature}, seed {params.seed}" if params.temperature else "greedy"
        lp, tp = engine.comm.size, engine.comm.tp_size
        ranks = f"{lp * tp} ranks" if lp * tp > 1 else "1 process"
        if tp > 1:
            ranks += f" (lp {lp} x tp {tp})"
        self.console.print()
        self.console.print(comparison_table(f"{how}, {ranks} on {engine.model.device}", runs[::-1]))
        if self.args.json:
            record = {
                "prompt": self.prompt,
                "text": done.text,
                "token_ids": done.token_ids,
                "finish_reason": done.finish_reason,
                "runs": [{**vars(run), "tokens_per_step": round(run.tokens_per_step, 4)} for run in runs],
                "sources": {name: vars(count) for name, count in done.stats.sources.items()},
            }
            print(json.dumps(record))
