"""The check at load that a model evaluates a token tree as it evaluates plain text.

Some models silently keep state or use cache rows as positions, and a config shows only some of them (`refusal`). So
every model evaluates two small trees, with a compaction between them, and the logits are compared with cache-free
forwards of every root-to-node path. Three sequences of unequal shapes decide if batches are packed or padded.
"""

import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from lpr.config import InputError, first_line
from lpr.model.adapter import Adapter
from lpr.model.attention.dense import ComputedKeysError
from lpr.model.attention.sparse import few_selected
from lpr.model.exact import BLOCK
from lpr.model.exact.functions import InexactError
from lpr.model.families import refusal
from lpr.model.graph_inputs import packed_shape, static_shape
from lpr.model.kv_cache import KVCache
from lpr.model.recurrent.gain import scaled
from lpr.model.runner import TreeModel
from lpr.model.sampling.choice import gpu_likeliest, gpu_pick
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row

logger = logging.getLogger(__name__)

_PARENTS = (-1, 0, 0, 1, 1, 2, 1, 4)
_ACCEPTED = (0, 2, 5)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference of a logit over the range of the logits: in fp32 sound models stay below 1e-6 and the silent
failures known so far begin at 3e-3. Half precision rounds differently for every number of GEMM rows."""
_HALF_TOLERANCE = 6e-2
_SHOWS = 2e-3
"""The least effect of lost recurrent states on the logits, relative to their range, that makes errors detectable."""
_GAINS = (1.0, 16.0, 256.0, 4096.0, 65536.0)
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, NotImplementedError)
"""Exceptions of unsupported models."""


def self_check(runner: TreeModel) -> KVCache:
    """Raise InputError if the model is not one that runs a tree; return the check's cache, for its layer shapes.

    Clears `packed` if the model's packed batches fail or differ. A backend chosen by "auto" that fails here is replaced
    by "sdpa", with a warning in the log unless the C++ form does not support the model's layers.
    """
    adapter = runner.adapter
    if (known := refusal(adapter.model)) is not None:
        raise InputError(f"model type {_name(adapter)!r} cannot run a token tree: {known}")
    if adapter.device.type == "cuda":
        gpu_pick(adapter.device)  # now, and not while a step is captured
        gpu_likeliest(adapter.device)
    if adapter.may_fall_back and (adapter.reads_bits or adapter.reads_pages):
        try:
            return _check(adapter)
        except Exception as failure:  # compilers and drivers raise any type; checked again without
            has_own_keys = adapter.reads_bits or not isinstance(failure.__cause__, TypeError | InexactError)
            level, why = logging.WARNING if has_own_keys else logging.DEBUG, first_line(failure)
            logger.log(level, "attention=%r does not work here, using 'sdpa': %s", adapter.attention, why)
            adapter.set_attention("sdpa")
    return _check(adapter)


def check_compiled(runner: TreeModel, like: KVCache, max_batch_size: int = 2) -> None:
    """Compile every form of a step, of one token or more and one sequence or more; compare each with a direct step.

    If logits differ, compiling is disabled on all ranks of a replica.
    """
    assert runner.compiled is not None
    adapter, most = runner.adapter, min(2, max_batch_size)
    cache, nothing = like.resized(most, 256), Selection.build([])
    tokens = _random_tokens(adapter, 13, torch.Generator().manual_seed(4))
    for batch, (start, count) in product(range(most, 0, -1), ((0, 12), (12, 1))):
        rows = [Row.chain(slot, start, tokens[start : start + count], count) for slot in range(batch)]
        how = adapter.reads_bits, 1, False, adapter.reads_tables
        if adapter.packed and adapter.packs_bits:
            shape = packed_shape(rows, nothing, 0, most, cache.rows_per_slot, batch * count)
        else:
            shape = static_shape(rows, nothing, 0, most, cache.rows_per_slot, count, *how)
        assert shape is not None
        words = torch.zeros(shape.num_words, dtype=torch.int32)
        shape.place(words.numpy(), rows, nothing, cache)
        words = words.to(adapter.device)
        wanted = slice(batch * count) if shape.num_kept else slice(-count, None)
        direct, compiled = (
            each.forward(shape.read(words, cache)[0], cache)[wanted].float() for each in (adapter, runner.compiled)
        )
        if not (error := difference(compiled, direct)) <= tolerance_of(adapter):
            runner.compiled.give_up(f"compiled logits differ from direct ones by {error:.1e} of their range")
    if runner.worst_of_replica(int(runner.compiled.reason is not None)):
        runner.compiled.give_up("another rank of this replica could not")


def _name(adapter: Adapter) -> str:
    return getattr(adapter.config, "model_type", type(adapter.model).__name__)


def _check(adapter: Adapter) -> KVCache:
    prompt_length = 200 if adapter.reads_bits else 24  # several key blocks for kernels
    name = _name(adapter)
    tolerance = tolerance_of(adapter)
    cache = KVCache(1, prompt_length + 32)
    if adapter.exact and (why := adapter.why_not_exact()) is not None:
        raise InputError(f"model type {name!r} cannot be exact: {why}")
    try:
        if adapter.exact and (differing := _inexact_step(adapter)) is not None:
            raise InputError(f"model type {name!r} cannot be exact: its logits are other bits {differing}")
    except (TypeError, InexactError) as failure:
        raise InputError(f"model type {name!r} cannot be exact: {first_line(failure)}") from failure
    try:
        with adapter.lock:  # the check temporarily changes the model, which other threads may call
            error = _error(adapter, cache, prompt_length, tolerance)
    except InputError:
        raise
    except _FAILURES as failure:
        failed = f"its forward failed with {type(failure).__name__}: {first_line(failure)}"
        raise InputError(f"model type {name!r} cannot run a token tree: {failed}") from failure
    if not error <= tolerance:
        raise InputError(
            f"model type {name!r} cannot run a token tree: its logits differ from sequential evaluation by {error:.1e} "
            f"of their range (at most {tolerance:.0e}); probably {_probable_cause(adapter.model)}"
        )
    if any(getattr(module, "time_step_limit", (0, 0))[0] > 0 for module in adapter.model.modules()):
        logger.warning(
            "the step sizes of its Mamba layers have a least value, which transformers' forward keeps to and its "
            "generate leaves out after the prompt: ids are those of the forward"
        )
    return cache


def _error(adapter: Adapter, cache: KVCache, prompt_length: int, tolerance: float) -> float:
    """The largest difference of a tree's or a batch's logits, over their range; decides `reads_tables` and `packed`."""
    if adapter.reads_bits:
        adapter.reads_tables = _passes_keys_on(adapter)
        adapter.packed = adapter.packed and adapter.reads_tables
    half = adapter.model.dtype not in _TOLERANCE  # its rounding changes which tokens a sparse layer selects
    with nullcontext() if half else few_selected(adapter.model):
        error = _tree_error(adapter, cache, prompt_length)
    if error <= tolerance and cache.has_states:
        with scaled(adapter.model, _gain(adapter, tolerance)):
            error = _tree_error(adapter, KVCache(1, prompt_length + 32), prompt_length)
    if error <= tolerance:
        alone = _batch_logits(adapter, together=False)
        adapter.packed = adapter.packed and _packs(adapter, alone, tolerance)
        if not adapter.packed:
            error = difference(_batch_logits(adapter, together=True), alone)
    return error


def _gain(adapter: Adapter, tolerance: float) -> float:
    """The gain of recurrent layers at which their states visibly affect the logits."""
    tokens = _random_tokens(adapter, 24 + len(_PARENTS), torch.Generator().manual_seed(3))
    prompt, row = Row.chain(0, 0, tokens[:24], 0), _tree_row(0, 24, tokens[24:], _PARENTS, len(_PARENTS))
    for gain in _GAINS:
        differences = []
        with scaled(adapter.model, gain):
            cache = KVCache(2, 48)
            adapter.logits([prompt], cache)
            cache.commit(prompt, range(24))
            cache.states.copy(0, 1)
            right = adapter.logits([row], cache).float()
            for kind in cache.states.kinds:
                cache.states.copy(1, 0)
                cache.states.clear(0, kind)
                differences.append(difference(adapter.logits([row], cache).float(), right))
        if min(differences) > max(_SHOWS, 2 * tolerance):
            return gain
    logger.warning("logits hardly depend on the model's recurrent states, so the check sees little of them")
    return gain


def _passes_keys_on(adapter: Adapter) -> bool:
    """True if the model passes the cache's keys to attention unchanged."""
    try:
        adapter.logits([Row.chain(0, 0, [0], 1)], KVCache(1, 32))
    except ComputedKeysError:
        return False
    return True


