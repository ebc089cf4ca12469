"""`python -m lpr.plan --service WORKLOAD`: how many meshes of which lp x tp keep a service's SLO, by simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import Progress

from lpr.cli.display import table
from lpr.config import PAGE_SIZE, DecodeConfig, InputError
from lpr.engine.limits import Limits
from lpr.planner.facts import DTYPE_SIZES, ModelFacts, measured_values
from lpr.planner.footprint import Mesh, footprint, meshes
from lpr.planner.prediction import Machine, Setting, read_measured
from lpr.planner.simulated.capacity import Answer, Effort, Kind, Search
from lpr.planner.simulated.costs import Points, measured_points, most_tokens_ahead, predicted_points, predicted_times
from lpr.planner.simulated.mesh import SimRequest
from lpr.planner.simulated.workload import Demand, Workload, check, read_times, read_workload


@dataclass(frozen=True, kw_only=True)
class ServiceArgs:
    """The service to plan. --model, --gpu and the like describe one mesh; --gpus is the largest."""

    service: Path | None = None
    """Plan a service: a TOML or JSON file with its arrivals, lengths, temperatures and SLO (configs/service/)."""
    rate: float | None = None
    """Requests a second, over the file's arrivals."""
    clients: int | None = None
    """Clients who ask again as soon as they are answered, over the file's arrivals."""
    first_token_ms: float | None = None
    """Promised time to the first token, over the file's."""
    per_token_ms: float | None = None
    """Promised mean time per token, over the file's."""
    slots: tuple[int, ...] = (4, 16, 64)
    """Requests that a replica decodes in one step (--max-batch-size of lpr.serve); the best of these counts."""
    simulated_requests: int = 1000
    """Requests of each simulated mesh."""
    simulated_meshes: int = 4
    """Most simulated meshes: the others differ from them by chance alone."""
    seed: int = 0
    """Seed of arrivals, lengths and accepted tokens; the same seed gives the same plan."""


def refuse_without_service(args: ServiceArgs) -> None:
    """Raise InputError for a flag of a service where none is planned."""
    for each in fields(args):
        if getattr(args, each.name) != each.default:
            raise InputError(f"--{each.name.replace('_', '-')} needs --service FILE, the service to plan")


class Model(NamedTuple):
    """The model, its machine, fields of DecodeConfig, and the size of the largest mesh."""

    facts: ModelFacts
    machine: Machine
    dtype: str
    decode: dict[str, Any]
    most_gpus: int


def workload_of(args: ServiceArgs) -> Workload:
    """The file's workload, changed by flags; raises InputError."""
    assert args.service is not None
    found = read_workload(args.service)
    if args.rate is not None or args.clients is not None:
        demand = Demand(rate=args.rate or 0.0, clients=args.clients or 0)
        found = msgspec.structs.replace(found, arrivals=demand)
    names = [name for name in ("first_token_ms", "per_token_ms") if getattr(args, name) is not None]
    slo = msgspec.structs.replace(found.slo, **{name: getattr(args, name) for name in names})
    found = msgspec.structs.replace(found, slo=slo)
    check(found)
    given = {"simulated-requests": (args.simulated_requests, 20), "simulated-meshes": (args.simulated_meshes, 1)}
    for name, (value, least) in {**given, "slots": (min(args.slots, default=1), 1)}.items():
        if value < least:
            raise InputError(f"--{name} must be at least {least}")
    return found


def kinds_of(args: ServiceArgs, workload: Workload, model: Model | None) -> list[Kind]:
    """The kinds of meshes to choose from; raises InputError without any."""
    assert args.service is not None
    slots = sorted(set(args.slots))
    if workload.step_times:
        decode, kinds = DecodeConfig(max_nodes=64), list[Kind]()
        for each, count in product(workload.step_times, slots):
            times, points = read_times(each, args.service.parent), measured_points(workload.tokens_per_step, count)
            kinds.append(Kind(Mesh(each.lp, each.tp), limits_of(each.lp, count, decode, points), times, points))
        return kinds
    assert model is not None
    shapes = [mesh for power in range(model.most_gpus.bit_length()) for mesh in meshes(1 << power)]
    found = [kind for mesh in shapes for kind in _kinds_of_mesh(mesh, slots, workload, model)]
    if not found:
        what = f"{model.facts.name} with {workload.context} tokens of context and {slots[0]} slots"
        raise InputError(f"{what} fits on no mesh of up to {model.most_gpus} {model.machine.gpu.name}")
    return found


