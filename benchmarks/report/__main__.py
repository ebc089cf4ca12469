"""One self-contained HTML page and its pictures from the result files of the other benchmarks.

    python -m benchmarks.report --results benchmarks/results --output report/

Measures nothing. A result that is missing, failed or of an older form is named on the page and on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import RESULTS, OneLineParser, read_json
from lpr.config import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = OneLineParser(prog="benchmarks.report", description="One page and pictures from all results.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="folder of result files")
    parser.add_argument("--output", type=Path, default=Path("report"), metavar="DIR", help="default: report/")
    options = parser.parse_args(arguments)
    try:
        notes = make(options.results, options.output)
    except InputError as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(note, file=sys.stderr)
    print(options.output / "index.html")
    return 0


def make(folder: Path, output: Path) -> list[str]:
    """Write `index.html` and the pictures to `output`; returns what could not be shown. Raises InputError."""
    if find_spec("matplotlib") is None:
        raise InputError("the pictures need matplotlib: pip install 'lpr[bench]'")
    from benchmarks.report.page import Report
    from benchmarks.report.parts import Result

    results = [Result(path.name, read(path)) for path in sorted(folder.glob("*.json"))]
    if not results:
        raise InputError(f"{folder} has no result files (*.json); the other benchmarks write them with --output")
    report = Report(results)
    name = folder.name if folder.is_absolute() else str(folder)
    files = {"index.html": report.html(name).encode(), **report.pictures}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            (output / file).write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write to {output}: {error.strerror or error}") from error
    return report.notes


def read(path: Path) -> dict[str, object]:
    """A result file; raises InputError."""
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise InputError(f"{path} is not a result: a JSON object was expected")
    return facts


if __name__ == "__main__":
    sys.exit(main())
