"""What every benchmark shares: command line options, a progress bar, and a result with its circumstances.

A benchmark is a dataclass of options, whose docstrings are the help, and a function that measures:

    def measure(options: NameOptions, console: Console) -> dict[str, Any]:
        return {"runs": [...]}

    def main() -> int:
        return run_main("name", NameOptions, measure)

The result is one JSON line, the last of stdout. Tables (benchmarks.report) and the progress bar go to stderr, unless
`--json` is given. An entry that failed holds its reason as `failed` (see `attempt`); it is never averaged, and the exit
code is 1.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import tyro
from rich.console import Console
from rich.progress import Progress

from benchmarks.report.parts import failures, markdown
from benchmarks.report.tables import parts_of
from lpr.cli.flags import read_flags
from lpr.config import InputError

RESULTS = Path(__file__).parent / "results"
STEP_TIMES = Path(__file__).parent / "h100_7b.json"
"""A table of step times, as `lpr.core.step_times` reads them: estimated for a 7B on an H100."""
T = TypeVar("T")


def _whole(words: list[str]) -> int:
    if not words[0].isdecimal():
        raise ValueError(f"{words[0]!r} is not an integer of at least 0")
    return int(words[0])


Whole = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=_whole,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""An option that is an integer of at least 0."""
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every benchmark."""

    threads: Whole = 0  # CPU threads; 0 leaves torch's default.
    output: str | None = None  # File to which the result is written as JSON, for benchmarks/results.
    json: Flag = False  # Print the JSON line only, no tables.


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Options of a benchmark that decodes prompts with a model."""

    prompts: Whole = 20  # Use the first N prompts.
    chat_template: Flag = False  # Put each prompt as a user's message into the model's chat template.
    max_new_tokens: Whole = 256  # Tokens per prompt.
    model: str | None = None  # Folder or hub id; the bundled model if none is given.
    device: str | None = None  # cpu, cuda or cuda:N; a GPU if there is one.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # Type of the weights.
    exact: Flag = False  # Exact mode: the same bits for every shape of a step.


@dataclass(frozen=True, kw_only=True)
class DataOptions(ModelOptions):
    """Options of a benchmark that decodes the prompts of one data set."""

    skip: Whole = 0  # Leave out the first N prompts.
    data: str
    """JSON lines of ClassEval, HumanEval, GSM8K, ..., or hub:classeval, hub:humaneval, hub:gsm8k, hub:mt_bench."""


def read_options(name: str, kind: type[T], arguments: Sequence[str] | None = None) -> T:
    """The options of the command line; raises InputError with one line for bad input, SystemExit(0) for `--help`."""
    return read_flags(kind, f"benchmarks.{name}", arguments)


def run_main(
    name: str, kind: type[T], measure: Callable[[T, Console], dict[str, Any]], arguments: Sequence[str] | None = None
) -> int:
    """Parse, measure, print and write the result.

    `kind` is a subclass of Options. Returns the exit code: 0, 1 if an entry failed, or 2 for bad input.
    """
    try:
        options: Any = read_options(name, kind, arguments)
        if options.threads:
            torch.set_num_threads(options.threads)
        console = make_console(options.json)
        result = {"benchmark": name, **measure(options, console)}
    except InputError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    finally:
        gc.unfreeze()  # else triton's bindings report what is frozen at exit as leaked, in 30 lines
    show(result, console)
    finish(result, options.output)
    return 1 if result.get("num_failed") or next(failures(result), None) else 0


def make_console(is_quiet: bool) -> Console:
    """A console on stderr; a log file gets lines of 120 columns."""
    console = Console(stderr=True, quiet=is_quiet)
    if not console.is_terminal:
        console.width = 120
    return console


def finish(result: dict[str, Any], output: str | None) -> None:
    """Print the result with its circumstances as one JSON line and write it to `output`."""
    result = {**result, **circumstances()}
    if output:
        write_json(Path(output), result)
    print(json.dumps(result))


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file; raises InputError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise InputError(f"cannot read {path}: {failure}") from failure


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `call`, or `failed` with the reason if it raises; bad input is raised."""
    try:
        return call()
    except InputError:
        raise
    except Exception as failure:  # any failure is a result
        return {"failed": reason(failure)}


def reason(failure: Exception) -> str:
    """The type and the first line of a failure."""
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"[:400]


@contextmanager
def progress(console: Console, total: int, what: str = "decoding") -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal, nothing elsewhere; yields `advance(number, now)`, where `now` names what runs."""
    hidden = console.quiet or not console.is_terminal
    with Progress(console=console, disable=hidden, transient=True) as bar:
        row = bar.add_task(what, total=total)

        def advance(number: int = 1, now: str | None = None) -> None:
            bar.update(row, advance=number, description=now)

        yield advance


def show(result: dict[str, Any], console: Console) -> None:
    """Print the result's tables, and a line per failure."""
    for part in [] if "failed" in result else parts_of(result):
        console.print(
            part.table.title, markdown(part.table), "", sep="\n", markup=False, highlight=False, soft_wrap=True
        )
    for what, why in failures(result):
        console.print(f"failed: {what}: {why}", markup=False, highlight=False, soft_wrap=True)


def circumstances() -> dict[str, Any]:
    """Hardware, software, commit and command of this run."""
    import transformers

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0].split(':', 1)[1].strip()}"
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]  # folders of this machine
    root = Path(__file__).parents[1]
    changed = git(root, "status", "--porcelain", "--", "lpr")
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m", f"benchmarks.{name}", *words]),
        "commit": git(root, "rev-parse", "--short", "HEAD") + ("+changes" if changed else ""),
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def git(folder: Path, *words: str) -> str:
    """What a git command prints about the repository in `folder`; empty if it fails."""
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.strip()
