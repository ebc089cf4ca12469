"""One rank of a tensor-parallel job: runs the cases of a JSON file one after the other and writes what came.

`torchrun --nproc_per_node=4 tests/fakes/tp_worker.py JOB.json`, with {"tp": 2, "cases": {NAME: {"model", "backend",
"fault"}}, "commands": [arguments of lpr.generate, ...], "output": FILE}. Many cases share a job, as each start of
processes costs seconds. `python tests/fakes/tp_worker.py JOB.json 4` forks the ranks behind the imports, which are most
of that.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.auto.configuration_auto import model_type_to_module_name

import lpr.cli.generate
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.core.passes import Passes
from lpr.dist.comm import ProcessComm
from lpr.dist.errors import CommError
from lpr.dist.runtime import World, join, leave
from lpr.engine import prepare, sizing
from lpr.engine.exchange import DesyncError
from lpr.model import parallel
from lpr.model.attention import native as native_attention
from lpr.model.cpu.products import PrepackedLinear, PrepackedProducts
from lpr.model.fused.decoder_layer import DecoderLayer
from lpr.model.graph_capture import Capturer, Program
from lpr.model.loader import load
from lpr.model.low_bit.copy import LowBitCopy
from lpr.model.low_bit.products import LowBitLinear
from lpr.model.parallel import TensorParallel, local_shapes
from lpr.model.recurrent import split_heads
from lpr.model.rewrite.base import done_to, undo
from lpr.model.rewrite.compiled_model import refusal
from lpr.model.rewrite.sharded_layers import local
from lpr.model.rewrite.table import FUSED
from tests.fakes.altered_gather import change_sent
from tests.fakes.compared import PLAIN, SHAPES, Group, Worlds
from tests.fakes.forked_ranks import fork_ranks
from tests.fakes.known_checks import known_check
from tests.fakes.rewriting import merge_projections

PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [2, 4], [(i * i) % 97 for i in range(70)]]
PARAMS = [SamplingParams(max_new_tokens=16, temperature=0.8 * (i % 2), seed=i) for i in range(2) for _ in PROMPTS]
FEW = [replace(each, max_new_tokens=12) for each in PARAMS]
NUM_EXACT = 10
"""Tokens of each of three prompts that are decoded in exact mode."""
DECODE = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=3)


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that a forward calls, as they reach the process groups."""

    num_calls = 0
    num_bytes = 0
    """Of what was gathered."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "c10d" in func.namespace and ("reduce" in func.name() or "gather" in func.name()):
            self.num_calls += 1
            if "gather" in func.name():
                self.num_bytes += sum(each.nbytes for each in tree_leaves(args) if isinstance(each, torch.Tensor))
        return func(*args, **(kwargs or {}))


def held_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of this rank's weights, those in panels too."""
    packed = {name: each for name, each in model.named_modules() if isinstance(each, PrepackedLinear)}
    return local_shapes(model) | {f"{name}.weight": tuple(each.weight.shape) for name, each in packed.items()}


