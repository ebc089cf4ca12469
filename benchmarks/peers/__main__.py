"""lpr and its peers on the same prompts and the same weights in float32.

    python -m benchmarks.real_model FOLDER
    python -m benchmarks.peers install --work DIR
    python -m benchmarks.peers run --work DIR --model FOLDER --chat-template --data hub:classeval
    python -m benchmarks.peers table

`install` clones each peer at its pinned commit, or takes a checkout that `--source lade=DIR` names; README.md lists the
deviations from their authors' setup. `run` counts steps, which do not depend on the machine's load, and renews the
result file entry by entry, so `run --only lpr` renews lpr's rows alone. An interrupted run continues after the last
round in --work. A round (one variant, temperature and seed) begins with empty draft indexes. Sampled texts differ
between systems by their random numbers, so only lpr's are compared with plain decoding's. `table` renews the table of
docs/results.md from the result file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from benchmarks.common import (
    RESULTS,
    Flag,
    Options,
    Whole,
    circumstances,
    progress,
    read_json,
    read_options,
    run_main,
    write_json,
)  # fmt: skip
from benchmarks.data import load_prompts
from benchmarks.peers import arctic, lade, own, pia, prompt_lookup
from benchmarks.peers.environment import install, installed
from benchmarks.peers.rounds import FIRST_SEED, Rounds, Task, row_of
from benchmarks.peers.worker import Peer
from benchmarks.report.parts import renew
from benchmarks.report.tables import peers_table
from lpr.config import InputError

PEERS: dict[str, Peer] = {peer.name: peer for peer in (own.PEER, prompt_lookup.PEER, lade.PEER, pia.PEER, arctic.PEER)}
SEPARATORS = (",", ".", " ")
DOCS = Path(__file__).parents[2] / "docs" / "results.md"
BEGIN, END = "<!-- made by python -m benchmarks.peers table -->", "<!-- end -->"


@dataclass(frozen=True, kw_only=True)
class PeersOptions(Options):
    """lpr and its peers, on the same prompts and weights."""

    threads: Whole = 1  # CPU threads.
    what: tyro.conf.Positional[Literal["install", "run", "table"]]  # What to do.
    only: tuple[str, ...] = ()  # Some of lpr, transformers, lade, pia, arctic; all if none is given.
    work: Path | None = None  # Folder for environments and finished rounds.
    source: tuple[str, ...] = ()  # Checkouts to use instead of cloning, as PEER=DIR.
    model: Path | None = None  # Model folder, a Llama.
    data: str | None = None  # Prompts: a file, or hub:classeval and so on.
    chat_template: Flag = False  # Put each prompt into the model's chat template.
    skip: Whole = 60  # Leave out the first N prompts.
    prompts: Whole = 8  # Number of prompts.
    max_new_tokens: Whole = 160  # Tokens per prompt.
    temperatures: tuple[float, ...] = (0.0, 0.8)  # Temperatures.
    seeds: Whole = 1  # Number of seeds at temperatures above 0.
    variants: tuple[str, ...] = ()  # Some variants only, as the table names them.
    output: str | None = str(RESULTS / "peers.json")  # Result file, renewed entry by entry.


def chosen(options: PeersOptions) -> list[Peer]:
    """The peers that `--only` names, of which `--variants` leaves some; raises InputError."""
    names = options.only or tuple(PEERS)
    if unknown := [name for name in names if name not in PEERS]:
        raise InputError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    found = [PEERS[name] for name in PEERS if name in names]
    if options.variants and (
        unknown := [each for each in options.variants if not any(each in peer.variants for peer in found)]
    ):
        raise InputError(f"no such variant: {', '.join(map(repr, unknown))}")
    return found


def sources_of(options: PeersOptions) -> dict[str, Path]:
    """The checkouts of `--source`; raises InputError."""
    found = {}
    for each in options.source:
        name, equals, folder = each.partition("=")
        if name not in PEERS or not equals:
            raise InputError(f"--source {each}: PEER=DIR is wanted, PEER one of {', '.join(PEERS)}")
        found[name] = Path(folder)
    return found


def task_of(options: PeersOptions) -> Task:
    """The prompts of all contestants; raises InputError."""
    from transformers import AutoTokenizer

    if options.model is None or options.data is None:
        raise InputError(f"{options.what} needs --{'data' if options.model else 'model'}")
    if not options.prompts or not options.max_new_tokens:
        raise InputError("nothing to complete: --prompts and --max-new-tokens must be at least 1")
    if not (options.model / "config.json").exists():
        raise InputError(f"{options.model} is no model folder; python -m benchmarks.real_model makes one")
    template = options.model if options.chat_template else None
    texts = load_prompts(options.data, options.skip + options.prompts, template)[options.skip :]
    if len(texts) < options.prompts:
        raise InputError(f"{options.data} has no {options.prompts} prompts after the first {options.skip}")
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    ends = read_json(options.model / "generation_config.json").get("eos_token_id")
    return Task(
        prompts=[tokenizer.encode(text, add_special_tokens=template is None) for text in texts],
        max_new_tokens=options.max_new_tokens,
        stop_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
        separators=[tokenizer.convert_tokens_to_ids(each) or 0 for each in SEPARATORS],
        facts={
            "model": options.model.name, "weights": digest(options.model), "data": Path(options.data).name,
            "chat_template": bool(template), "max_new_tokens": options.max_new_tokens,
        },
    )  # fmt: skip


def digest(model: Path) -> str:
    """The beginning of a hash of the weights."""
    made = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        made.update(file.read_bytes())
    return made.hexdigest()[:12]


def found_before(options: PeersOptions, facts: dict[str, Any]) -> dict[str, Any]:
    """The result file so far, or an empty one; raises InputError if it is of another task."""
    path = Path(str(options.output))
    which = {**facts, "first_prompt": options.skip, "num_prompts": options.prompts}
    result: dict[str, Any] = {**which, "rows": [], "wall_clock": []}
    if path.exists():
        found = read_rows(options)
        if others := {name: found.get(name) for name in which if found.get(name) != which[name]}:
            raise InputError(f"{path} is of another task ({others}); --output takes another file")
        result |= {name: found[name] for name in ("rows", "wall_clock", "note") if name in found}
    return result


def read_rows(options: PeersOptions) -> dict[str, Any]:
    """The result file; raises InputError for a file that is no result of `run`."""
    found: Any = read_json(str(options.output))
    wanted = {"rows", "wall_clock", "first_prompt", "num_prompts", "data", "max_new_tokens"}
    if not isinstance(found, dict) or wanted - set(found):
        raise InputError(f"{options.output} is no result of benchmarks.peers run")
    return found


def measure(options: PeersOptions, console: Console) -> dict[str, Any]:
    """Count the steps of all rows that are asked for."""
    if options.work is None:
        raise InputError("run needs --work")
    peers = chosen(options)
    if missing := [peer.name for peer in peers if peer.repository and not installed(peer, options.work)]:
        raise InputError(f"not installed in {options.work}: {', '.join(missing)}; python -m benchmarks.peers install")
    task = task_of(options)
    assert options.model is not None
    result = found_before(options, task.facts)
    seeds = list(range(FIRST_SEED, FIRST_SEED + max(1, options.seeds)))
    rows = [
        (peer, variant, temperature)
        for peer in peers
        for temperature in options.temperatures
        if peer.samples or not temperature
        for variant in peer.variants
        if not options.variants or variant in options.variants
    ]
    with Rounds(options.work, options.model, task, options.threads) as rounds, progress(console, len(rows)) as advance:
        for peer, variant, temperature in rows:
            row = row_of(rounds, peer, variant, temperature, seeds if temperature else seeds[:1])
            keep(result["rows"], row)
            write_json(Path(str(options.output)), {"benchmark": "peers", **result, **circumstances()})
            advance(1, f"{peer.name}, {variant}")
    return result


def keep(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Replace the row of the same peer, variant and temperature, or append it."""
    names = ("peer", "variant", "temperature")
    for at, each in enumerate(rows):
        if all(each[name] == row[name] for name in names):
            rows[at] = row
            return
    rows.append(row)


def install_all(options: PeersOptions) -> None:
    """Install the peers; raises InputError."""
    if options.work is None:
        raise InputError("install needs --work")
    sources = sources_of(options)
    for peer in chosen(options):
        install(peer, options.work, sources.get(peer.name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = read_options("peers", PeersOptions, arguments)
        if options.what == "install":
            install_all(options)
            return 0
        if options.what == "table":
            renew(DOCS, (BEGIN, END), [peers_table(read_rows(options))])
            return 0
    except InputError as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    return run_main("peers", PeersOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
