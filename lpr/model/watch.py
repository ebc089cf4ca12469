"""Detects changes of a model's weights or modules since an engine read it.

A program may train a model between the calls of an engine. Then earlier K/V, copies of weights and captured addresses
are wrong. Compares `_version` (incremented by in-place operations), addresses, and a few values of each parameter,
because writes to `.data` are not counted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lpr.config import InputError
from lpr.model.cpu.products import PrepackedLinear
from lpr.model.rewrite.merged_linear import PackedLinear
from lpr.model.runner import TreeModel

_MOST_READ = 3  # most values read per parameter
_SMALL = 4096  # smaller buffers do not count as weights; models write to them
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes of PEFT's layers that change what they compute."""
_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32}


class Watch:
    def __init__(self, runner: TreeModel) -> None:
        self._runner = runner
        self.note()

    def note(self) -> None:
        modules = list(self._runner.model.modules())
        self._modules = [(each, _parts(each), _hooks(each)) for each in modules]
        held = [(table, name, found) for each in modules for table, name, found in _weights(each)]
        self._held = held
        self._weights = list({id(found): found for _, _, found in held}.values())
        self._forms = [_form(found) for _, _, found in held]
        self._placed = [each for each in self._weights if not is_traceable_wrapper_subclass(each)]
        self._places = [each.data_ptr() for each in self._placed]
        self._counted = [each for each in self._weights if not each.is_inference()]
        self._versions = [each._version for each in self._counted]
        self._samples = _samples(self._weights)
        self._values = _read(self._samples)
        trained = [index for index, each in enumerate(self._counted) if each.requires_grad]
        few = [trained[len(trained) * part // 3] for part in range(3)] + trained[-1:] if trained else []
        self._few = [(self._counted[index], self._versions[index]) for index in few]

    @property
    def hints(self) -> bool:
        """A fast check: True if one of a few weights has changed; takes a microsecond."""
        return any([weight._version != version for weight, version in self._few])

    @property
    def trains(self) -> bool:
        return any([each.training for each, _, _ in self._modules])

    def has_changed(self) -> bool:
        """True if a change made earlier K/V invalid; records the present state.

        Raises InputError for a change that an engine does not support, because it holds copies or addresses.
        """
        for module, parts, _ in self._modules:
            if _parts(module) != parts:
                raise _refused(f"a {type(module).__name__} has other parts, or another forward")
        moved = any([table.get(name) is not found for table, name, found in self._held])
        if moved or [each.data_ptr() for each in self._placed] != self._places:
            moved = True
            if [_form(table.get(name)) for table, name, _ in self._held] != self._forms:
                raise _refused("its weights have another shape, dtype or device")
        hooks = any([_hooks(module) != hooks for module, _, hooks in self._modules])
        if hooks and (self._runner.num_captures or self._runner.compiled is not None or self._are_joined):
            raise _refused("it has other hooks, which captured steps and layers that are computed together do not call")
        if not moved and not hooks and self._is_same():
            return False
        if moved and (self._lies_anew or self._runner.num_captures or self._runner.compiled is not None):
            raise _refused("its weights have moved in memory")
        self.note_change()
        return True

    def note_change(self) -> None:
        """As `note`; raises InputError if the engine holds copies of the weights."""
        if any(isinstance(each, PrepackedLinear) for each, _, _ in self._modules):
            raise _refused("its weights have changed, of which the engine holds a copy that suits this processor")
        if self._runner.self_drafter is not None:
            self._runner.self_drafter.renew()
        self.note()

    def is_followed(self) -> bool:
        """False after a change that needs a new engine; any other change is recorded."""
        try:
            self.has_changed()
        except InputError:
            return False
        return True

    def _is_same(self) -> bool:
        if [each._version for each in self._counted] != self._versions:
            return False
        return all(map(torch.equal, _read(self._samples), self._values))

    @property
    def _are_joined(self) -> bool:
        """True if a layer is computed in the call of an earlier one."""
        return any(getattr(vars(each).get("forward"), "follows", False) for each, _, _ in self._modules)

    @property
    def _lies_anew(self) -> bool:
        kinds = (PackedLinear, PrepackedLinear)
        return any(isinstance(each, kinds) or _is_lpr(vars(each).get("forward")) for each, _, _ in self._modules)


def _refused(what: str) -> InputError:
    return InputError(f"the model has changed since this engine was made, {what}: make a new one, by from_model")


def _parts(module: nn.Module) -> tuple[Any, ...]:
    """The identity of a module's parts; lpr's own changes, which another engine may make, do not count."""
    known = vars(module)
    forward, config = known.get("forward"), known.get("config")
    own = None if forward is None or _is_lpr(forward) else forward
    switches = repr([known.get(name) for name in _SWITCHES]) if _SWITCHES[0] in known else ""
    return (own, id(config), switches, *known["_modules"].values())


def _is_lpr(function: Any) -> bool:
    """True for a function of lpr, also in a functools.partial."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__module__", "").startswith("lpr.")


def _hooks(module: nn.Module) -> tuple[int, ...]:
    before, after = module._forward_pre_hooks, module._forward_hooks
    if not before and not after:
        return ()
    return tuple([key for hooks in (before, after) for key, hook in hooks.items() if not _is_lpr(hook)])


def _weights(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The parameters and large buffers of a module, and the table that holds each."""
    parameters: Any = module._parameters
    buffers: Any = module._buffers
    found = [(parameters, name, each) for name, each in parameters.items() if each is not None]
    large = [(name, each) for name, each in buffers.items() if each is not None and each.numel() >= _SMALL]
    return found + [(buffers, name, each) for name, each in large]


def _form(weight: Tensor | None) -> tuple[Any, ...]:
    """The properties of a weight whose change an engine does not support."""
    return () if weight is None else (weight.dtype, weight.device, weight.shape)


def _samples(weights: Sequence[Tensor]) -> list[list[tuple[Tensor, int, int]]]:
    """Per device, the sampled weights: tensor, number of values, and stride."""
    found: dict[torch.device, list[tuple[Tensor, int, int]]] = {}
    for weight in weights:
        known = weight.dtype in _DTYPES and weight.device.type != "meta" and weight.numel()
        if known and not is_traceable_wrapper_subclass(weight):
            count = min(_MOST_READ, weight.numel()) if weight.is_contiguous() else 1
            found.setdefault(weight.device, []).append((weight, count, weight.numel() // count))
    return list(found.values())


@torch.no_grad()
def _read(samples: Sequence[Sequence[tuple[Tensor, int, int]]]) -> list[Tensor]:
    """The bits of samples, in which a NaN equals itself. No view is kept: it would hold memory that a program frees."""
    views = [[each.as_strided((count,), (step,)) for each, count, step in found] for found in samples]
    return [torch.cat(found).double().view(torch.int64) for found in views]
