"""`python -m lpr.plan`: the lp x tp meshes of a model: memory, traffic, predicted speed. No weights, no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from lpr.cli import plan_service
from lpr.cli.plan_service import ServiceArgs
from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.planner.facts import DTYPE_SIZES, ModelFacts, facts_of
from lpr.planner.footprint import RESERVED, Footprint, Mesh, footprint, meshes
from lpr.planner.hardware import DEFAULT_GPU, GIB, GPUS, Gpu, gpu_named, parse_bandwidth, parse_size
from lpr.planner.interconnect import LINKS, Link, Network
from lpr.planner.measured import read_measured
from lpr.planner.prediction import Machine, Prediction, Setting, advantage, predict
from lpr.planner.presets import Planned, measured_values, preset_names, resolve


@dataclass(frozen=True, kw_only=True)
class Args:
    """Plan the mesh of a model without any GPU: memory, traffic, least time of a step, tokens per second.

    Reads only the model's config. Budgets (window, guesses, trie nodes) are per rank, as in lpr.generate. Tokens per
    second are predictions (lpr.planner.prediction); they take the best of the measured drafting budgets instead.
    """

    model: str | None = None
    """A preset (--list), a folder, a config.json, a hub id, or a TOML file of configs/."""
    gpus: int = 8
    """GPUs of the job: lp x tp."""
    gpu: str = DEFAULT_GPU
    """Kind of GPU: its memory, bandwidth and arithmetic by the data sheet."""
    gpu_memory: str | None = None
    """Memory of a GPU, such as 80GiB, over --gpu's."""
    bandwidth: str | None = None
    """Memory bandwidth of a GPU, such as 2039GB/s, over --gpu's."""
    link: str | None = None
    """Link between the GPUs of a host (see --list), over --gpu's."""
    network: str = "ib-hdr"
    """Link between hosts of eight GPUs."""
    temperature: float = 0.0
    """0 is greedy. The mesh is recommended for this; the prediction for greedy or 0.8 is shown too."""
    eager: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Launch kernels one by one, without captured graphs."""
    context: int = 4096
    """Longest prompt plus output, in tokens."""
    batch: int = 1
    """Sequences decoded in one step."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's own."""
    window_size: int | None = None
    """W. Default: the preset's, or lpr's. The same holds for the next five."""
    ngram_size: int | None = None
    """N."""
    guess_set_size: int | None = None
    """G."""
    trie_nodes: int | None = None
    """Node budget of the trie."""
    branch_length: int | None = None
    """Longest branch of a draft."""
    prefill_chunk: int | None = None
    """Longest pending chain evaluated in one step."""
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the names of presets, GPUs and links."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON line instead of tables."""
    planned: Annotated[ServiceArgs, tyro.conf.OmitArgPrefixes] = ServiceArgs()


_DECODE_FLAGS = ("window_size", "ngram_size", "guess_set_size", "trie_nodes", "branch_length", "prefill_chunk")


@dataclass(frozen=True)
class Plan:
    """The plan of a model on a number of GPUs."""

    planned: Planned
    facts: ModelFacts
    gpu: Gpu
    decode: DecodeConfig
    dtype: str
    context: int
    rows: list[Footprint]
    machine: Machine
    temperatures: tuple[float, ...]
    """The requested one, for which a mesh is recommended, and the other measured one."""
    predictions: dict[float, list[Prediction]]
    """By temperature, of the meshes that fit."""
    choice: Footprint | None
    reason: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 (nothing fits) or 2 (bad input)."""
    try:
        args = tyro.cli(Args, prog="lpr.plan", args=list(sys.argv[1:] if argv is None else argv))
        if args.list:
            print("models:", *preset_names())
            print("gpus:", *GPUS)
            print("links:", *LINKS)
            return 0
        if args.planned.service is not None:
            return plan_meshes(args)
        plan_service.refuse_without_service(args.planned)
        plan = make_plan(args)
    except InputError as failure:
        print(f"lpr.plan: error: {failure}", file=sys.stderr)
        return 2
    except SystemExit as leaving:  # the argument parser has said why
        return int(leaving.code or 0)
    if args.json:
        print(json.dumps(as_json(plan)))
    else:
        show(plan, wide_console())
    return 0 if plan.choice is not None else 1


def wide_console() -> Console:
    """The console for tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # a log file has no edge to wrap at
    return console


def plan_meshes(args: Args) -> int:
    """Plan the meshes of a service; returns the exit code: 0, or 1 if no number of meshes does. Raises InputError."""
    workload = plan_service.workload_of(args.planned)
    model = None
    if not workload.step_times:
        planned, gpu, machine, given = asked_for(args)
        facts = facts_of(planned.config, planned.name)
        meshes(args.gpus)
        dtype = facts.dtype if args.dtype == "auto" else args.dtype
        model = plan_service.Model(facts, gpu, machine, dtype, {**planned.decode, **given}, args.gpus)
    kinds = plan_service.kinds_of(args.planned, workload, model)
    progress = Console(stderr=True, quiet=args.json)
    answers = plan_service.plan_service(args.planned, workload, kinds, progress)
    if args.json:
        print(json.dumps(plan_service.as_json(args.planned, workload, answers, len(kinds))))
    else:
        plan_service.show(workload, answers, len(kinds), wide_console())
    return 0 if answers[0].num_meshes else 1


