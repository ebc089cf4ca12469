"""Prepares a loaded model for tree steps, and checks it on all ranks before anything is decoded."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from lpr.config import DecodeConfig, InputError, first_line
from lpr.core.digest import digest_of
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, agree, is_alone, is_driver
from lpr.engine.exchange import check_replica, common_gemm_rows, decide_as_first, worst_of_replica
from lpr.engine.options import EngineOptions, KvDtype, load_step_times
from lpr.model.cpu.tiles import can_tile
from lpr.model.heads.head import DraftHead
from lpr.model.kv_cache import KVCache
from lpr.model.loader import Loaded, head_digest, lack_of_memory, load, model_digest, tokenizer_digest
from lpr.model.low_bit.copy import LowBitCopy, make_copy, why_no_copy_in
from lpr.model.low_bit.products import Form
from lpr.model.parallel import TensorParallel
from lpr.model.rewrite.base import Setting, Stage
from lpr.model.rewrite.sharded_layers import vocabulary_head
from lpr.model.rewrite.table import COMPILED, rewrite, undo_forwards, why_not
from lpr.model.runner import SharedWeights, TreeModel
from lpr.model.self_check import check_compiled, self_check

logger = logging.getLogger(__name__)

_KIND = "kind of processor or version of torch (exact mode needs one of all ranks)"
_THREADS = "number of threads (exact mode needs one of all ranks)"
_KERNELS = "result of matrix products (exact mode needs the same bits of all ranks)"


def set_roles(options: EngineOptions, comm: Comm) -> None:
    """Make the last `options.draft_ranks` ranks of the job draft-only; raises InputError if that is impossible."""
    if not 0 <= options.draft_ranks < comm.num_replicas and options.draft_ranks:
        lack = f"of the job's {comm.num_replicas} replicas at least one has to hold the model"
        raise InputError(f"draft_ranks={options.draft_ranks}: {lack}")
    comm.num_drafting = options.draft_ranks


def load_on_all(source: str, decode: DecodeConfig | None, options: EngineOptions, comm: Comm | None) -> Loaded:
    """Load a model, each tp rank its shard; raises InputError on all ranks if one fails."""
    set_roles(options, comm or Comm())
    loaded = failure = tp = None
    if comm is not None and comm.tp_mesh is not None:
        tp = TensorParallel(comm.tp_mesh, options.tp_backend)
    with_head = decode is None or decode.draft_heads != "off"
    try:
        loaded = load(source, options.dtype, options.device, tp, options.revision, with_head)
    except InputError as error:
        failure = str(error)
    if comm is not None:
        agree(comm, failure)
    if loaded is None:
        raise InputError(failure)
    return loaded


def prepare(
    loaded: Loaded, decode: DecodeConfig, options: EngineOptions, comm: Comm
) -> tuple[TreeModel, KVCache, StepTimes | None]:
    """The model prepared for steps, a template for its K/V cache, and on the driver the given step times.

    Raises InputError, on every rank, if the model cannot run a token tree, or if ranks differ in model, tokenizer or
    `decode` (in exact mode also in the kind of machine). A replica that joins a running mesh is compared with the
    replicas that started it.
    """
    set_roles(options, comm)
    # Tensor-parallel ranks must not enter a forward with different inputs.
    shared = None
    if comm.tp_size > 1:
        part = vocabulary_head(loaded.model)
        check_rows = partial(check_replica, comm, at_once=loaded.model.device.type == "cpu")
        gemm_rows, worst = partial(common_gemm_rows, comm), partial(worst_of_replica, comm)
        decide = partial(decide_as_first, comm)
        shared = SharedWeights(check_rows, gemm_rows, worst, decide, comm.tp_rank, comm.tp_size, part)
    model = TreeModel(loaded.model, options.attention, options.graphs, options.exact, shared)
    model.adapter.choose_clock(waits=not is_alone(comm))
    comm.before_close(model.release)
    failure, costs, like, compiles = None, None, None, False
    facts, replica_facts, own_head = {}, {}, 0
    is_compared = not is_alone(comm) or comm.membership is not None
    if is_compared:
        replica_facts["model"] = model_digest(loaded.model)
        own_head = head_digest(loaded.head)
    try:
        if options.kv_dtype not in (known := get_args(KvDtype)):
            raise InputError(f"kv_dtype {options.kv_dtype!r} is none of {', '.join(known)}")
        if options.kv_dtype == "fp8" and options.exact:
            raise InputError("kv_dtype='fp8' rounds K and V, which exact mode does not allow")
        has_head = loaded.head is not None and _wants_head(model, decode)
        setting = _setting(model, loaded, options, comm, has_head)
        refused = why_not(COMPILED, loaded.model, setting)
        if options.compile == "on" and refused is not None:
            raise InputError(refused)
        like = _rewritten(model, setting)
        compiles = why_not(COMPILED, loaded.model, setting) is None
        if options.kv_dtype == "fp8":
            if (why := why_no_fp8(model)) is not None:
                raise InputError(f"kv_dtype='fp8': {why}")
            like.in_fp8 = True
        if has_head:
            assert loaded.head is not None
            _use_head(model, loaded.head, like, setting)
        if not comm.serves or (options.self_draft != "off" and not comm.num_drafting):
            _use_copy(model, options, like, comm, decode.max_batch_size)
        model.sampler.check_part(model.adapter)
        longest_sequence(loaded, decode)
        if is_driver(comm):
            costs = load_step_times(options.costs) if isinstance(options.costs, Path) else options.costs
    except InputError as error:
        failure = str(error)
    except torch.OutOfMemoryError:
        failure = lack_of_memory("the weights and the first steps", model.device)
    agree(comm, failure)
    assert like is not None
    compiling = partial(_compile, model, like, options, decode) if compiles else lambda: None
    # The tp ranks of a replica compile together, because their forwards have collectives.
    failure = _failure_of(compiling) if comm.rank == 0 else None
    agree(comm, failure)
    if comm.rank != 0:  # after rank 0, so that they find its files in the compile cache
        failure = _failure_of(compiling)
    if is_compared:
        replica_facts["prediction head"] = own_head if model.guesser is not None else 0
        facts["configuration"] = digest_of(
            repr((decode, options.exact, options.self_draft, options.draft_ranks, options.kv_dtype))
        )
        facts["tokenizer"] = tokenizer_digest(loaded.tokenizer)
        facts["form of a batch (packed or padded)"] = int(model.packed)
        for name, value in _machine(model, options).items():
            (replica_facts if name == _KERNELS else facts)[name] = value
    agree(comm, failure, facts, replica_facts)
    if comm.membership is not None:
        comm.membership.compare({**facts, **replica_facts})
    if not comm.serves and loaded.is_ours:
        _keep_copy(model)
    return model, like, costs


def longest_sequence(loaded: Loaded, decode: DecodeConfig) -> int | None:
    """Longest sequence under `decode`, None without a limit; raises InputError if the model has fewer positions."""
    most, reason = loaded.max_positions, loaded.limit_reason
    if decode.max_length is not None and most and decode.max_length > most:
        why = f" ({reason})" if reason else ""
        raise InputError(f"max_length={decode.max_length} exceeds the model's {most} positions{why}")
    return decode.max_length or most


def _setting(model: TreeModel, loaded: Loaded, options: EngineOptions, comm: Comm, has_head: bool) -> Setting:
    """The inputs that decide which rewrites apply."""
    uncaptured = None if model.capturer is not None else model.graph_reason or "it needs a GPU and graphs=True"
    return Setting(
        model.device,
        is_ours=loaded.is_ours,
        exact=options.exact,
        tp=comm.tp_mesh is not None,
        has_head=has_head,
        compile=options.compile,
        adapters=bool(options.lora_modules) or options.enable_lora,
        uncaptured=uncaptured,
    )


def _rewritten(model: TreeModel, setting: Setting) -> KVCache:
    """Rewrite the model and check it; returns the check's cache. If the check fails, the rewrites are undone."""
    attention = model.attention
    found = rewrite(model.model, setting, Stage.FASTER)
    logger.info("on the %s: %s", model.device.type, "; ".join(map(str, found)))
    try:
        return self_check(model)
    except Exception as refused:  # on a GPU, a compiler or driver may raise any type
        if not undo_forwards(model.model):
            raise
        if model.attention != attention:  # the check has replaced the attention backend first
            model.adapter.set_attention(attention)
        like = self_check(model)
        logger.warning("the faster modules do not fit this model, using transformers' own: %s", first_line(refused))
        return like