def _inexact_step(adapter: Adapter) -> str | None:
    """The kind of step in which a text's logits differ in bits from one token at a time; None if none does."""
    branch, depth = BLOCK - 3, 6  # the text ends behind a block of exact attention, and the tree branches before it
    text = _random_tokens(adapter, branch + depth, torch.Generator().manual_seed(2))

    def forward(cache: KVCache, start: int, end: int) -> torch.Tensor:
        row = Row.chain(0, start, text[start:end], min(depth, end - start))
        logits = adapter.logits([row], cache)
        cache.commit(row, range(end - start))
        return logits

    cache = KVCache(1, 2 * BLOCK)
    whole = forward(cache, 0, branch + depth)
    cache = KVCache(1, 2 * BLOCK)
    for start in range(0, branch, 7):
        forward(cache, start, min(start + 7, branch))
    single = torch.cat([forward(cache, at, at + 1) for at in range(branch, branch + depth)])
    if not torch.equal(whole, single):
        return "in a step of many tokens"
    # A tree of the text's end, with siblings between its nodes that are not in the text.
    tokens, parents, positions = [], [], []
    for at in range(depth):
        tokens += [(text[branch + at] + 1) % adapter.config.vocab_size, text[branch + at]]
        parents += [2 * at - 1] * 2
        positions += [branch + at] * 2
    row, cache = Row(0, branch, tokens, parents, positions, len(tokens)), KVCache(1, 2 * BLOCK)
    forward(cache, 0, branch)
    tree = adapter.logits([row], cache)
    if not torch.equal(tree[1::2], single):
        return "in a tree"
    cache = KVCache(2, 2 * BLOCK)
    forward(cache, 0, branch)
    other = Row.chain(1, 0, text[:9], 1)
    batch = adapter.logits([row, other], cache)
    return None if torch.equal(batch[1:-1:2], single) else "in a batch"