def run_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Both ways of decoding, and the logits of a plain forward."""
    plain = DecodeConfig.autoregressive(max_batch_size=3)
    engine = Engine.from_pretrained(case["model"], plain, comm=comm, tp_backend=case["backend"])
    assert engine.tokenizer is None
    if case.get("fault") == "state":  # which ends the job
        engine.configure(DECODE)
        inject("state", engine, comm)
        engine.generate(PROMPTS * 2, PARAMS)
    inputs = torch.tensor(PROMPTS[2:])
    with torch.no_grad(), CountCollectives() as counted:
        logits = engine.model.model(input_ids=inputs, use_cache=False).logits
    prompts = PROMPTS * 2
    part = engine.model.sampler.part
    engine.model.sampler.part = None
    with CountCollectives() as counted_whole:
        whole = [each.token_ids for each in engine.generate(prompts, PARAMS)]
    engine.model.sampler.part = part
    with CountCollectives() as counted_in_parts:
        expected = [each.token_ids for each in engine.generate(prompts, PARAMS)]
    engine.configure(DECODE)
    inject(case.get("fault"), engine, comm)
    done = engine.generate(prompts, PARAMS)
    return {
        "expected": expected,
        "token_ids": [each.token_ids for each in done],
        "num_steps": sum(each.stats.num_steps for each in done),
        "logits": logits[0].tolist(),
        "mesh": [comm.size, comm.tp_size],
        "shapes": held_shapes(engine.model.model),
        "kv_heads": engine.replica.like.layer_tensors[0][0].shape[1],
        "collectives": counted.num_calls,
        "first_token": part.first if part is not None else None,
        "same_as_gathered": whole == expected,
        "not_compiled": refusal(engine.model.model),
        "rewrites": {name: len(names) for name, names in done_to(engine.model.model).items()},
        "gathered_bytes": [counted_whole.num_bytes, counted_in_parts.num_bytes],
    }


def exact_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """What differs between plain decoding and trees in exact mode, under one split."""
    plain = DecodeConfig.autoregressive(max_batch_size=1)
    engine = Engine.from_pretrained(case["model"], plain, comm=comm, exact=True, dtype=case["dtype"])
    assert engine.model.exact and engine.model.adapter.gemm_rows is not None
    params = [replace(each, max_new_tokens=NUM_EXACT) for each in PARAMS[2:5]]
    worlds = Worlds(None, case["dtype"], exact=True, engine=engine)
    found = Group(worlds, PROMPTS, params).run(["both, batch of 4, fills of 32", "window"])
    return {"found": found, "mesh": [comm.size, comm.tp_size], "shapes": held_shapes(engine.model.model)}


def exact_ranks_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Trees that the processes share, in exact mode, against plain decoding that this one has done alone."""
    alone = Engine.from_pretrained(case["model"], PLAIN, exact=True, dtype=case["dtype"])
    params = [replace(each, max_new_tokens=NUM_EXACT) for each in PARAMS[2:5]]
    group = Group(Worlds(None, case["dtype"], exact=True, engine=alone), PROMPTS, params)
    group.decode_plainly()
    if case.get("fault") == "threads" and comm.rank:
        torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        engine = Engine.from_pretrained(case["model"], PLAIN, comm=comm, exact=True, dtype=case["dtype"])
    finally:
        torch.set_num_threads(1)
    if case.get("fault") == "rounding" and comm.rank:
        attend_pages, in_one_call = native_attention.attend_pages, DecoderLayer._in_one_call
        native_attention.attend_pages = lambda *given: attend_pages(*given) * (1 + 2**-23)
        DecoderLayer._in_one_call = lambda *given: in_one_call(*given) * (1 + 2**-23)  # type: ignore[method-assign]
    shape = SHAPES["both, batch of 4, 2 ranks that share every tree"]
    texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, group.outputs, strict=True)]
    outputs, digests, steps = group.watched(engine, shape, texts)
    return {
        "same_ids": outputs == group.outputs,
        "steps": steps,
        "chosen_here": [list(key) for key in digests if key in group.digests],
        "differ": sum(digests[key] != group.digests[key] for key in digests if key in group.digests),
        "mesh": [comm.size, comm.tp_size],
    }


