"""The states of recurrent layers: one per slot, at the sequence's computed tokens.

A forward reads states and never writes them. It keeps the contributions of its entries, and `advance` later adds those
of the accepted entries. So a rejected branch, a dropped step or a failed forward does not affect the states.

A low-bit copy drafts from states of its own, the *scratch* states: its forwards read these, and only these advance
along what it drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpr.model.recurrent.in_order import walk
from lpr.model.recurrent.layout import Layout, Site, layouts
from lpr.model.recurrent.scans import Convolved, Rule, convolve, run_chain, windows
from lpr.model.recurrent.tree import Tree
from lpr.model.step_inputs import Row, StepInputs, current_step

if TYPE_CHECKING:
    from lpr.model.recurrent.kernel_step import KernelStep

KERNEL_DEVICES = ("cuda",)
"""Types of devices on which the Triton kernels evaluate steps that have bits; tests interpret them on a CPU."""


class States:
    """The states of all convolutions and scans of a model."""

    def __init__(self, num_places: int) -> None:
        """States for `num_places` slots and snapshots; the first forward determines the shapes and allocates."""
        self.num_places = num_places
        self.scratch: States | None = None  # those that a low-bit copy reads, a place for each slot
        self.splits = True  # False in forwards of which the leading entries may be accepted in part
        self._tensors: dict[Site, Tensor] = {}  # per site [places, ...]
        self._step: StepInputs | None = None
        self._layouts: list[Layout] = []
        self._layer = 0
        self._convolution: Site | None = None  # the convolution announced by `begin_convolution` and not computed yet
        self._counts: dict[int, int] = {}  # per layer, its scans so far in this step
        self.kernels: KernelStep | None = None  # the step for the kernels, if they evaluate it
        self._memory: dict[tuple[Site, str], Tensor] = {}

    @property
    def is_empty(self) -> bool:
        return not self._tensors

    @property
    def bytes_per_place(self) -> int:
        """Bytes of one sequence's states."""
        return sum(each[0].numel() * each.element_size() for each in self._tensors.values())

    @property
    def num_bytes(self) -> int:
        places = self.num_places + (self.scratch.num_places if self.scratch is not None else 0)
        return self.bytes_per_place * places

    def resized(self, num_slots: int, num_snapshots: int = 0) -> States:
        """States of the same shapes, with scratch states if these have them."""
        made = States(count := num_slots + num_snapshots)
        made._tensors = {site: each.new_zeros(count, *each.shape[1:]) for site, each in self._tensors.items()}
        made.scratch = self.scratch.resized(num_slots) if self.scratch is not None else None
        return made

    def of(self, place: int) -> dict[Site, Tensor]:
        return {site: tensor[place] for site, tensor in self._tensors.items()}

    def copy(self, source: int, target: int, of: States | None = None) -> None:
        """Copy a place to another one; with `of`, a place of those states."""
        sources = (self if of is None else of)._tensors
        for site, each in self._tensors.items():
            each[target] = sources[site][source]

    @property
    def kinds(self) -> list[str]:
        """ "convolution" and "scan", as far as the model has them."""
        return sorted({kind for kind, *_ in self._tensors})

    def clear(self, place: int, kind: str) -> None:
        for site, tensor in self._tensors.items():
            if site[0] == kind:
                tensor[place] = 0

    # Called by the model through the cache.

    def begin_layer(self, layer: int) -> None:
        self._layer = layer

    def begin_convolution(self, layer: int, index: int) -> None:
        """The model starts a convolution; raises TypeError if the last one was not computed by `convolve`."""
        if self._convolution is not None and self._step is current_step():
            raise TypeError("its convolution is code of its own, which does not follow the paths of a tree")
        self._begin_step()
        self._layer, self._convolution = layer, ("convolution", layer, index)

    def _begin_step(self) -> list[Layout]:
        step = current_step()
        assert step is not None, "states work only inside in_step"
        if step is not self._step:
            self._step, self._layouts = step, layouts(step, step.tokens.device, self.splits)
            self._convolution, self._counts = None, {}
            self.kernels = None
            mask, device = step.blocks[0].tree_mask, step.tokens.device
            if mask is not None and mask.positions.shape == step.positions.shape and device.type in KERNEL_DEVICES:
                self.kernels = import_module("lpr.model.recurrent.kernel_step").KernelStep(step, self.splits)
        return self._layouts

    def kernel_step(self) -> KernelStep | None:
        """The current step for the Triton kernels; None if they do not evaluate its recurrent layers."""
        self._begin_step()
        return self.kernels

    @property
    def is_exact(self) -> bool:
        return self._step is not None and self._step.gemm_rows is not None

    @property
    def evaluated(self) -> Any:
        """The contributions kept by the last forward; a graph's replay restores those of its capture."""
        return self._step, self._layouts, self.kernels

    @evaluated.setter
    def evaluated(self, evaluated: Any) -> None:
        self._step, self._layouts, self.kernels = evaluated

    def memory(self, site: Site, device: torch.device) -> Callable[[str, Sequence[int], torch.dtype], Tensor]:
        """Memory of a site by name, the same in every step: graphs hold its addresses."""

        def make(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            held = self._memory.get((site, name))
            if held is None or held.numel() < prod(shape):
                held = self._memory[site, name] = torch.empty(prod(shape), dtype=dtype, device=device)
            return held[: prod(shape)].view(*shape)

        return make

    def of_convolution(self, x: Tensor, width: int) -> tuple[Site, Tensor]:
        """The started convolution, whose input is x [R, C, N], and its states."""
        site, self._convolution = self._convolution, None
        if site is None:
            raise TypeError("a convolution does not use the cache")
        return site, self._tensor(site, (x.shape[1], width - 1), x.dtype, x.device)

    def of_scan(self, shape: Sequence[int], device: torch.device) -> tuple[Site, Tensor]:
        """The next scan of the current layer, and its states of this `shape`."""
        self._begin_step()
        count = self._counts[self._layer] = self._counts.get(self._layer, 0) + 1
        site = "scan", self._layer, count
        return site, self._tensor(site, shape, torch.float32, device)

    # A forward.

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor], dilation: int = 1
    ) -> Tensor:
        """The convolution of x [R, C, N] by weight [C, width]: [R, C, N]."""

        def evaluate(part: Tensor, before: Tensor, tree: Tree) -> Tensor:
            return convolve(part, before, tree, weight, bias, activation, self.is_exact, dilation)

        return self._along(x, dilation * (weight.shape[1] - 1) + 1, evaluate)

    def windows(self, x: Tensor, width: int) -> Tensor:
        """The last `width` of x [R, C, N] along the path of each entry, its own last: [R, C, N, width]."""
        return self._along(x, width, windows)

    def _along(self, x: Tensor, width: int, evaluate: Callable[[Tensor, Tensor, Tree], Tensor]) -> Tensor:
        """Apply `evaluate` to each layout's entries [B, C, n], earlier inputs and tree, for x [R, C, N]."""
        outputs = []
        site, tensor = self.of_convolution(x, width)
        for layout in self._begin_step():
            part = layout.cut(x, 2)
            before, pieces, split = layout.read(tensor), [], layout.split
            if split:
                pieces.append(evaluate(part[..., :split], before, layout.chains))
                before = Convolved(part[..., :split], layout.chains).after(before, layout.ends)
            tail = part[..., split:]
            if layout.width > split:
                pieces.append(evaluate(tail, before, layout.tree))
            layout.kept[site] = before, Convolved(tail, layout.tree) if layout.width > split else None
            outputs.append(torch.cat(pieces, 2))
        return torch.cat(outputs, 2)

    def scan(self, rule: Rule, inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The outputs [R, N, ...] of a scan of `inputs` [R, N, ...] over the current layer's states of this `shape`."""
        outputs = []
        site, tensor = self.of_scan(shape, inputs[0].device)
        for layout in self._begin_step():
            parts = [layout.cut(each, 1) for each in inputs]
            if layout.real is not None:
                for place in rule.padding:
                    real = layout.real.view(*layout.real.shape, *[1] * (parts[place].dim() - 2))
                    parts[place] = torch.where(real, parts[place], 0)
            state = layout.read(tensor)
            pieces, written = [], None
            if layout.split:
                chain = [each[:, : layout.split] for each in parts]
                if self.is_exact:
                    out, walked = walk(rule.enter, chain, state, layout.chains, layout.pads)
                    state = walked.after(state)
                else:
                    out, state = run_chain(rule, chain, state)
                pieces.append(out)
            if layout.width > layout.split:
                tail, pads = [each[:, layout.split :] for each in parts], layout.pads - layout.split
                scanned = (tail, state, layout.tree)
                out, written = walk(rule.enter, *scanned, pads) if self.is_exact else rule.scan(*scanned)
                pieces.append(out)
            layout.kept[site] = state, written
            outputs.append(torch.cat(pieces, 1))
        return torch.cat(outputs, 1)

    def at(self, site: Site) -> Tensor:
        return self._tensors[site]

    def _tensor(self, site: Site, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        if site not in self._tensors:
            self._tensors[site] = torch.zeros(self.num_places, *shape, dtype=dtype, device=device)
        return self._tensors[site]

    # Between forwards.

    @torch.no_grad()
    def advance(self, rows: Sequence[Row], kept: Sequence[Sequence[int]], into: States | None = None) -> None:
        """Advance the states of the last forward's rows along their accepted entries (indices, in order).

        With `into` these states stay as they are, and the advanced ones are written to the slots' places there.
        """
        accepted = {row.slot: entries for row, entries in zip(rows, kept, strict=True) if len(entries)}
        written_to = self if into is None else into
        if self.kernels is not None:  # they advance in place
            for slot in accepted if into is not None else ():
                written_to.copy(slot, slot, self)
            self.kernels.advance(rows, kept, written_to)
        for layout in self._layouts if any(each.kept for each in self._layouts) else ():
            entries = [accepted.get(row.slot, ()) if row.num_entries else () for row in layout.rows]
            members = [index for index, each in enumerate(entries) if each]
            if not members:
                continue
            path, target = layout.path(entries), layout.slots
            if len(members) < len(entries):
                target = torch.tensor([layout.rows[member].slot for member in members], device=layout.device)
            for site, (state, written) in layout.kept.items():
                state = state if written is None else written.after(state, path)
                written_to._tensors[site][target] = state if len(members) == len(entries) else state[members]


def states_of_step() -> States:
    """The states that the running forward reads."""
    step = current_step()
    assert step is not None, "states work only inside in_step"
    return step.states


class StatesInCache:
    """The methods by which recurrent layers access their states in a cache of transformers.

    They return no state, as for a new sequence, so that each layer uses its prefill form, which is replaced here.
    """

    states: States

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: `update_conv_state` gets the inputs."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Record the layer of the next convolution; returns the inputs unchanged."""
        states_of_step().begin_convolution(layer_idx, state_idx)
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: the scan finds its state by the layer."""
        states_of_step().begin_layer(layer_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