def _kinds_of_mesh(mesh: Mesh, slots: list[int], workload: Workload, model: Model) -> Iterator[Kind]:
    size = DTYPE_SIZES[model.dtype]
    typical = round(workload.shared_prefix + workload.prompt.typical + workload.output.typical / 2)
    for count in slots:
        decode = DecodeConfig(**{**model.decode, "max_batch_size": count, "max_length": workload.context})
        memory = model.machine.gpu.memory
        row = footprint(model.facts, decode, mesh, workload.context, size, num_full=1)
        if not row.fits(memory):
            continue
        setting = Setting(model.facts, model.machine, read_measured(measured_values()), typical, size, None)
        times = predicted_times(setting, mesh, count, workload.context)
        if workload.tokens_per_step:
            points = measured_points(workload.tokens_per_step, count)
        else:
            points = predicted_points(setting, mesh, times, list(map(float, workload.temperature)), count)
        yield Kind(mesh, limits_of(mesh.lp, count, decode, points, row.pool_tokens(memory)), times, points)


def limits_of(
    num_ranks: int, num_slots: int, decode: DecodeConfig, points: Points, pool_tokens: int | None = None
) -> Limits[SimRequest]:
    """The scheduler's limits, as the engine sets them; without `pool_tokens` every slot has room for a full context."""
    num_ahead = max(decode.max_nodes * num_ranks, most_tokens_ahead(points, num_ranks))
    limits = Limits[SimRequest](
        num_slots, num_ranks, decode.prefill_chunk, decode.max_nodes, True, most_homes=num_ranks, num_ahead=num_ahead
    )
    if decode.max_length is None:
        return limits
    full = -(-(decode.max_length + num_ahead) // PAGE_SIZE)
    num_pages = num_slots * full if pool_tokens is None else max(full, pool_tokens // PAGE_SIZE)
    return replace(limits, num_pages=num_pages)


def plan_service(args: ServiceArgs, workload: Workload, kinds: list[Kind], console: Console) -> list[Answer]:
    """Answers by ascending GPUs, then by first token; kinds that cannot keep the SLO come last."""
    effort = Effort(args.simulated_requests, args.simulated_meshes, args.seed)
    searches = [Search(workload, kind, effort) for kind in kinds]
    answers = list[Answer]()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        row = bar.add_task("capacity of a mesh", total=2 * len(searches))
        possible = []
        for search, kind in zip(searches, kinds, strict=True):
            alone = search.alone()
            if alone.kept < workload.slo.share:
                answers.append(search.hopeless(alone))
            else:
                possible.append((search.least_gpus(most := search.most()), kind.mesh.num_gpus, most, search))
            bar.advance(row)
        bar.update(row, description="number of meshes", completed=2 * len(searches) - len(possible))
        best: int | None = None
        for least, _, most, search in sorted(possible, key=lambda each: each[:2]):
            if best is None or least <= best:  # else the load needs more GPUs even without an SLO
                answer = search.answer(search.capacity(most))
                answers.append(answer)
                best = min((each.num_gpus for each in answers if each.num_gpus is not None), default=None)
            bar.advance(row)
    return sorted(answers, key=lambda each: (each.num_gpus or float("inf"), each.outcome.first_token_ms[1]))


def show(workload: Workload, answers: list[Answer], num_kinds: int, console: Console) -> None:
    """Print the table and the recommendation."""
    demand, slo = workload.arrivals, workload.slo
    who = f"{demand.rate:g} requests/s" if demand.rate else f"{demand.clients} clients"
    console.print(
        f"{who}; {slo.share:.0%} of the requests: first token within {slo.first_token_ms:g} ms, "
        f"{slo.per_token_ms:g} ms per token"
    )
    columns = ("lp x tp", "slots", "per mesh", "meshes", "GPUs", "kept", "first token, ms", "per token, ms")
    rows = [cells(answer, answer is answers[0]) for answer in answers]
    console.print(table("meshes that keep the promise (p50 / p90 / p99)", (*columns, "tokens/step"), rows))
    for note in notes(workload, answers, num_kinds):
        console.print(note)
    console.print(verdict(answers), style="green" if answers[0].num_meshes else "bold red")


def cells(answer: Answer, is_first: bool) -> list[str]:
    """The table's row of a kind of mesh."""
    outcome, kind = answer.outcome, answer.kind
    numbers = ["", "[red]none[/red]", ""]
    if answer.num_meshes:
        numbers = [f"{answer.capacity:.3g}", str(answer.num_meshes), str(answer.num_gpus)]
    times = [
        " / ".join(f"{each:.3g}" if each < 1000 else f"{each:.0f}" for each in quantiles)
        for quantiles in (outcome.first_token_ms, outcome.per_token_ms)
    ]
    name = f"{kind.mesh}{' <' if is_first and answer.num_meshes else ''}"
    tokens = f"{outcome.tokens_per_step:.2f}"
    return [name, str(kind.limits.num_slots), *numbers, f"{outcome.kept:.1%}", *times, tokens]


def notes(workload: Workload, answers: list[Answer], num_kinds: int) -> list[str]:
    """Limits of the figures."""
    found, best = [], answers[0]
    if best.num_meshes and best.num_simulated < best.num_meshes:
        found.append(
            f"{best.num_simulated} of the {best.num_meshes} meshes were simulated: the others differ from them by "
            "chance alone, as requests are split by chance"
        )
    if num_kinds > len(answers):
        found.append(f"{num_kinds - len(answers)} further kinds of meshes need more GPUs whatever is promised")
    if not workload.step_times:
        found.append("step times are PREDICTED and were never measured on a GPU: step_times in the file replaces them")
    if not workload.tokens_per_step:
        found.append("tokens per step are those of the small bundled model on code: tokens_per_step replaces them")
    return found


def verdict(answers: list[Answer]) -> str:
    """The recommendation in a line."""
    best = answers[0]
    if best.num_meshes is None:
        return "no number of these meshes keeps the promise: see the latencies, and promise less"
    meshes = "1 mesh" if best.num_meshes == 1 else f"{best.num_meshes} meshes"
    mesh, slots = best.kind.mesh, best.kind.limits.num_slots
    return f"{meshes} of lp {mesh.lp} x tp {mesh.tp} with {slots} slots: {best.num_gpus} GPUs"


def as_json(args: ServiceArgs, workload: Workload, answers: list[Answer], num_kinds: int) -> dict[str, Any]:
    """The plan as plain values."""

    def rounded(value: Any) -> Any:
        return [round(each, 3) for each in value] if isinstance(value, tuple) else round(value, 4)

    rows = [
        {
            **asdict(each.kind.mesh),
            "slots": each.kind.limits.num_slots,
            "meshes": each.num_meshes,
            "gpus": each.num_gpus,
            "capacity_per_mesh": round(each.capacity, 6),
            "simulated_meshes": each.num_simulated,
            **{name: rounded(value) for name, value in asdict(each.outcome).items()},
        }
        for each in answers
    ]
    return {
        "workload": msgspec.to_builtins(workload),
        "seed": args.seed,
        "simulated_requests": args.simulated_requests,
        "kinds_considered": num_kinds,
        "kinds": rows,
        "recommended": rows[0] if answers[0].num_meshes else None,
        "reason": verdict(answers),
        "notes": notes(workload, answers, num_kinds),
    }
