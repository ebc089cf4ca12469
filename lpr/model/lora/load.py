"""Loading an adapter into a model, and the check that its steps compute what PEFT would."""

import torch

from lpr.config import InputError
from lpr.model.kv_cache import KVCache
from lpr.model.lora.bank import SlotAdapters
from lpr.model.lora.files import LoraFiles
from lpr.model.runner import TreeModel
from lpr.model.self_check import difference, tolerance_of
from lpr.model.step_inputs import Row

_TOKENS, _PARENTS, _POSITIONS = (1, 2, 3, 4), (-1, 0, 0, 2), (0, 1, 1, 2)
_PATHS = (0, 1), (0, 2, 3)


def load_lora(runner: TreeModel, files: LoraFiles) -> None:
    """Load an adapter; raises InputError for one that does not fit. `check_lora` must follow."""
    if runner.compiled is not None:
        raise InputError("steps are compiled here, and know no adapters: start with --enable-lora or --compile off")
    if runner.exact and runner.device.type == "cpu" and not runner.bank.is_native:
        raise InputError("exact mode with adapters needs lpr's extension, and float32 or bfloat16")
    runner.bank.add(files)
    runner.forget_adapters()


def unload_lora(runner: TreeModel, digest: str) -> None:
    runner.bank.remove(digest)
    runner.forget_adapters()


def check_lora(runner: TreeModel, digest: str) -> None:
    """Raise InputError unless a tree's logits equal those of plain forwards with the adapter added by its definition.

    In half precision rounding may exceed the adapter's effect on the logits, because a model's first tokens have large
    activations: then each layer's sum is compared with its definition. A collective call of tensor-parallel ranks.
    """
    bank, adapter = runner.bank, runner.adapter
    place, cache = bank.places[digest], KVCache(2, 32)
    cache.adapters = SlotAdapters(bank, {1: place})
    rows = [Row(slot, 0, _TOKENS, _PARENTS, _POSITIONS, len(_TOKENS)) for slot in (0, 1)]
    is_half = adapter.model.dtype.itemsize < 4
    with adapter.lock:
        bank.sums = [] if is_half else None
        try:
            inputs = adapter.inputs(rows, cache, packed=adapter.packed)
            logits, plain = adapter.forward(inputs, cache).float().chunk(2)[::-1]
            for site, before, product, states in bank.sums or ():
                if not site.error(before, product, states, inputs.adapters.places) <= 1:
                    raise InputError(f"this model does not compute {site.name} as adapters need")
        finally:
            bank.sums = None
        for path in () if is_half else _PATHS:
            tokens = torch.tensor([[_TOKENS[node] for node in path]], device=adapter.device)
            with torch.no_grad():
                without = adapter.model(input_ids=tokens, use_cache=False).logits[0].float()
                with bank.for_all_rows(place):
                    expected = adapter.model(input_ids=tokens, use_cache=False).logits[0].float()
            for found, wanted in ((logits, expected), (plain, without)):
                if not (error := difference(found[list(path)], wanted)) <= tolerance_of(adapter):
                    why = f"logits differ by {error:.1e}"
                    raise InputError(f"this model does not compute its layers as adapters need: {why}")
    if (name := bank.uncalled(place)) is not None:
        raise InputError(f"this model computes {name} in a way that adapters do not know")
