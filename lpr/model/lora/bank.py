"""The loaded adapters of a model, applied per row of a step.

A step may have rows with many adapters and rows with none. A *site* is a product with weights of the model, of one
layer or of several packed ones; it adds to its outputs the low-rank products of each row's adapter. In C++ each row is
computed separately. Elsewhere the pairs of all adapters are one product, masked to the LoRA ranks of each row's own
adapter: no shape depends on the rows, so a GPU's step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lpr import native
from lpr.config import InputError
from lpr.model.exact.check import in_pieces
from lpr.model.lora.files import LoraFiles, Pair
from lpr.model.rewrite.merged_linear import Pack
from lpr.model.rewrite.sharded_layers import ReducedLinear
from lpr.model.step_inputs import Row, StepInputs, current_step
from lpr.model.threads import team_size
from lpr.model.transfer import to_device

_ALONE = 4  # most rows whose additions run on the calling thread alone
_LANES = 16  # ranks and outputs are padded to a multiple of this for C++


@dataclass(frozen=True)
class RowAdapters:
    bank: Bank
    places: Tensor  # int32 [R * N]: the number of the adapter in the bank, -1 for none
    masks: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a site's `owners`: the mask of LoRA ranks that each entry keeps."""


@dataclass(frozen=True)
class SlotAdapters:
    """The adapter of the request in each slot."""

    bank: Bank
    places: Mapping[int, int]  # by slot, the adapter's number in the bank; slots without one are absent

    def of_step(self, inputs: StepInputs) -> RowAdapters | None:
        """The adapters of a step's entries; None if no row has one."""
        rows = [each for each in zip(inputs.rows, inputs.places(), strict=True) if each[0].slot in self.places]
        if not rows:
            return None
        places = np.full(tuple(inputs.tokens.shape), -1, np.int32)
        for row, (at, begin) in rows:
            places[at, begin : begin + row.num_entries] = self.places[row.slot]
        return RowAdapters(self.bank, to_device(places.reshape(-1), inputs.tokens.device))

    def read(self, words: Tensor) -> RowAdapters:
        return RowAdapters(self.bank, words.reshape(-1))

    def place(self, words: np.ndarray, rows: Sequence[Row]) -> None:
        """Write the adapters of a captured step's entries, int32 [B, T]; packed ones, with B = 1, lie at the end."""
        words[:] = -1
        if len(words) == 1:
            found = [self.places.get(row.slot, -1) for row in rows for _ in range(row.num_entries)]
            words[0, words.shape[1] - len(found) :] = found
            return
        for entries, row in zip(words, rows, strict=False):
            entries[len(entries) - row.num_entries :] = self.places.get(row.slot, -1)


class Site:
    """A product with weights of the model, and the adapter pairs that are added to it."""

    def __init__(self, bank: Bank, name: str) -> None:
        self.bank, self.name = bank, name
        self._native: _Native | None = None
        self._stacked: _Stacked | None = None
        self.parts: dict[int, list[tuple[int, Pair]]] = {}
        """By adapter number: the first output of each pair, and the pair."""
        self.was_called = False

    def __deepcopy__(self, memo: Any) -> Site:
        """Not copied: a low-bit copy of the model shares the adapters."""
        return self

    def build(self) -> None:
        self._native = self._stacked = None
        if self.parts and self.bank.is_native:
            self._native = _Native.of(self.parts)
        elif self.parts:
            self._stacked = _Stacked.of(self.parts, self.bank)

    def add(self, product: Tensor, states: Tensor, rows: RowAdapters) -> None:
        """Add the adapters' outputs to `product` [..., outputs] of `states` [..., inputs], row by row, in place."""
        self.was_called = True
        if len(rows.places) != states.shape[:-1].numel():
            raise RuntimeError(f"{self.name} computes {states.shape[:-1].numel()} rows of a step of {len(rows.places)}")
        if self._native is not None:
            self._native.add(product, states, rows.places)
        elif self._stacked is not None:
            self._stacked.add(product, states, rows)

    def add_to_all(self, product: Tensor, states: Tensor, place: int) -> None:
        """As `add` with one adapter for all rows, computed by the definition; for the check of an adapter."""
        for first, pair in self.parts.get(place, ()):
            down, up = (each.to(states.device, torch.float32) for each in (pair.down, pair.up))
            product.narrow(-1, first, len(up)).add_(F.linear(F.linear(states.float(), down), up).to(product.dtype))

    def error(self, before: Tensor, product: Tensor, states: Tensor, places: Tensor) -> float:
        """The largest error of `add` on a product `before`, in units of the allowed rounding error."""
        wanted, start, found = (each.float().flatten(0, -2) for each in (before, before, product))
        wanted = wanted.clone()
        for place in self.parts:
            mine, added = places == place, torch.zeros_like(wanted)
            self.add_to_all(added, states.flatten(0, -2), place)
            wanted[mine] += added[mine]
        scale = torch.finfo(product.dtype).eps * (2 * wanted.abs() + 8 * (wanted - start).abs().amax())
        return ((found - wanted).abs() / scale.clamp(min=1e-30)).amax().item()


