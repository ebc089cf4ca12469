"""The command `lpr.generate`: its arguments, and the start and end of its ranks."""

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from lpr.cli.config_file import defaults
from lpr.cli.flags import read_flags
from lpr.cli.jobs import DEMO_PROMPT, DEMO_SAMPLING, FileJob, Keeping, ShowJob, check_trie
from lpr.cli.jsonl import OrderedWriter, read_prompts
from lpr.cli.trace import check_trace
from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.core.digest import digest_of
from lpr.dist.comm import Comm, agree, is_driver
from lpr.dist.errors import CommError
from lpr.dist.runtime import World, join
from lpr.dist.supervisor import Supervisor
from lpr.engine.engine import Engine
from lpr.engine.exchange import DesyncError
from lpr.engine.options import EngineOptions, load_step_times, named_folders
from lpr.model.loader import bundled_model

_GROUPS = {"options": EngineOptions, "sampling": SamplingParams, "decode": DecodeConfig}
"""Fields of Args whose own fields are flags."""
_RANK_0_SPEAKS = 10.0  # seconds that the other ranks stay after bad input; the launcher ends them when rank 0 has left


@dataclass(frozen=True, kw_only=True)
class Args:
    """Complete prompts with lookahead-parallel decoding: the tokens of plain decoding, in fewer steps.

    Without --prompts and --prompt, completes a built-in code prompt and compares with plain decoding.
    """

    model: str | None = None  # Model folder or hub id. Default: the small code model that comes with lpr.
    prompts: Path | None = None  # JSONL file with a "prompt" per line.
    output: Path | None = None  # JSONL file for the completions, in the order of the prompts.
    prompt: str | None = None  # Complete this text and show it, instead of a file.
    adapter: str | None = None
    """Name of the adapter of --lora-modules that prompts are completed with; a line of --prompts may name its own, as
    "model"."""
    trie: Path | None = None
    """Folder or .safetensors file: draft from the outputs of earlier runs, and add those of this one."""
    trace: Path | None = None
    """HTML file that shows every step: its token tree, the nodes of each rank, the accepted path."""
    trace_steps: int = 500  # Most steps that --trace shows, the first ones; a request's part in a step counts as one.
    config: Path | None = None  # TOML file with values for any of these flags; flags given here win.
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON line to stdout instead of text and tables."""
    tp: int = 1  # Ranks of one replica of the model (tensor parallel): neighbours, on one machine.
    lp: int | None = None  # Replicas (lookahead parallel). Default: the number of ranks divided by tp.
    survive: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Start --lp times --tp ranks on this machine, without torchrun, and continue when some are lost; for --prompts."""
    timeout: float = 300.0  # Seconds that a rank waits for the others in a step before it gives up.
    load_timeout: float = 3600.0  # The same while the model is loaded, which takes long from slow storage.
    options: Annotated[EngineOptions, tyro.conf.OmitArgPrefixes] = EngineOptions()
    sampling: Annotated[SamplingParams, tyro.conf.OmitArgPrefixes] = SamplingParams()
    decode: Annotated[DecodeConfig, tyro.conf.OmitArgPrefixes] = DecodeConfig()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 (a rank was lost), 2 (bad input) or 130 (interrupted)."""
    world = World(0, 1, 0, 0, False)
    try:
        world = World.from_environment()
        argv = sys.argv[1:] if argv is None else argv
        args = parse(argv, quiet=world.rank != 0)
        if args.survive and not world.supervised:
            return supervise(args, argv, world)
        return run(args, world)
    except InputError as failure:
        if world.rank == 0:
            print(f"lpr.generate: error: {failure}", file=sys.stderr)
        elif world.launched:
            time.sleep(_RANK_0_SPEAKS)  # the first rank to leave ends the job, and rank 0 prints the reason before
        return 2
    except (CommError, DesyncError) as failure:
        print(f"lpr.generate: rank {world.rank}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if world.rank == 0:
            print("lpr.generate: interrupted; what was finished is written", file=sys.stderr)
        return 130
    except SystemExit:  # after --help
        return 0


def parse(argv: Sequence[str], quiet: bool = False) -> Args:
    """Arguments from `argv` over those of its `--config` file; raises InputError or SystemExit."""
    args = _parse(argv, quiet)
    if args.prompts is None and args.prompt is None:
        args = _parse(argv, quiet, {"sampling": DEMO_SAMPLING})
    prompts, output, trace = (path and path.resolve() for path in (args.prompts, args.output, args.trace))
    if prompts and not output:
        raise InputError("--prompts needs --output FILE.jsonl for the completions")
    if args.output == Path("-"):
        raise InputError("--output - is no file, and a job that was interrupted goes on from its file")
    if output and not prompts:
        raise InputError("--output needs --prompts FILE.jsonl")
    if prompts and prompts == output:
        raise InputError(f"--prompts and --output are the same file, {args.output}: the prompts would be lost")
    if prompts and args.prompt is not None:
        raise InputError("give either --prompts FILE.jsonl or --prompt TEXT")
    for name, other in {"prompts": prompts, "output": output}.items():
        if trace and trace == other:
            raise InputError(f"--trace and --{name} are the same file, {args.trace}: give the trace one of its own")
    if args.adapter is not None and args.adapter not in named_folders(args.options.lora_modules):
        raise InputError(f"--adapter {args.adapter}: --lora-modules has no such name")
    if args.trace_steps < 1:
        raise InputError(f"--trace-steps {args.trace_steps} must be at least 1")
    return args


def _parse(argv: Sequence[str], quiet: bool, base: Mapping[str, Mapping[str, Any]] | None = None) -> Args:
    return read_flags(Args, "lpr.generate", argv, defaults(argv, Args, _GROUPS, base), quiet)


def supervise(args: Args, argv: Sequence[str], world: World) -> int:
    """Run the command as ranks that are replaced when they are lost; returns its exit code. Raises InputError."""
    if world.launched:
        raise InputError("--survive starts ranks of its own, and torchrun ends all when one is lost: run it without")
    if args.prompts is None:
        raise InputError("--survive is for jobs: give --prompts FILE.jsonl and --output FILE.jsonl")
    if (lp := 1 if args.lp is None else args.lp) < 1 or args.tp < 1:
        raise InputError(f"a mesh of lp {lp} x tp {args.tp}: both must be at least 1")
    return Supervisor([sys.executable, "-m", "lpr.generate", *argv], lp, args.tp).run()


def run(args: Args, world: World) -> int:
    """Join the world, load the same engine on every rank, and let rank 0 do its job."""
    world.mesh_shape(args.tp, args.lp)
    device = world.device(args.options.device)
    args = replace(args, options=replace(args.options, device=device))
    with join(world, device, args.timeout, args.tp, args.load_timeout) as comm:
        engine, job = prepare(args, world, comm)
        is_first = is_driver(comm)  # rank 0 of the job, or of a new mesh after the loss of all other ranks
        code = 0
        if job is None:
            engine.work()
            if not engine.is_stopped:  # the driver was lost, and this rank has taken its place
                job = file_job(args, world, goes_on=True, takes_over=not is_first)
        if job is not None:
            try:
                code = job.run(engine)
            except InputError as failure:
                if world.rank:  # rank 0 is lost, and cannot print it
                    print(f"lpr.generate: error: {failure}", file=sys.stderr)
                engine.close()  # the other ranks end without an error
                raise
        engine.close()
        return code


def prepare(args: Args, world: World, comm: Comm) -> tuple[Engine, FileJob | ShowJob | None]:
    """This rank's engine and, on rank 0, its job; raises the same InputError on every rank."""
    job: FileJob | ShowJob | None = None
    failure = None
    try:
        if world.rank == 0:
            check_trie(args.trie)
            check_trace(args.trace)
            if isinstance(args.options.costs, Path):
                args = replace(args, options=replace(args.options, costs=load_step_times(args.options.costs)))
            if args.prompts is not None:
                job = file_job(args, world)
            else:
                prompt = DEMO_PROMPT if args.prompt is None else args.prompt
                job = ShowJob(prompt, args.sampling, args.decode, keeping_of(args), args.json, args.adapter)
    except InputError as error:
        failure = str(error)
    alike = replace(args, options=replace(args.options, costs=None, device=None))
    agree(comm, failure, {"set of arguments": digest_of(repr(alike))})
    engine = Engine.from_pretrained(args.model or bundled_model(), args.decode, args.options, comm=comm)
    if world.rank == 0:
        if (reason := engine.model.graph_reason) is not None:
            print(f"lpr.generate: steps run without CUDA graphs, which is slower: {reason}", file=sys.stderr)
        if (compiled := engine.model.compiled) is not None and (cost := compiled.describe()) is not None:
            print(f"lpr.generate: {cost}", file=sys.stderr)
        if engine.memory is not None:
            print(f"lpr.generate: {engine.memory}", file=sys.stderr)
    # Otherwise each full garbage collection traverses a million permanent objects during a step.
    gc.freeze()
    return engine, job


def file_job(args: Args, world: World, goes_on: bool = False, takes_over: bool = False) -> FileJob:
    """The job that completes the lines of --prompts; raises InputError.

    `goes_on`: another rank has started it. `takes_over`: this rank was part of that run (see FileJob).
    """
    assert args.prompts is not None and args.output is not None
    lp, tp = world.mesh_shape(args.tp)
    facts = {"world_size": world.size, "mesh": {"lp": lp, "tp": tp}}
    writer = OrderedWriter(args.output, read_prompts(args.prompts), resume=goes_on or world.attempt > 0)
    return FileJob(writer, args.sampling, facts, keeping_of(args), args.json, args.adapter, takes_over)


def keeping_of(args: Args) -> Keeping:
    return Keeping(args.trie, args.trace, args.trace_steps)
