"""One HTML page and its pictures from the result files of the other benchmarks.

    python -m benchmarks.report --results benchmarks/results --output report/

A result that is missing, failed or of an older form is named on the page and on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import RESULTS, read_json, read_options
from lpr.config import InputError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """One page and pictures from all results."""

    results: Path = RESULTS  # Folder of result files.
    output: Path = Path("report")  # Folder to write to.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = read_options("report", ReportOptions, arguments)
        notes = make(options.results, options.output)
    except InputError as error:
        print(f"benchmarks.report: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(note, file=sys.stderr)
    print(options.output / "index.html")
    return 0


def make(folder: Path, output: Path) -> list[str]:
    """Write `index.html` and the pictures to `output`; returns notes about what is missing. Raises InputError."""
    if find_spec("matplotlib") is None:
        raise InputError("the pictures need matplotlib: pip install 'lpr[bench]'")
    from benchmarks.report.page import Report

    results = {}
    for path in sorted(folder.glob("*.json")):
        facts = read_json(path)
        if not isinstance(facts, dict):
            raise InputError(f"{path} is not a result: a JSON object was expected")
        results[path.name] = facts
    if not results:
        raise InputError(f"{folder} has no result files (*.json); the other benchmarks write them with --output")
    report = Report(results)
    page = report.html(folder.name if folder.is_absolute() else str(folder))
    files = {"index.html": page.encode(), **report.pictures}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            (output / file).write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write to {output}: {error.strerror or error}") from error
    return report.notes


if __name__ == "__main__":
    sys.exit(main())