@dataclass(frozen=True)
class _Native:
    """Pairs as native.add_low_rank reads them."""

    starts: np.ndarray  # int64 [places + 1]
    pairs: np.ndarray
    """Int64 [pairs, 5]: first output, number of outputs, LoRA rank, and the addresses of the two matrices."""

    @classmethod
    def of(cls, parts: Mapping[int, Sequence[tuple[int, Pair]]]) -> _Native:
        starts, pairs = [0], list[tuple[int, ...]]()
        for place in range(max(parts) + 1):
            for first, pair in parts.get(place, ()):
                pairs.append((first, *pair.up.shape, pair.down.data_ptr(), pair.up.data_ptr()))
            starts.append(len(pairs))
        return cls(np.array(starts, np.int64), np.array(pairs, np.int64))

    def add(self, product: Tensor, states: Tensor, places: Tensor) -> None:
        assert native.add_low_rank is not None
        if product.dtype is not states.dtype or not product.is_contiguous():  # it is written by its address
            raise RuntimeError(f"a product of {states.dtype} gave {product.dtype} with strides {product.stride()}")
        states, rows = states.contiguous(), len(places)
        native.add_low_rank(
            states.data_ptr(), product.data_ptr(), rows, states.shape[-1], product.shape[-1], places.data_ptr(),
            len(self.starts) - 1, self.starts.ctypes.data, self.pairs.ctypes.data, states.dtype is torch.bfloat16,
            team_size() if rows > _ALONE else 1,
        )  # fmt: skip


@dataclass(frozen=True)
class _Stacked:
    """The pairs of all adapters as one product."""

    down: Tensor  # [sum of LoRA ranks, inputs], grouped by part of the outputs
    owners: Tensor  # int32 [sum of LoRA ranks]: the number of the adapter that each rank belongs to
    ups: list[tuple[int, int, Tensor]]
    """Per part of the outputs: first output, first LoRA rank, and the matrix [outputs, ranks]."""

    @classmethod
    def of(cls, parts: Mapping[int, Sequence[tuple[int, Pair]]], bank: Bank) -> _Stacked:
        by_first: dict[int, list[tuple[int, Pair]]] = {}
        for place, pairs in sorted(parts.items()):
            for first, pair in pairs:
                by_first.setdefault(first, []).append((place, pair))
        downs, owners, ups = [], list[int](), []
        for first, members in sorted(by_first.items()):
            ups.append((first, len(owners), bank.to_model(torch.cat([pair.up for _, pair in members], 1))))
            downs += [pair.down for _, pair in members]
            owners += [place for place, pair in members for _ in range(len(pair.down))]
        return cls(bank.to_model(torch.cat(downs)), bank.owners(tuple(owners)), ups)

    def add(self, product: Tensor, states: Tensor, rows: RowAdapters) -> None:
        key = id(self.owners)
        if key not in rows.masks:
            rows.masks[key] = rows.places[:, None] == self.owners
        inner = in_pieces(partial(F.linear, weight=self.down), states.reshape(-1, states.shape[-1]))
        inner = torch.where(rows.masks[key], inner, 0)  # another adapter's values may be infinite
        flat = product.view(-1, product.shape[-1])
        for first, rank, up in self.ups:
            added = in_pieces(partial(F.linear, weight=up), inner[:, rank : rank + up.shape[1]])
            flat[:, first : first + len(up)] += added


