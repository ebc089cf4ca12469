"""What every benchmark shares: its command line, a progress bar, and a result that carries its circumstances.

A benchmark is a parser and a function that measures; the rest is here:

    def measure(options, console):
        with progress(console, len(cases)) as advance:
            ...
        return {"benchmark": "name", "runs": [...]}  # its tables: benchmarks/result_tables, or every value as it is

    def main() -> int:
        parser = make_parser("name", "What it measures.")
        return run_main(parser, measure)

The result is one JSON line, the last of stdout; tables and the bar go to stderr, unless `--json` asks for neither. An
entry that came to nothing holds its reason as `failed` (see `attempt`): it is never averaged, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.result_tables import tables_of
from benchmarks.result_tables.parts import failures
from lpr.config import InputError

RESULTS = Path(__file__).parent / "results"
STEP_TIMES = Path(__file__).parent / "tables"
"""Tables of step times, as `lpr.core.step_times` reads them: `h100_7b` is estimated, `flat_N` takes N ms a step."""


def whole(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise ValueError
    return value


whole.__name__ = "number of at least 0"  # argparse names the type in its message


class OneLineParser(argparse.ArgumentParser):
    """Bad input is one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser(name: str, description: str, threads: int = 0) -> OneLineParser:
    """The command line that all benchmarks have: `--threads`, `--output` and `--json`."""
    parser = OneLineParser(prog=f"benchmarks.{name}", description=description)
    parser.add_argument(
        "--threads", type=whole, default=threads, metavar="N", help=f"CPU threads (default: {threads or 'as torch'})"
    )
    parser.add_argument("--output", metavar="FILE", help="write the result as JSON, for benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print the JSON line only, no tables")
    return parser


def model_parser(name: str, description: str, many: bool = False, threads: int = 0) -> OneLineParser:
    """The command line of a benchmark that decodes the prompts of one data set, or of `many`, with a model."""
    parser = make_parser(name, description, threads)
    what = "JSON lines of ClassEval, HumanEval, GSM8K, ..., or hub:classeval, hub:humaneval, hub:gsm8k, hub:mt_bench"
    parser.add_argument("--data", required=True, metavar="FILE", nargs="+" if many else None, help=what)
    parser.add_argument("--prompts", type=whole, default=20, metavar="N", help="use the first N prompts (default 20)")
    parser.add_argument(
        "--chat-template", action="store_true", help="prompts are messages in the model's chat template"
    )
    parser.add_argument("--max-new-tokens", type=whole, default=256, metavar="N", help="tokens per prompt (256)")
    parser.add_argument("--model", metavar="M", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--exact", action="store_true", help="the same bits for every shape of a step (exact mode)")
    return parser


def run_main(
    parser: OneLineParser,
    measure: Callable[[argparse.Namespace, Console], dict[str, Any]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse, measure, print and write the result; returns the exit code: 1 if an entry failed, 2 for bad input."""
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True, quiet=options.json)
    if not console.is_terminal:
        console.width = 120  # a log file has no edge to wrap at
    try:
        result = measure(options, console)
    except InputError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    finally:
        gc.unfreeze()  # what is frozen at the exit, triton's bindings report as leaked, in 30 lines
    show(result, console)
    finish(result, options.output)
    return 1 if result.get("num_failed") or next(failures(result), None) else 0


def finish(result: dict[str, Any], output: str | None) -> None:
    """Print the result with its circumstances as one JSON line and write it to `output`."""
    result = {**result, **circumstances()}
    if output:
        write_json(Path(output), result)
    print(json.dumps(result))


def write_json(path: Path, value: Any) -> None:
    """Write a value for people to read; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """The value in a JSON file; raises InputError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise InputError(f"cannot read {path}: {failure}") from failure


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `call` returns; if it raises, its reason as `failed`. Bad input is not a failure and is raised."""
    try:
        return call()
    except InputError:
        raise
    except Exception as failure:  # whatever it is, it is a result
        return {"failed": reason(failure)}


def reason(failure: Exception) -> str:
    """The type and the first line of a failure."""
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"[:400]


@contextmanager
def progress(console: Console, total: int, what: str = "decoding") -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal and nothing elsewhere; yields what advances it and can name what runs next."""
    hidden = console.quiet or not console.is_terminal
    with Progress(console=console, disable=hidden, transient=True) as bar:
        row = bar.add_task(what, total=total)

        def advance(number: int = 1, now: str | None = None) -> None:
            bar.update(row, advance=number, description=now)

        yield advance


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of text cells: the first column to the left, the others to the right."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def show(result: dict[str, Any], console: Console) -> None:
    """The result's tables, and a line per failure."""
    for each in tables_of(result):
        console.print(table(each.title, each.columns, each.rows))
    for what, why in failures(result):
        console.print(f"failed: {what}: {why}", markup=False, highlight=False, soft_wrap=True)


def circumstances() -> dict[str, Any]:
    """Hardware, software, commit and command of this run."""
    import transformers

    cpu = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0].split(':', 1)[1].strip()}"
    except (OSError, IndexError):
        pass
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]  # folders of this machine
    changed = _git("status", "--porcelain", "--", "../lpr")
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem  # a package's command
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m", f"benchmarks.{name}", *words]),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if changed else ""),
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