def drafting_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Ids of trees of a model with recurrent layers or sparse attention, and the states that a rank holds."""
    places, plan = split_heads.Cut.places, parallel.own_plan
    if case.get("fault") == "columns":  # one range, in place of the same share of every part
        split_heads.Cut.places = lambda cut, rank, tp: torch.arange(cut.size(tp)) + rank * cut.size(tp)  # type: ignore
    elif case.get("fault") == "whole":
        parallel.own_plan = lambda model, stock: {}  # type: ignore[assignment]
    try:
        engine = Engine.from_pretrained(case["model"], DECODE, comm=comm)
    finally:
        split_heads.Cut.places, parallel.own_plan = places, plan  # type: ignore[method-assign]
    done, before = engine.generate(PROMPTS * 2, PARAMS), engine.scheduler.counts.hits
    cache = engine.model.cache
    assert cache is not None
    found = {
        "weight_bytes": sum(local(each).nbytes for each in engine.model.model.state_dict().values()),
        "token_ids": [each.token_ids for each in done],
        "state_bytes": engine.replica.like.states.bytes_per_place,
    }
    if case.get("fault"):
        return found
    again, hits = engine.generate(PROMPTS * 2, PARAMS), engine.scheduler.counts.hits - before
    token_bytes = cache.bytes_per_token
    engine.configure(replace(DECODE, kv_tokens=144 + 48 * comm.size, max_length=112))
    crowded = engine.generate(PROMPTS[2:] * 3, PARAMS[2:3] * 3)
    return {
        **found,
        "same_again": [each.token_ids for each in again] == [each.token_ids for each in done],
        "crowded_ids": [each.token_ids for each in crowded],
        "preemptions": engine.scheduler.counts.preemptions,
        "hits": hits,
        "token_bytes": token_bytes,
        "steps": sum(each.stats.num_steps for each in done),
        "mesh": [comm.size, comm.tp_size],
        "shapes": held_shapes(engine.model.model),
    }


def adapters_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Ids of a mixed batch of adapters, of which each rank has its part."""
    folders = json.loads(case["adapters"])
    engine = Engine.from_pretrained(
        case["model"], DECODE, comm=comm, lora_modules=folders, exact=case["exact"] == "yes"
    )
    asked = [(name, prompt) for prompt in PROMPTS for name in (None, *folders)]
    params = SamplingParams(max_new_tokens=16)
    done = engine.generate([prompt for _, prompt in asked], params, adapter=[name for name, _ in asked])
    return {"token_ids": [each.token_ids for each in done], "bytes": engine.model.bank.num_bytes}


def head_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Ids of a checkpoint whose prediction head guesses, and what came of its guesses."""
    sizes = {} if case["adaptive"] == "yes" else {"window_size": 0, "trie_nodes": 16}
    decode = DecodeConfig(max_batch_size=3, draft_heads="on", **sizes)  # type: ignore[arg-type]
    engine = Engine.from_pretrained(case["model"], decode, comm=comm)
    guesser = engine.model.guesser
    assert guesser is not None
    if case.get("fault") == "order":  # the parts of the output head
        head = guesser.lm_head
        guesser.lm_head = lambda states: head(states).roll(head.out_features // 2, -1)
    done = engine.generate(PROMPTS * 2, FEW)
    heads = [each.stats.sources["head"] for each in done]
    found = [sum(each.drafted for each in heads), sum(each.accepted for each in heads)]
    return {
        "token_ids": [each.token_ids for each in done],
        "guesses": found,
        "has_pace": engine.replica.pace is not None,
    }


def copy_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Ids of a job whose ranks have parts of a low-bit copy: all ranks, or those of the last replica, which drafts."""
    ranks = int(case["draft_ranks"])
    engine = Engine.from_pretrained(case["model"], DECODE, comm=comm, draft_ranks=ranks, self_draft=case["form"])
    drafter = engine.model.self_drafter
    if drafter is not None and case["fixed"] == "yes":
        drafter.passes = Passes(fixed=4)
    if drafter is not None and case["fault"] == "sum":
        assert isinstance(drafter.copy, LowBitCopy)
        for module in drafter.copy.modules():
            if isinstance(module, LowBitLinear):
                module.pack.group = None
    done = engine.generate(PROMPTS * 2, PARAMS)
    copies = [each.stats.sources["copy"] for each in done if "copy" in each.stats.sources]
    names = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"
    modules = dict(engine.model.model.named_modules())
    kinds = [type(modules[name]).__name__ for name in names if name in modules]
    return {
        "token_ids": [each.token_ids for each in done],
        "accepted": sum(each.accepted for each in copies),
        "steps": sum(each.stats.num_steps for each in done),
        "kinds": kinds,
    }


class Direct(Capturer):
    """Captures nothing, and runs each program where a GPU would capture it."""

    def capture(self, program: Program) -> Program:
        program()
        return program


