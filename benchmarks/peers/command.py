"""lpr beside its peers: the same prompts, the same weights in float32, one command.

    python -m benchmarks.real_model FOLDER
    python -m benchmarks.peers install --work DIR
    python -m benchmarks.peers run --work DIR --model FOLDER --chat-template --data hub:classeval
    python -m benchmarks.peers time --work DIR --model FOLDER --chat-template --data hub:classeval --skip 68 --prompts 2
    python -m benchmarks.peers table

`install` clones each peer at its pinned commit, or takes a checkout that `--source lade=DIR` names; `changes` lists
what is done otherwise than by its authors. `run` counts steps, which do not depend on how busy a machine is, so it
keeps no times. `time` lets all contestants complete a prompt in turn, greedily, beside transformers' plain decoding,
and wants the machine for itself; what it completes, `run` need not. Both write into the result file beside what is
there, entry by entry, so `run --only lpr` renews lpr's rows alone. An interrupted run goes on behind what --work holds.
A round (one variant, temperature and seed) begins with nothing learnt. Sampled texts differ between stacks by their
random numbers, so only lpr's are compared with plain decoding's. `table` renews the table of docs/results.md from the
result file.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import (
    RESULTS,
    OneLineParser,
    circumstances,
    make_parser,
    progress,
    read_json,
    run_main,
    whole,
    write_json,
)
from benchmarks.data import load_prompts
from benchmarks.peers import arctic, lade, own, pia, prompt_lookup
from benchmarks.peers.environment import install, installed
from benchmarks.peers.page import DOCS, renew
from benchmarks.peers.recipe import Peer
from benchmarks.peers.rounds import FIRST_SEED, Rounds, Task, row_of, time_them
from lpr.config import InputError

PEERS: dict[str, Peer] = {peer.name: peer for peer in (own.PEER, prompt_lookup.PEER, lade.PEER, pia.PEER, arctic.PEER)}
SEPARATORS = (",", ".", " ")


def build_parser() -> OneLineParser:
    """The command line."""
    parser = make_parser("peers", "lpr beside its peers, on the same prompts and weights.", threads=1)
    parser.add_argument("what", choices=["install", "run", "time", "table", "changes"])
    parser.add_argument("--only", nargs="+", metavar="PEER", help=f"some of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for environments and finished rounds")
    parser.add_argument("--source", nargs="+", default=[], metavar="PEER=DIR", help="checkouts to take, not git's")
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder, a Llama")
    parser.add_argument("--data", metavar="FILE", help="prompts, as for the other benchmarks")
    parser.add_argument("--chat-template", action="store_true", help="prompts are messages of the chat template")
    parser.add_argument("--skip", type=whole, default=60, metavar="N", help="leave out the first N prompts (60)")
    parser.add_argument("--prompts", type=whole, default=8, metavar="N", help="use N prompts (8)")
    parser.add_argument("--max-new-tokens", type=whole, default=160, metavar="N", help="tokens per prompt (160)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="T")
    parser.add_argument("--seeds", type=whole, default=1, metavar="N", help=f"seeds {FIRST_SEED}, ... if sampled (1)")
    parser.add_argument("--variants", nargs="+", metavar="V", help="some variants only, as the table names them")
    parser.set_defaults(output=str(RESULTS / "peers.json"))
    return parser


def chosen(options: argparse.Namespace) -> list[Peer]:
    """The peers that `--only` names, of which `--variants` leaves some; raises InputError."""
    names = options.only or list(PEERS)
    if unknown := [name for name in names if name not in PEERS]:
        raise InputError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    found = [PEERS[name] for name in PEERS if name in names]
    if options.variants and (
        unknown := [each for each in options.variants if not any(each in peer.variants for peer in found)]
    ):
        raise InputError(f"no such variant: {', '.join(map(repr, unknown))}")
    return found


def sources_of(options: argparse.Namespace) -> dict[str, Path]:
    """The checkouts of `--source`; raises InputError."""
    found = {}
    for each in options.source:
        name, equals, folder = each.partition("=")
        if name not in PEERS or not equals:
            raise InputError(f"--source {each}: PEER=DIR is wanted, PEER one of {', '.join(PEERS)}")
        found[name] = Path(folder)
    return found


def task_of(options: argparse.Namespace) -> Task:
    """What all contestants are to complete; raises InputError."""
    from transformers import AutoTokenizer

    for name in ("model", "data"):
        if getattr(options, name) is None:
            raise InputError(f"{options.what} needs --{name}")
    if not options.prompts or not options.max_new_tokens:
        raise InputError("there is nothing to complete")
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


def found_before(options: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """The result file so far, or an empty one; raises InputError if it is of another task."""
    path = Path(options.output)
    which = {"first_prompt": options.skip, "num_prompts": options.prompts}
    result = {"benchmark": "peers", **facts, **which, "rows": [], "wall_clock": []}
    if path.exists():
        found: dict[str, Any] = read_json(path)
        names = [*facts, *(which if options.what == "run" and found.get("rows") else ())]  # any prompts can be timed
        if others := {name: found.get(name) for name in names if found.get(name) != result[name]}:
            raise InputError(f"{path} is of another task ({others}); --output takes another file")
        names = [name for name in ("rows", "wall_clock", "note", *(which if options.what == "time" else ()))]
        result |= {name: found[name] for name in names if name in found}
    return result


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Count the steps of all rows that are asked for."""
    peers, task = chosen(options), task_of(options)
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
    with Rounds(options, task) as rounds, progress(console, len(rows)) as advance:
        for peer, variant, temperature in rows:
            row = row_of(rounds, peer, variant, temperature, seeds if temperature else seeds[:1])
            keep(result["rows"], row, ("peer", "variant", "temperature"))
            write(result, options)
            advance(1, f"{peer.name}, {variant}")
    return result