def _wants_head(model: TreeModel, decode: DecodeConfig) -> bool:
    """True if a prediction head is to be used; on a GPU, where it is untested, only if `decode` asks for it."""
    return decode.draft_heads == "on" or (decode.draft_heads == "auto" and model.device.type == "cpu")


def _use_head(model: TreeModel, head: DraftHead, like: KVCache, setting: Setting) -> None:
    """Attach a prediction head; a head that fails is left out with a warning."""
    try:
        rewrite(head, setting, Stage.FASTER)
        model.use_head(head, like)
    except Exception as failure:  # a layer with unexpected inputs may raise any type
        logger.warning("the prediction head does not work with this model and is not used: %s", first_line(failure))


def why_no_fp8(model: TreeModel) -> str | None:
    """The reason why K/V cannot lie in 8 bits; None if they can."""
    if model.attention != "triton" or not model.adapter.reads_tables:
        return "it needs attention='triton', on a GPU and for a model whose attention reads the cache itself"
    if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) < (8, 9):
        return "it needs a GPU of compute capability 8.9 or higher"
    return None


def may_draft_itself(options: EngineOptions, decode: DecodeConfig, comm: Comm) -> bool:
    """True if ranks of the mesh may draft with a low-bit copy; the same on all ranks."""
    if comm.num_drafting:
        return True
    return options.self_draft != "off" and (options.self_draft != "auto" or decode.adaptive)