class Bank:
    """The loaded adapters of one model, numbered."""

    def __init__(self, model: PreTrainedModel, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.model, self._tp = model, (tp_rank, tp_size)
        self.device, self.dtype = model.device, model.dtype
        is_known = self.dtype in (torch.float32, torch.bfloat16)
        self.is_native = self.device.type == "cpu" and is_known and native.add_low_rank is not None
        """True if rows are computed separately in C++."""
        self.everywhere: int | None = None  # outside of a step: the adapter of all rows; None without
        self.sums: list[tuple[Site, Tensor, Tensor, Tensor]] | None = None
        """For the check of an adapter: per site of a step, the product before and after `add`, and the states."""
        self.places: dict[str, int] = {}  # by digest, the adapter's number
        self._sites: dict[tuple[int, str], Site] = {}
        self._owners: dict[tuple[int, ...], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all pairs in float32."""
        pairs = [pair for site in self._sites.values() for parts in site.parts.values() for _, pair in parts]
        return sum(4 * (pair.down.numel() + pair.up.numel()) for pair in pairs)

    def add(self, files: LoraFiles) -> int:
        """Load an adapter and return its number; raises InputError for one that does not fit the model."""
        place = next(each for each in range(len(self.places) + 1) if each not in self.places.values())
        modules, pairs = dict(self.model.named_modules()), files.pairs(self.model, self._tp[1])
        touched = []
        for name, pair in pairs.items():
            mine = self._part(name, modules[name], pair)
            for site, first in self._sites_of(name, modules[name]):
                site.parts.setdefault(place, []).append((first, mine))
                touched.append(site)
        self.places[files.digest] = place
        self._build(touched)
        return place

    def remove(self, digest: str) -> None:
        place = self.places.pop(digest)
        self._build([site for site in self._sites.values() if site.parts.pop(place, None) is not None])

    def uncalled(self, place: int) -> str | None:
        """The name of a site of this adapter that no step has called since `add`; None if all were called."""
        called = {site.name: False for site in self._sites.values() if place in site.parts}
        for site in self._sites.values():
            if place in site.parts:
                called[site.name] |= site.was_called
        return next((name for name, was_called in called.items() if not was_called), None)

    @contextmanager
    def for_all_rows(self, place: int) -> Iterator[None]:
        """Context: outside of steps the model applies one adapter to all rows, by the definition."""
        self.everywhere = place
        try:
            yield
        finally:
            self.everywhere = None

    def to_model(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype)

    def owners(self, places: tuple[int, ...]) -> Tensor:
        """The tensor of `places`, shared by sites with equal owners, which then share a mask."""
        if places not in self._owners:
            self._owners[places] = torch.tensor(places, dtype=torch.int32, device=self.device)
        return self._owners[places]

    def _build(self, sites: Sequence[Site]) -> None:
        self._owners.clear()
        for site in self._sites.values() if not self.is_native else sites:
            site.build()

    def _part(self, name: str, module: Any, pair: Pair) -> Pair:
        # Not `module.weight`: a prepacked layer would unpack it.
        is_split = any(isinstance(each, DTensor) for each in module.parameters(recurse=False))
        if is_split or type(module).__module__.startswith("deepspeed."):
            raise InputError(f"--tp splits {name} in a way that adapters do not follow; --tp 1 works")
        (rank, size), down, up = self._tp, pair.down, pair.up
        outputs, inputs = module.weight.shape if size > 1 else (len(up), down.shape[1])  # low-bit ones differ
        if inputs < down.shape[1]:
            begin = -(-down.shape[1] // size) * rank
            down = down[:, begin : begin + inputs].clone()
        if (cut := getattr(module, "split_outputs", None)) is not None:
            up = up[cut.places(rank, size)]
        elif outputs < len(up):
            begin = -(-len(up) // size) * rank
            if module.out_features == outputs:  # a replicated key/value head
                begin = rank * (len(up) // outputs) // size * outputs
            up = up[begin : begin + outputs].clone()
        return Pair(_laid_out(down), _laid_out(up)) if self.is_native else Pair(down, up)

    def _sites_of(self, name: str, module: Any) -> list[tuple[Site, int]]:
        """The sites of a module, each with the module's first output in it."""
        pack, found = getattr(module, "pack", None), []
        if isinstance(pack, Pack):
            place = getattr(module, "place", None)
            found.append((self._site(pack, "multiply", name), sum(pack.sizes[: place or 0])))
            if place is not None:
                return found
        method = "multiply" if isinstance(module, ReducedLinear) else "forward"
        return [*found, (self._site(module, method, name), 0)]

    def _site(self, owner: Any, method: str, name: str) -> Site:
        key = id(owner), method
        if key not in self._sites:
            self._sites[key] = site = Site(self, name)
            setattr(owner, method, partial(_adapted, site, getattr(owner, method)))
        return self._sites[key]


def _laid_out(weight: Tensor) -> Tensor:
    """`weight` [outputs, inputs] as C++ reads it: column by column, each padded to whole vectors."""
    columns = torch.zeros(weight.shape[1], -(-len(weight) // _LANES) * _LANES)
    columns[:, : len(weight)] = weight.T
    return columns[:, : len(weight)].T


def _adapted(site: Site, multiply: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    product, step = multiply(states), current_step()
    if step is not None and step.adapters is not None and step.adapters.bank is site.bank:
        before = product.clone() if site.bank.sums is not None else product
        site.add(product, states, step.adapters)
        if site.bank.sums is not None:
            site.bank.sums.append((site, before, product.clone(), states.clone()))
    elif step is None and site.bank.everywhere is not None:
        site.add_to_all(product, states, site.bank.everywhere)
    return product
