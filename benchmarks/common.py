"""What the benchmarks share: prompts from public data sets, command lines, and results with their circumstances."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import hub
from lpr.config import DecodeConfig, InputError

RESULTS = Path(__file__).parent / "results"
PROMPT_FIELDS = ("skeleton", "prompt", "question", "turns")
"""Field of a record that holds the prompt: ClassEval, HumanEval and traces, GSM8K, MT-Bench."""


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


def model_parser(name: str, description: str, many: bool = False) -> OneLineParser:
    """The command line of a benchmark that decodes the prompts of one data set, or of `many`, with a model."""
    parser = OneLineParser(prog=f"benchmarks.{name}", description=description)
    what = f"JSON lines of ClassEval, HumanEval, GSM8K, ..., or {', '.join(hub.PREFIX + name for name in hub.FILES)}"
    parser.add_argument("--data", required=True, metavar="FILE", nargs="+" if many else None, help=what)
    parser.add_argument("--prompts", type=whole, default=20, metavar="N", help="use the first N prompts (default 20)")
    parser.add_argument(
        "--max-new-tokens", type=whole, default=256, metavar="N", help="tokens per prompt (default 256)"
    )
    parser.add_argument("--model", metavar="M", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--threads", type=whole, default=0, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--output", metavar="FILE", help=f"write the result as JSON (benchmarks/results/{name}.json)")
    return parser


def load_prompts(path: str, count: int) -> list[str]:
    """The first `count` prompts of a data set, a file or a name such as hub:gsm8k; raises InputError."""
    prompts = []
    for record in read_records(hub.fetch(path) if path.startswith(hub.PREFIX) else Path(path))[:count]:
        found = [record[name] for name in PROMPT_FIELDS if name in record] if isinstance(record, dict) else []
        if not found:
            raise InputError(f"{path}: a record has none of the fields {', '.join(PROMPT_FIELDS)}")
        prompts.append(found[0][0] if isinstance(found[0], list) else found[0])
    if not prompts:
        raise InputError(f"{path} holds no prompts")
    return prompts


def read_records(path: Path) -> list[Any]:
    """The records of a file in JSON lines, as one JSON array, or in parquet (needs pyarrow); raises InputError."""
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ImportError as error:
        raise InputError(
            f"{path.name} is parquet, which needs pyarrow: pip install pyarrow, or give JSON lines"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def split_budget(kind: str, budget: int) -> DecodeConfig:
    """A configuration whose tree has at most `budget` nodes: `window`, `trie`, or half of each (`both`).

    A window takes W * (N-1) nodes and its pool G * (N-1); W = G as in the paper, N = 5.
    """
    if kind == "trie":
        return DecodeConfig(window_size=0, trie_nodes=budget - 1, max_batch_size=1)
    columns = max(1, budget // (16 if kind == "both" else 8))
    trie = 0 if kind == "window" else budget - 8 * columns
    return DecodeConfig(window_size=columns, guess_set_size=columns, trie_nodes=trie, max_batch_size=1)


def circumstances() -> dict[str, Any]:
    """Hardware, software, commit and command of this run."""
    cpu = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0].split(':', 1)[1].strip()}"
    except (OSError, IndexError):
        pass
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "../lpr"], capture_output=True, text=True, check=False
    )
    import transformers

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "python -m "
        + " ".join([f"benchmarks.{Path(sys.argv[0]).stem}", *map(_without_folder, sys.argv[1:])]),
        "commit": commit.stdout.strip() + ("+changes" if changed.stdout.strip() else ""),
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _without_folder(argument: str) -> str:
    """A file's name without the folders that only this machine has."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def finish(result: dict[str, Any], output: str | None) -> None:
    """Print the result as one JSON line, the last of stdout, and write it to `output`."""
    result = {**result, **circumstances()}
    if output:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of text cells: the first column to the left, the others to the right."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def run_main(parser: OneLineParser, measure: Callable[[argparse.Namespace, Console], dict[str, Any]]) -> int:
    """Parse, measure, report; bad input is one line and exit code 2, and a result with `num_failed` runs is 1."""
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        console = Console(stderr=True)
        if not console.is_terminal:
            console.width = 120  # a log file has no edge to wrap at
        result = measure(options, console)
    except InputError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    finish(result, options.output)
    return 1 if result.get("num_failed") else 0