def _packs(adapter: Adapter, alone: torch.Tensor, tolerance: float) -> bool:
    try:
        return difference(_batch_logits(adapter, together=True, packed=True), alone) <= tolerance
    except _FAILURES:  # e.g. a model that inspects the mask: its batches are padded
        return False


def _batch_logits(adapter: Adapter, together: bool, packed: bool = False) -> torch.Tensor:
    """Logits [n, V] of three prompts, then of trees below them: in one batch if `together`, else one by one."""
    shapes = [(9, _PARENTS), (24, _PARENTS[:3]), (17, _PARENTS[:5])]
    generator = torch.Generator().manual_seed(1)
    caches = [KVCache(len(shapes), 48)] * len(shapes) if together else [KVCache(1, 48) for _ in shapes]
    steps: tuple[list[Row], list[Row]] = ([], [])
    for index, (length, parents) in enumerate(shapes):
        slot = index if together else 0
        tokens = _random_tokens(adapter, length + len(parents), generator)
        steps[0].append(Row.chain(slot, 0, tokens[:length], index % 2))
        steps[1].append(_tree_row(slot, length, tokens[length:], parents, len(parents) - index))
    results = []
    for rows in steps:
        batches = [rows] if together else [[row] for row in rows]
        for batch, cache in zip(batches, caches, strict=False):
            results.append(adapter.logits(batch, cache, packed=packed))
            for row in batch if rows is steps[0] else ():
                cache.commit(row, range(row.num_entries))
    return torch.cat(results).float()


def tolerance_of(adapter: Adapter) -> float:
    """The largest difference of a logit, relative to the range of the logits, that rounding may cause."""
    return _TOLERANCE.get(adapter.model.dtype, _HALF_TOLERANCE)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the range of the logits."""
    return ((logits - expected).abs().max() / (expected.max() - expected.min())).item()


def _probable_cause(model: PreTrainedModel) -> str:
    if getattr(model, "hf_quantizer", None) is not None or any(map(is_traceable_wrapper_subclass, model.parameters())):
        return "its activations are quantised on the fly, so that rounding moves whole steps; weight-only works"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "its forward takes no position_ids"
    return "it keeps state or counts cache rows"


def _tree_error(adapter: Adapter, cache: KVCache, prompt_length: int) -> float:
    generator = torch.Generator().manual_seed(0)

    text = _random_tokens(adapter, prompt_length, generator)
    prompt = Row.chain(0, 0, text, 0)
    adapter.logits([prompt], cache)
    cache.commit(prompt, range(prompt_length))
    worst = torch.zeros((), device=adapter.device)
    span = torch.full((), 1e-9, device=adapter.device)
    for _ in range(2):
        nodes = _random_tokens(adapter, len(_PARENTS), generator)
        row = _tree_row(0, len(text), nodes, _PARENTS, len(nodes))
        logits = adapter.logits([row], cache).float()
        for leaf in sorted({*range(len(nodes))} - {*_PARENTS}):
            path = _path(_PARENTS, leaf)
            sequence = torch.tensor([text + [nodes[i] for i in path]], device=adapter.device)
            with torch.no_grad():
                expected = adapter.model(input_ids=sequence, use_cache=False).logits[0, -len(path) :].float()
            worst = torch.maximum(worst, (logits[path] - expected).abs().max())
            span = torch.maximum(span, (expected.amax(-1) - expected.amin(-1)).max())
        cache.commit(row, _ACCEPTED)
        text += [nodes[i] for i in _ACCEPTED]
    return (worst / span).item()


def _random_tokens(adapter: Adapter, count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, adapter.config.vocab_size, (count,), generator=generator).tolist()


def _tree_row(slot: int, length: int, tokens: list[int], parents: Sequence[int], num_results: int) -> Row:
    positions = [length + len(_path(parents, node)) - 1 for node in range(len(parents))]
    return Row(slot, length, tokens, parents, positions, num_results)


def _path(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
