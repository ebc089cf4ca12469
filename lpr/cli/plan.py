"""`python -m lpr.plan`: the lp x tp meshes of a model: memory, traffic, predicted speed. No weights, no GPU."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from lpr.cli.display import table
from lpr.cli.flags import read_flags
from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.model.graphs import MOST_COMMON
from lpr.model.loader import DTYPES
from lpr.model.low_bit.products import FORMS
from lpr.model.reserve import CONTEXT, MemoryNeeds
from lpr.model.rewrite.table import dry_run
from lpr.planner.facts import DTYPE_SIZES, ModelFacts, Planned, facts_of, measured_values, preset_names, resolve
from lpr.planner.footprint import Footprint, Mesh, copy_bytes, footprint, meshes, requests_at_once, step_launches
from lpr.planner.hardware import DEFAULT_GPU, GIB, GPUS, LINKS, Network, gpu_named, parse_bandwidth, parse_size
from lpr.planner.prediction import Machine, Prediction, Setting, advantage, predict, read_measured
from lpr.planner.roles import Compared, compare


@dataclass(frozen=True, kw_only=True)
class Args:
    """Plan the mesh of a model without any GPU: memory, traffic, least time of a step, tokens per second.

    Reads only the model's config. Budgets (window, guesses, trie nodes) are per rank, as in lpr.generate. Tokens per
    second are predictions (lpr.planner.prediction); they take the best of the measured drafting budgets instead.
    """

    model: str | None = None  # A preset (--list), a folder, a config.json, a hub id, or a TOML file of configs/.
    gpus: int = 8  # GPUs of the job: lp x tp.
    gpu: str = DEFAULT_GPU  # Kind of GPU: its memory, bandwidth and arithmetic by the data sheet.
    gpu_memory: str | None = None  # Memory of a GPU, such as 80GiB, over --gpu's.
    bandwidth: str | None = None  # Memory bandwidth of a GPU, such as 2039GB/s, over --gpu's.
    link: str | None = None  # Link between the GPUs of a host (see --list), over --gpu's.
    network: str = "ib-hdr"  # Link between hosts of eight GPUs.
    temperature: float = 0.0
    """0 is greedy. The mesh is recommended for this; the prediction for greedy or 0.8 is shown too."""
    eager: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Launch kernels one by one, without captured graphs.
    context: int = 4096  # Longest prompt plus output, in tokens.
    batch: int = 1  # Sequences decoded in one step.
    request_tokens: int = 1024
    """Prompt and output of a typical request, for the number of such requests that the KV cache holds at once."""
    shared_tokens: int = 0  # Tokens that all of them begin with, whose K/V is held once.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: the checkpoint's own.
    kv_dtype: Literal["auto", "fp8"] = "auto"  # fp8: K/V in 8 bits. auto: as the model.
    window_size: int | None = None  # W. Default: the preset's, or lpr's. The same holds for the next five.
    ngram_size: int | None = None  # N.
    guess_set_size: int | None = None  # G.
    trie_nodes: int | None = None  # Node budget of the trie.
    branch_length: int | None = None  # Longest branch of a draft.
    prefill_chunk: int | None = None  # Longest pending chain evaluated in one step.
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Print the names of presets, GPUs and links.
    rewrites: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print what an engine would change of the model's modules on a GPU and on a CPU, and why not the rest."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Print one JSON line instead of tables.


_DECODE_FLAGS = ("window_size", "ngram_size", "guess_set_size", "trie_nodes", "branch_length", "prefill_chunk")


@dataclass(frozen=True)
class Plan:
    """The plan of a model on a number of GPUs."""

    planned: Planned
    facts: ModelFacts
    decode: DecodeConfig
    dtype: str
    rows: list[Footprint]
    machine: Machine
    predictions: dict[float, list[Prediction]]  # by temperature, the requested one first, of the meshes that fit
    divided: dict[float, list[Compared]]
    """By temperature, divisions into verifying and draft-only ranks for one sequence, the fastest first."""
    choice: Footprint | None
    reason: str
    request_tokens: int
    shared_tokens: int

    def pool(self, row: Footprint) -> tuple[int, int]:
        """Tokens of each rank's KV cache, and typical requests at once on all ranks."""
        tokens, lp = row.pool_tokens(self.machine.gpu.memory), row.mesh.lp
        ahead = self.decode.resolved(lp).evaluated_capacity(lp)
        return tokens, lp * requests_at_once(tokens, self.request_tokens, self.shared_tokens, ahead)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 (nothing fits) or 2 (bad input)."""
    try:
        args = read_flags(Args, "lpr.plan", argv)
        if args.list:
            print("models:", *preset_names())
            print("gpus:", *GPUS)
            print("links:", *LINKS)
            return 0
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 140  # a log file has no edge to wrap at
        if args.rewrites:
            show_rewrites(args, console)
            return 0
        plan = make_plan(args)
    except InputError as failure:
        print(f"lpr.plan: error: {failure}", file=sys.stderr)
        return 2
    except SystemExit:  # after --help
        return 0
    if args.json:
        print(json.dumps(as_json(plan)))
    else:
        show(plan, console)
    return 0 if plan.choice is not None else 1


def make_plan(args: Args) -> Plan:
    """The plan that `args` ask for; raises InputError."""
    if args.context < 2:
        raise InputError(f"--context {args.context} leaves no room for a prompt token and an output token")
    if not 0 <= args.shared_tokens <= args.request_tokens or args.request_tokens < 2:
        flags = f"--request-tokens {args.request_tokens} and --shared-tokens {args.shared_tokens}"
        raise InputError(f"{flags}: a request has 2 tokens or more, of which it shares some")
    shapes = meshes(args.gpus)
    SamplingParams(temperature=args.temperature)
    planned, facts, machine, dtype, given = asked_for(args)
    sizes: dict[str, Any] = {"max_length": args.context, "max_batch_size": args.batch}
    decode = DecodeConfig(**{**planned.decode, **sizes, **given})
    if facts.max_positions is not None and args.context > facts.max_positions:
        raise InputError(f"--context {args.context} exceeds the {facts.max_positions} positions of {planned.name}")
    size = DTYPE_SIZES[dtype]
    num_graphs = 0 if args.eager else MOST_COMMON
    rows = [footprint(facts, decode, mesh, args.context, size, num_graphs=num_graphs) for mesh in shapes]
    # Half of the context: the mean length of the cache while it fills.
    measured, kv = read_measured(measured_values()), args.context // 2
    asked = Setting(facts, machine, measured, kv, size, args.temperature, args.batch)
    fitting = [row.mesh for row in rows if row.fits(machine.gpu.memory)]
    temperatures = args.temperature, 0.0 if args.temperature > 0 else 0.8
    predictions = {at: [predict(replace(asked, temperature=at), mesh) for mesh in fitting] for at in temperatures}
    divided = {at: compare(replace(asked, temperature=at), args.gpus, measured_values()) for at in temperatures}
    choice, reason = recommend(rows, asked, predictions[args.temperature])
    tokens = args.request_tokens, args.shared_tokens
    return Plan(planned, facts, decode, dtype, rows, machine, predictions, divided, choice, reason, *tokens)


def asked_for(args: Args) -> tuple[Planned, ModelFacts, Machine, str, dict[str, int]]:
    """The model, its facts, the machine, the dtype, and the given fields of DecodeConfig; raises InputError."""
    if args.model is None:
        raise InputError(f"--model is missing: a preset ({', '.join(preset_names())}), a folder, a file or a hub id")
    gpu = gpu_named(args.gpu)
    if args.gpu_memory is not None:
        gpu = replace(gpu, memory=parse_size(args.gpu_memory, "--gpu-memory"))
    if args.bandwidth is not None:
        gpu = replace(gpu, bandwidth=parse_bandwidth(args.bandwidth, "--bandwidth"))
    inside, between = args.link or gpu.link, args.network
    for name in (inside, between):
        if name not in LINKS:
            raise InputError(f"link {name!r} is none of {', '.join(LINKS)}")
    machine = Machine(gpu, Network(LINKS[inside], LINKS[between]), args.eager)
    given = {name: getattr(args, name) for name in _DECODE_FLAGS if getattr(args, name) is not None}
    planned = resolve(args.model)
    facts = replace(facts_of(planned.config, planned.name), kv_in_fp8=args.kv_dtype == "fp8")
    return planned, facts, machine, facts.dtype if args.dtype == "auto" else args.dtype, given


def show_rewrites(args: Args, console: Console) -> None:
    """Print, for a GPU and for a CPU, a line for each rewrite; raises InputError."""
    planned, _, _, dtype, _ = asked_for(args)
    found = {}
    torch.set_num_threads(1)  # the tests of modules are small
    for device in (torch.device("cuda"), torch.device("cpu")):
        chosen = "float32" if device.type == "cpu" and args.dtype == "auto" else dtype
        found[f"{planned.name} on a {device.type.upper()}, {chosen}"] = dry_run(planned.config, device, DTYPES[chosen])
    if args.json:
        print(json.dumps({title: [asdict(line) for line in lines] for title, lines in found.items()}))
        return
    for title, lines in found.items():
        rows = [(line.name, str(line.num_modules), line.reason or "applied") for line in lines]
        console.print(table(title, ("change", "modules", "applied, or why not"), rows))


def recommend(
    rows: Sequence[Footprint], setting: Setting, predictions: Sequence[Prediction]
) -> tuple[Footprint | None, str]:
    """The mesh with the most predicted tokens per second, or None if nothing fits; and the reason."""
    if not predictions:
        least = min((row for row in rows if row.problem is None), key=lambda row: row.total_bytes)
        missing = f"{(least.total_bytes - setting.machine.gpu.memory) / GIB:.1f} GiB are missing on each GPU"
        advice = "take more GPUs, a shorter --context or a smaller --batch"
        return None, f"nothing fits: {missing} of {least.mesh}, the leanest mesh; {advice}"
    ranked = sorted(predictions, key=lambda each: -each.tokens_per_second.mid)
    best, step = ranked[0], ranked[0].step
    choice = next(row for row in rows if row.mesh == best.mesh)
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
    facts, gpu, decode = plan.facts, plan.machine.gpu, plan.decode
    launch = "eager launches" if plan.machine.is_eager else "captured graphs"
    console.print(
        f"{facts.name} ({plan.planned.origin}): {facts.num_parameters / 1e9:.2f}B parameters in {plan.dtype}"
        f"{', K/V in FP8' if facts.kv_in_fp8 else ''}"
        f"{f', those of linear layers as {facts.low_bit} has them' if facts.low_bit else ''}\n"
        f"context {decode.max_length}, batch {decode.max_batch_size}; W {decode.window_size}, N {decode.ngram_size}, "
        f"G {decode.guess_set_size}, trie {decode.trie_nodes}: {decode.resolved().num_nodes} nodes per rank and "
        f"sequence\n{gpu.name}: {gpu.memory / GIB:.0f} GiB, "
        f"{gpu.bandwidth / 1e9:.0f} GB/s (data sheet), {plan.machine.network.inside.name}; {launch}"
    )
    columns = ["lp x tp", "weights", "K/V", "activ.", "spare", "lp: gathers, KiB", "tp: coll., MiB", "floor ms"]
    columns += ["pool, tokens", "requests"]
    columns += ["greedy" if temperature == 0 else f"T {temperature:g}" for temperature in plan.predictions]
    console.print(table("per GPU (GiB), per step, and tokens/s", columns, [cells(plan, row) for row in plan.rows]))
    rows = [memory_cells(plan, row, row.needs) for row in plan.rows if row.needs is not None]
    console.print(table("memory of a GPU once the pool is made (GiB)", _PARTS, rows))
    what = f", the first {plan.shared_tokens} of them shared" if plan.shared_tokens else ""
    console.print(
        "loading: what is read beside its place; layers, logits and graphs of the largest steps. Context, NCCL, graphs "
        "and workspaces are ESTIMATED\n"
        f"pool: K/V that each rank has room for; requests: how many of {plan.request_tokens} tokens{what} run at once"
    )
    if facts.low_bit is None:
        sizes = copies_of(plan).items()
        copies = "; ".join(f"{form} {size / GIB:.2f}, {size / gpu.bandwidth * 1e3:.2f} ms" for form, size in sizes)
        console.print(
            f"a copy that drafts (--self-draft, tp 1), GiB and least time of a pass: {copies}; "
            "making one took 2 s for 135M parameters on a core"
        )
        show_divided(plan, console)
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


def show_divided(plan: Plan, console: Console) -> None:
    """Print the divisions into verifying and draft-only ranks, for one sequence: the best form of a copy for each."""
    what = (f"{'greedy' if at == 0 else f'T {at:g}'}: copy, tokens a step, tokens/s" for at in plan.divided)
    names = list(dict.fromkeys(str(each.roles) for found in plan.divided.values() for each in found))
    best = {at: {str(each.roles): each for each in reversed(found)} for at, found in plan.divided.items()}
    if names:
        rows = [(name, *(str(best[at][name]) for at in plan.divided)) for name in names]
        title = "ranks that draft with a copy, one sequence, simulated"
        console.print(table(title, ("verify + draft", *what), rows))
        console.print("--draft-ranks runs divisions with one tp for all; several copies are counted as one")


def copies_of(plan: Plan) -> dict[str, int]:
    return {form: copy_bytes(plan.facts, form) for form in FORMS}


def rates(plan: Plan, mesh: Mesh) -> dict[float, Prediction]:
    """The predictions for a mesh by temperature; none where the model does not fit."""
    return {at: each for at, found in plan.predictions.items() for each in found if each.mesh == mesh}


def cells(plan: Plan, row: Footprint) -> list[str]:
    if row.problem is not None:
        return [str(row.mesh), "", "", "", "[red]impossible[/red]"]
    spare = (plan.machine.gpu.memory - row.total_bytes) / GIB
    return [
        f"{row.mesh}{' <' if row is plan.choice else ''}",
        *(f"{each / GIB:.2f}" for each in (row.weight_bytes, row.kv_bytes, row.activation_bytes)),
        f"[{'green' if spare >= 0 else 'red'}]{spare:+.1f}[/]",
        f"{row.lp.num_collectives}, {row.lp.payload_bytes / 1024:.1f}",
        f"{row.tp.num_collectives}, {row.tp.payload_bytes / 2**20:.1f}",
        f"{row.step_bytes / plan.machine.gpu.bandwidth * 1e3:.2f}",
        *(f"{each:,}" for each in plan.pool(row)),
        *(str(each.tokens_per_second) for each in rates(plan, row.mesh).values()),
    ]


_PARTS = (
    "lp x tp", "context", "weights", "loading", "NCCL", "layers", "logits", "graphs", "workspaces", "K/V pool", "left"
)  # fmt: skip


def memory_cells(plan: Plan, row: Footprint, needs: MemoryNeeds) -> list[str]:
    """The row of a mesh in the table of memory."""
    parts = (*asdict(needs).values(), row.pool_tokens(plan.machine.gpu.memory) * row.kv_token_bytes + row.state_bytes)
    left = row.left_bytes(plan.machine.gpu.memory)
    shown = f"[{'green' if left >= 0 else 'red'}]{left / GIB:+.1f}[/]"
    return [str(row.mesh), *(f"{each / GIB:.2f}" for each in parts), shown]


def row_json(plan: Plan, row: Footprint) -> dict[str, Any]:
    """A mesh as plain values; of an impossible one, the reason alone."""
    found: dict[str, Any] = asdict(row.mesh) | {"possible": row.problem is None, "problem": row.problem}
    if row.problem is not None:
        return found
    gpu, sizes = plan.machine.gpu, asdict(row)
    found |= {"fits": row.fits(gpu.memory), "spare_bytes": gpu.memory - row.total_bytes}
    found |= {name: getattr(row, name) for name in ("weight_bytes", "kv_bytes", "activation_bytes", "step_bytes")}
    found |= {"memory": sizes["needs"], "left_bytes": row.left_bytes(gpu.memory)}
    found |= dict(zip(("pool_tokens", "requests_at_once"), plan.pool(row), strict=True))
    predicted = [
        {"temperature": at, **asdict(each.tokens_per_second), "tokens_per_step": each.tokens_per_step}
        for at, each in rates(plan, row.mesh).items()
    ]
    floor = round(row.step_bytes / gpu.bandwidth * 1e3, 4)
    traffic = {"lp_traffic": sizes["lp"], "tp_traffic": sizes["tp"]}
    launches = step_launches(plan.facts, row.mesh.tp)
    return {**found, **traffic, "launches": launches, "floor_ms": floor, "predicted_tokens_per_second": predicted}


def as_json(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.facts.name,
        "origin": plan.planned.origin,
        "num_parameters": plan.facts.num_parameters,
        "dtype": plan.dtype,
        "low_bit": plan.facts.low_bit,
        "copy_bytes": copies_of(plan),
        "gpu": asdict(plan.machine.gpu),
        "link": plan.machine.network.inside.name,
        "network": plan.machine.network.between.name,
        "launch": "eager" if plan.machine.is_eager else "graphs",
        "reserved_bytes": CONTEXT,
        "context": plan.decode.max_length,
        "batch": plan.decode.max_batch_size,
        "request_tokens": plan.request_tokens,
        "shared_tokens": plan.shared_tokens,
        "nodes_per_rank": plan.decode.resolved().num_nodes,
        "draft_ranks": [{"temperature": at, **each.as_json()} for at, found in plan.divided.items() for each in found],
        "meshes": [row_json(plan, row) for row in plan.rows],
        "recommended": None if plan.choice is None else asdict(plan.choice.mesh),
        "reason": plan.reason,
    }