def make_plan(args: Args) -> Plan:
    """The plan that `args` ask for; raises InputError."""
    if args.context < 2:
        raise InputError(f"--context {args.context} leaves no room for a prompt token and an output token")
    planned, gpu, machine, given = asked_for(args)
    shapes = meshes(args.gpus)
    sizes: dict[str, Any] = {"max_length": args.context, "max_batch_size": args.batch}
    decode = DecodeConfig(**{**planned.decode, **sizes, **given})
    SamplingParams(temperature=args.temperature)
    facts = facts_of(planned.config, planned.name)
    if facts.max_positions is not None and args.context > facts.max_positions:
        raise InputError(f"--context {args.context} exceeds the {facts.max_positions} positions of {planned.name}")
    dtype = facts.dtype if args.dtype == "auto" else args.dtype
    rows = [footprint(facts, decode, mesh, args.context, DTYPE_SIZES[dtype]) for mesh in shapes]
    temperatures = (args.temperature, 0.0 if args.temperature > 0 else 0.8)
    # Half of the context: the mean length of the cache while it fills.
    measured, kv, size = read_measured(measured_values()), args.context // 2, DTYPE_SIZES[dtype]
    settings = [Setting(facts, machine, measured, kv, size, each, args.batch) for each in temperatures]
    fitting = [row.mesh for row in rows if row.fits(gpu.memory)]
    predictions = {
        temperature: [predict(setting, mesh) for mesh in fitting]
        for temperature, setting in zip(temperatures, settings, strict=True)
    }
    choice, reason = recommend(rows, gpu, settings[0], predictions[args.temperature])
    return Plan(
        planned, facts, gpu, decode, dtype, args.context, rows, machine, temperatures, predictions, choice, reason
    )


def asked_for(args: Args) -> tuple[Planned, Gpu, Machine, dict[str, int]]:
    """The model, the GPU, the machine, and the given fields of DecodeConfig; raises InputError."""
    if args.model is None:
        raise InputError(f"--model is missing: a preset ({', '.join(preset_names())}), a folder, a file or a hub id")
    gpu = gpu_named(args.gpu)
    if args.gpu_memory is not None:
        gpu = replace(gpu, memory=parse_size(args.gpu_memory, "--gpu-memory"))
    if args.bandwidth is not None:
        gpu = replace(gpu, bandwidth=parse_bandwidth(args.bandwidth, "--bandwidth"))
    machine = Machine(gpu, Network(link_named(args.link or gpu.link), link_named(args.network)), args.eager)
    given = {name: getattr(args, name) for name in _DECODE_FLAGS if getattr(args, name) is not None}
    return resolve(args.model), gpu, machine, given


def link_named(name: str) -> Link:
    """A link of the table; raises InputError."""
    if name not in LINKS:
        raise InputError(f"link {name!r} is none of {', '.join(LINKS)}")
    return LINKS[name]


def recommend(
    rows: Sequence[Footprint], gpu: Gpu, setting: Setting, predictions: Sequence[Prediction]
) -> tuple[Footprint | None, str]:
    """The mesh with the most predicted tokens per second, or None if nothing fits; and the reason."""
    if not predictions:
        least = min((row for row in rows if row.problem is None), key=lambda row: row.total_bytes)
        missing = f"{-least.spare(gpu.memory) / GIB:.1f} GiB are missing on each GPU of {least.mesh}, the leanest mesh"
        return None, f"nothing fits: {missing}; take more GPUs, a shorter --context or a smaller --batch"
    ranked = sorted(predictions, key=lambda each: -each.tokens_per_second.mid)
    best = ranked[0]
    choice = next(row for row in rows if row.mesh == best.mesh)
    step = best.step
    reason = (
        f"predicted {best.tokens_per_second} tokens/s: {best.tokens_per_step:.2f} tokens per step of "
        f"{step.total * 1e3:.1f} ms (forward {step.forward * 1e3:.1f}, tp {step.tp * 1e3:.1f}, lp {step.lp * 1e3:.2f}, "
        f"host {step.host * 1e3:.1f})"
    )
    if len(ranked) == 1:
        return choice, f"{reason}; no other mesh fits"
    ratio = advantage(setting, best, ranked[1])
    verdict = "" if ratio.low > 1 else ", which is within the uncertainty: measure both"
    return choice, f"{reason}; {ratio.mid:.2f} times {ranked[1].mesh} ({ratio.low:.2f} to {ratio.high:.2f}){verdict}"