def _use_copy(model: TreeModel, options: EngineOptions, like: KVCache, comm: Comm, max_batch_size: int) -> None:
    """Make a low-bit copy of the model for drafting; raises InputError if a requested form cannot be made."""
    named = "int8" if options.self_draft == "off" else options.self_draft  # "off": a draft-only rank
    form = _auto_form(model) if named == "auto" else named
    is_wanted = options.self_draft != "auto" or comm.num_drafting > 0
    why, began = why_no_copy_in(model.model, form), time.perf_counter()
    try:
        if why is None and model.worst_of_replica(int(not is_wanted and not _has_room(model, comm))):
            why = "there is no memory for a copy"
        if why is None:
            model.use_copy(partial(make_copy, model.model, form), like, max_batch_size)
            assert model.self_drafter is not None and isinstance(model.self_drafter.copy, LowBitCopy)
            taken = model.self_drafter.copy.num_bytes / 2**20, time.perf_counter() - began
            logger.info("a copy in %s drafts: %.0f MiB, made and timed in %.1f s", form, *taken)
    except Exception as failure:  # modules with unexpected inputs may raise any type
        why = first_line(failure)
        if is_wanted:
            raise InputError(f"self_draft={form!r}: {why}") from failure
    if why is not None and comm.num_drafting:
        raise InputError(f"draft_ranks={options.draft_ranks}: {why}")
    if why is not None:
        logger.warning("the model does not draft for itself: %s", why)


def _keep_copy(model: TreeModel) -> None:
    """On a draft-only rank: replace the model's modules by the copy's, which frees the original weights."""
    assert model.self_drafter is not None and isinstance(model.self_drafter.copy, LowBitCopy)
    made = model.self_drafter.copy
    model.model._modules.update(made.model._modules)
    gc.collect()
    num_bytes = made.num_bytes + sum([each.nbytes for each in made.model.parameters()])
    logger.info("this rank only drafts: it holds a copy in %s, with all else %.0f MiB", made.form, num_bytes / 2**20)


def _auto_form(model: TreeModel) -> Form:
    """int4 if the C++ kernels multiply packed int4 (a pass takes three quarters of one in int8), else int8."""
    return "int4" if model.device.type == "cpu" and can_tile(model.model.dtype, 2) else "int8"


def _has_room(model: TreeModel, comm: Comm) -> bool:
    """True if a copy in 8 bits takes less than half of the memory that is left."""
    free = model.free_bytes(comm.num_sharing)
    return free is None or 2 * sum(each.numel() for each in model.model.parameters()) < free


def _compile(model: TreeModel, like: KVCache, options: EngineOptions, decode: DecodeConfig) -> None:
    """Compile the model and check it; after a failure steps run uncompiled, unless `options` ask for compiling."""
    model.compile()
    check_compiled(model, like, decode.max_batch_size)
    assert model.compiled is not None
    if options.compile == "on" and model.compiled.reason is not None:
        raise InputError(f"this model cannot be compiled: {model.compiled.reason}")


def _failure_of(action: Callable[[], None]) -> str | None:
    """The message of an InputError that `action` raises, or None."""
    try:
        action()
    except InputError as error:
        return str(error)
    return None


def _machine(model: TreeModel, options: EngineOptions) -> dict[str, int]:
    """Digests of the machine properties that decide rounding, equal on all ranks in exact mode; zeros otherwise."""
    gemm_rows = model.adapter.gemm_rows
    if not options.exact or gemm_rows is None:  # another check reports the failure
        return dict.fromkeys((_KIND, _THREADS, _KERNELS), 0)
    is_gpu = model.device.type == "cuda"
    name = torch.cuda.get_device_name(model.device) if is_gpu else torch.backends.cpu.get_cpu_capability()
    kind = (name, torch.__version__, torch.version.cuda if is_gpu else None)
    rows = astuple(replace(gemm_rows, num_threads=None))
    return {_KIND: digest_of(repr(kind)), _THREADS: gemm_rows.num_threads or 0, _KERNELS: digest_of(repr(rows))}
