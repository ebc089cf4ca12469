"""The layout of a step's rows in the inputs of a recurrent layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lpr.model.recurrent.scans import Written
from lpr.model.recurrent.tree import Path, Tree
from lpr.model.step_inputs import Row, StepInputs
from lpr.model.transfer import to_device

SHORT = 32  # most entries of a chain above a tree that is scanned as part of the tree. A longer chain is scanned first.

Site = tuple[str, int, int]  # A convolution or a scan: its kind, its layer, and its number in the layer


@dataclass
class Layout:
    """B rows with T entries each, padded on the left: first chains of `split` entries, then trees below them."""

    rows: Sequence[Row]
    start: int  # place of the first entry among the N of the step's inputs
    width: int  # T
    device: torch.device
    splits: bool = True
    kept: dict[Site, tuple[Tensor, Written | None]] = field(default_factory=dict)
    """Per site, the states after the chains, and the contributions of the trees."""

    @cached_property
    def pads(self) -> np.ndarray:
        return np.array([self.width - row.num_entries for row in self.rows])

    @cached_property
    def split(self) -> int:
        """Length of the chains, whose entries are committed in any case; 0 if not `splits`."""
        ends = [pad + certain_entries(row) for pad, row in zip(self.pads, self.rows, strict=True) if row.num_entries]
        end = min(ends, default=self.width)
        return end if self.splits and (end > SHORT or end == self.width) else 0

    @cached_property
    def parents(self) -> np.ndarray:
        """Int64 [B, T]: parents' columns; negative: follows the state. Padding is a chain before the first entry."""
        found = np.tile(np.arange(-1, self.width - 1), (len(self.rows), 1))
        for each, pad, row in zip(found, self.pads, self.rows, strict=True):
            each[pad:] = np.where(row.parents >= 0, row.parents + pad, -1)
        return found

    @cached_property
    def tree(self) -> Tree:
        return Tree(np.maximum(self.parents[:, self.split :] - self.split, -1), self.device)

    @cached_property
    def chains(self) -> Tree:
        return Tree(self.parents[:, : self.split], self.device)

    @cached_property
    def ends(self) -> Path | None:
        if self.real is None:
            return None
        last = np.where(self.pads < self.split, self.split - 1, -1)
        nothing = torch.zeros(len(self.rows), 0, dtype=torch.int64, device=self.device)
        return Path(nothing, nothing.bool(), to_device(last, self.device))

    @cached_property
    def real(self) -> Tensor | None:
        """[B, T] bool: False for padding; None without padding."""
        if not self.pads.any():
            return None
        return to_device(np.arange(self.width) >= self.pads[:, None], self.device)

    @cached_property
    def slots(self) -> slice | Tensor:
        slots = np.array([row.slot for row in self.rows])
        if (np.diff(slots) == 1).all():
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return to_device(slots, self.device)

    @cached_property
    def begun(self) -> Tensor | bool:
        """True if the sequence has a state, [B] bool if rows differ: without computed tokens there is none."""
        begun = np.array([row.num_cached > 0 for row in self.rows])
        return bool(begun[0]) if (begun == begun[0]).all() else to_device(begun, self.device)

    def read(self, states: Tensor) -> Tensor:
        """The rows' states [B, ...] before the step, from those of all slots; read-only."""
        found = states[self.slots]
        if isinstance(self.begun, bool):
            return found if self.begun else torch.zeros_like(found)
        return torch.where(self.begun.view(-1, *[1] * (found.dim() - 1)), found, 0)

    def cut(self, values: Tensor, dim: int) -> Tensor:
        """The part [B, ..., T, ...] of the inputs [R, ..., N, ...] of a layer, N at `dim`."""
        return values.narrow(dim, self.start, self.width)

    def path(self, kept: Sequence[Sequence[int]]) -> Path:
        """The accepted entries of each row after the chains; none for a row that does not advance."""
        columns: list[list[int]] = []
        for pad, entries in zip(self.pads.tolist(), kept, strict=True):
            above = max(0, self.split - pad)
            if entries and list(entries[:above]) != list(range(above)):
                raise ValueError("an entry above a tree was not accepted")
            columns.append([entry + pad - self.split for entry in entries[above:]])
        most = max(map(len, columns))
        places = np.array([each + [0] * (most - len(each)) for each in columns], np.int64).reshape(len(columns), most)
        real = np.arange(most) < np.array([len(each) for each in columns])[:, None]
        last = np.array([each[-1] if each else -1 for each in columns], np.int64)
        return Path(*(to_device(each, self.device) for each in (places, real, last)))


def certain_entries(row: Row) -> int:
    """Number of leading entries of a row that form a chain and are committed in any case.

    These are a row's pending chain with the root, or a whole chunk of a pending chain.
    """
    parents = row.parents
    most = row.num_entries - row.num_results + 1 if row.num_results else row.num_entries
    breaks = np.nonzero(parents[:most] != np.arange(-1, most - 1))[0]
    count = int(breaks[0]) if len(breaks) else most
    return min(count, int(parents[count:].min()) + 1) if count < row.num_entries else count


def layouts(step: StepInputs, device: torch.device, splits: bool) -> list[Layout]:
    """The layouts of a step's blocks; for a single packed block (see `build_page_inputs`), one per row."""
    rows, found = list(step.rows), []
    if len(step.blocks) == 1 and len(rows) > len(step.positions):
        ends = np.cumsum([row.num_entries for row in rows])
        ends += step.positions.shape[1] - ends[-1]
        starts = [0, *ends[:-1].tolist()]  # padding for exact products precedes the first row
        return [
            Layout([row], start, end - start, device, splits)
            for row, start, end in zip(rows, starts, ends.tolist(), strict=True)
        ]
    for block in step.blocks:
        batch, width = block.positions.shape
        found.append(Layout(rows[:batch], block.start, width, device, splits))
        rows = rows[batch:]
    return found