def show(plan: Plan, console: Console) -> None:
    """Print the table and the recommendation."""
    facts, gpu, decode = plan.facts, plan.gpu, plan.decode
    launch = "eager launches" if plan.machine.is_eager else "captured graphs"
    console.print(
        f"{facts.name} ({plan.planned.origin}): {facts.num_parameters / 1e9:.2f}B parameters in {plan.dtype}\n"
        f"context {plan.context}, batch {decode.max_batch_size}; W {decode.window_size}, N {decode.ngram_size}, "
        f"G {decode.guess_set_size}, trie {decode.trie_nodes}: {decode.resolved().num_nodes} nodes per rank and "
        f"sequence\n{gpu.name}: {gpu.memory / GIB:.0f} GiB, of which {RESERVED / GIB:.0f} stay free, "
        f"{gpu.bandwidth / 1e9:.0f} GB/s (data sheet), {plan.machine.network.inside.name}; {launch}"
    )
    console.print(plan_table(plan))
    for row in plan.rows:
        if row.problem is not None:
            console.print(f"{row.mesh} is impossible: {row.problem}")
    console.print(
        "tokens/s are PREDICTED and were never measured on a GPU; acceptance is that of the small bundled model on "
        "code, and the range does not cover another model or kind of text"
    )
    style = "green" if plan.choice is not None else "bold red"
    mesh = f"lp {plan.choice.mesh.lp} x tp {plan.choice.mesh.tp}: " if plan.choice is not None else ""
    console.print(f"[{style}]{mesh}[/{style}]{plan.reason}")


def plan_table(plan: Plan) -> Table:
    """A row per mesh."""
    table = Table(title="per GPU (GiB), per step, and tokens/s", title_justify="left")
    table.add_column("lp x tp")
    for name in ("weights", "K/V", "activ.", "spare", "lp: gathers, KiB", "tp: coll., MiB", "floor ms"):
        table.add_column(name, justify="right")
    for temperature in plan.temperatures:
        table.add_column("greedy" if temperature == 0 else f"T {temperature:g}", justify="right")
    rates = {
        (temperature, each.mesh): each.tokens_per_second
        for temperature, found in plan.predictions.items()
        for each in found
    }
    for row in plan.rows:
        if row.problem is not None:
            table.add_row(str(row.mesh), "", "", "", "[red]impossible[/red]")
            continue
        spare = row.spare(plan.gpu.memory)
        style = "green" if spare >= 0 else "red"
        mark = " <" if row is plan.choice else ""
        table.add_row(
            f"{row.mesh}{mark}",
            f"{row.weight_bytes / GIB:.2f}",
            f"{row.kv_bytes / GIB:.2f}",
            f"{row.activation_bytes / GIB:.2f}",
            f"[{style}]{spare / GIB:+.1f}[/{style}]",
            f"{row.lp.num_collectives}, {row.lp.payload_bytes / 1024:.1f}",
            f"{row.tp.num_collectives}, {row.tp.payload_bytes / 2**20:.1f}",
            f"{row.floor_seconds(plan.gpu.bandwidth) * 1e3:.2f}",
            *(str(rates.get((temperature, row.mesh), "")) for temperature in plan.temperatures),
        )
    return table


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    rates: dict[Mesh, list[dict[str, Any]]] = {}
    for temperature, found in plan.predictions.items():
        for each in found:
            values = {"temperature": temperature, **asdict(each.tokens_per_second)}
            rates.setdefault(each.mesh, []).append({**values, "tokens_per_step": each.tokens_per_step})
    rows = []
    for row in plan.rows:
        facts: dict[str, Any] = {"lp": row.mesh.lp, "tp": row.mesh.tp}
        facts |= {"possible": row.problem is None, "problem": row.problem}
        if row.problem is None:
            facts |= {"fits": row.fits(plan.gpu.memory), "spare_bytes": row.spare(plan.gpu.memory)}
            names = ("weight_bytes", "kv_bytes", "activation_bytes", "step_bytes")
            facts |= {name: getattr(row, name) for name in names}
            facts |= {
                "lp_traffic": asdict(row.lp),
                "tp_traffic": asdict(row.tp),
                "floor_ms": round(row.floor_seconds(plan.gpu.bandwidth) * 1e3, 4),
                "predicted_tokens_per_second": rates.get(row.mesh, []),
            }
        rows.append(facts)
    chosen = None if plan.choice is None else {"lp": plan.choice.mesh.lp, "tp": plan.choice.mesh.tp}
    return {
        "model": plan.facts.name,
        "origin": plan.planned.origin,
        "num_parameters": plan.facts.num_parameters,
        "dtype": plan.dtype,
        "gpu": asdict(plan.gpu),
        "link": plan.machine.network.inside.name,
        "network": plan.machine.network.between.name,
        "launch": "eager" if plan.machine.is_eager else "graphs",
        "reserved_bytes": RESERVED,
        "context": plan.context,
        "batch": plan.decode.max_batch_size,
        "nodes_per_rank": plan.decode.resolved().num_nodes,
        "meshes": rows,
        "recommended": chosen,
        "reason": plan.reason,
    }