def time_all(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The wall clock of all contestants, a prompt at a time."""
    peers, task = [peer for peer in chosen(options) if not peer.replays], task_of(options)
    result = found_before(options, task.facts)
    base = (prompt_lookup.PEER, prompt_lookup.PLAIN)
    entries = [
        base,
        *(
            (peer, variant) for peer in peers for variant in peer.variants
            if (peer, variant) != base and (not options.variants or variant in options.variants)
        ),
    ]  # fmt: skip
    with Rounds(options, task) as rounds, progress(console, len(task.prompts)) as advance:
        for entry in time_them(rounds, entries, options.skip, advance):
            keep(result["wall_clock"], entry, ("peer", "variant", "prompt"))
            write(result, options)
    return result


def keep(entries: list[dict[str, Any]], entry: dict[str, Any], names: Sequence[str]) -> None:
    """Put an entry into its place among `entries`, or behind them."""
    for at, each in enumerate(entries):
        if all(each[name] == entry[name] for name in names):
            entries[at] = entry
            return
    entries.append(entry)


def write(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write what there is so far: a run takes long."""
    write_json(Path(options.output), {**result, **circumstances()})


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Do what the command line says."""
    if options.work is None:
        raise InputError(f"{options.what} needs --work")
    if options.what == "install":
        sources = sources_of(options)
        for peer in chosen(options):
            install(peer, options.work, sources.get(peer.name))
        return {"benchmark": "peers_installed", "peers": [peer.name for peer in chosen(options)]}
    if missing := [peer.name for peer in chosen(options) if peer.repository and not installed(peer, options.work)]:
        raise InputError(f"not installed in {options.work}: {', '.join(missing)}; python -m benchmarks.peers install")
    return run(options, console) if options.what == "run" else time_all(options, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.what == "changes":
        print("\n".join(f"{peer.name}: {change}" for peer in PEERS.values() for change in peer.changes))
        return 0
    if options.what == "table":
        try:
            renew(DOCS, read_json(options.output))
        except InputError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        return 0
    if options.what == "install":
        parser.set_defaults(output=None)
    return run_main(parser, measure, arguments)