def compiled_case(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Ids of captured steps whose projections are packed and which go through the compiler."""
    engine = Engine.from_pretrained(case["model"], DECODE, comm=comm)
    model, dynamo = engine.model, torch._dynamo.utils
    for each in (PrepackedProducts(), *FUSED):  # what a CPU has in their place
        undo(each, model.model)
    groups = merge_projections(model.model)
    torch._dynamo.reset()
    dynamo.counters.clear()
    model.compile(case.get("compiler", "eager"))
    model.capturer, model.adapter.packed, model.adapter.kv_bucket = Direct(), False, 256  # as on a GPU
    engine.configure(DECODE)
    engine.replica.watch.note()  # the test has changed the model, and not its program
    done = engine.generate(PROMPTS * 2, FEW)
    assert model.compiled is not None
    return {
        "token_ids": [each.token_ids for each in done],
        "steps": sum(each.stats.num_steps for each in done),
        "groups": groups,
        "forms": dynamo.counters["stats"]["unique_graphs"],
        "breaks": len(dynamo.counters["graph_break"]),
        "reasons": [model.compiled.reason, model.graph_reason],
    }


def load_only(case: dict[str, str], comm: ProcessComm) -> dict[str, object]:
    """Most memory of its own (no mapped files) that this rank took while it loaded, in MiB."""
    assert comm.tp_mesh is not None
    before = highest = anonymous_mib()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, anonymous_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        loaded = load(case["model"], tp=TensorParallel(comm.tp_mesh, case["backend"]))
    finally:
        done.set()
        watching.join()
    own = sum(local(parameter).nbytes for parameter in loaded.model.parameters()) / 2**20
    return {"peak_mib": highest - before, "own_mib": own}


def anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def inject(fault: str | None, engine: Engine, comm: ProcessComm) -> None:
    """Make the last rank of the world, a tp rank that is not authoritative, misbehave."""
    if fault is None or (comm.rank, comm.tp_rank) != (comm.size - 1, comm.tp_size - 1):
        return
    if fault == "lie":
        change_sent(engine.replica.exchange, lambda draft, local: (local + 1) % 90)
    elif fault == "state":
        engine.replica.drafts.shared.extend([3, 5, 7, 9, 40, 41, 42, 43, 44] * 3)
    else:
        raise AssertionError(fault)


def run_cases(job: dict[str, dict[str, dict[str, str]]], world: World, report: Path) -> None:
    results: dict[str, object] = {}
    with join(world, "cpu", 240.0, int(job["tp"])) as comm:  # type: ignore[call-overload]
        assert isinstance(comm, ProcessComm)
        for name, case in job["cases"].items():
            try:
                kinds = {
                    "load": load_only, "exact": exact_case, "ranks": exact_ranks_case, "trees": drafting_case,
                    "compiled": compiled_case, "adapters": adapters_case, "heads": head_case,
                    "copies": copy_case,
                }  # fmt: skip
                results[name] = kinds.get(name.partition("/")[0], run_case)(case, comm)
            except (InputError, DesyncError, CommError) as failure:
                results[name] = {"error": f"{type(failure).__name__}: {failure}"}
                if not isinstance(failure, InputError):
                    raise  # the ranks are out of step now
            finally:
                report.write_text(json.dumps(results))


def imports_of(job: dict[str, dict[str, dict[str, str]]]) -> set[str]:
    """Modules that each rank would import for the job's cases."""
    found = {"deepspeed" for case in job["cases"].values() if case.get("backend") == "deepspeed"}
    if found:
        os.environ["DS_ACCELERATOR"] = "cpu"  # as lpr.model.parallel has it
    for case in job["cases"].values():
        config = json.loads(Path(case["model"], "config.json").read_text())
        family = model_type_to_module_name(config["model_type"])
        found.add(f"transformers.models.{family}.modeling_{family}")
    return found


def main() -> int:
    prepare.self_check = known_check  # once for each kind of model; those with faults in them are checked each time
    sizing.ENOUGH = sizing.PATIENCE = sizing.LONGER = sizing.AGREE = 0.0  # as in tests/conftest.py
    job = json.loads(Path(sys.argv[1]).read_text())
    world = World.from_environment()
    report = Path(job["output"]).with_suffix(f".{world.rank}")
    try:
        run_cases(job, world, report)
    except (DesyncError, CommError):
        return 0  # a failure here would have the launcher end the others, before they notice and write their report
    codes = []
    for attempt, arguments in enumerate(job["commands"], 1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # the ranks meet anew
        codes.append(lpr.cli.generate.main(arguments))
    report.with_suffix(f".codes{world.rank}").write_text(json.dumps(codes))
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        fork_ranks(int(sys.argv[2]), *sorted(imports_of(json.loads(Path(sys.argv[1]).read_text()))))
    leave(main())
