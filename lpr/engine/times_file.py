"""The step times that an engine starts with: given by the user, kept on disk from an earlier start, or measured.

There is one JSON file per model, precision, device, number of threads and version, in `~/.cache/lpr/step_times`
(XDG_CACHE_HOME moves it); it saves seconds of measuring. Rank 0 reads it for all ranks, as it measures for all. The
file need not be right: rank 0 follows what steps really take (lpr.core.step_times), which `Engine.close` writes back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lpr.config import InputError
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, agree, is_driver
from lpr.engine.sizing import measure_step_times
from lpr.files import replace_file
from lpr.model.cache import TreeCache
from lpr.model.runner import TreeModel


class StartTimes:
    """The step times that all ranks begin to decide by."""

    def __init__(self, given: StepTimes | None) -> None:
        """Not known yet; `given` are those that the user has given, on the driver, until all ranks have them."""
        self.given = given
        self.times: StepTimes | None = None
        self.follows = True
        """True if the times that steps really take change them."""
        self._file: TimesFile | None = None

    def give(self, times: StepTimes) -> None:
        """Decide by the user's times for good."""
        self.times, self.follows = times, False

    def update(self, times: StepTimes | None) -> None:
        """Begin again with these times, if there are any."""
        self.times = times or self.times

    def find(
        self, model: TreeModel, like: TreeCache, comm: Comm, max_nodes: int, max_length: int, max_batch_size: int
    ) -> StepTimes:
        """The step times, the same on all ranks; measured up to these sizes if they are neither known nor on disk.

        Raises InputError if the model's smallest cache does not fit.
        """
        if self.times is None:
            agree(comm, model.shortage(max_batch_size, max_length, 1, like, comm.num_sharing))
            limits = max_nodes, max_length, max_batch_size
            self._file = TimesFile(model, comm, *limits)
            self.times = self._file.read_or(partial(measure_step_times, model, like, comm, *limits))
        return self.times

    def keep(self, times: StepTimes | None) -> None:
        """Let the next start begin with `times`, if they come from measurements."""
        if self._file is not None and self.follows and times is not None:
            self._file.write(times)


class TimesFile:
    """The file that keeps the step times of one setting."""

    def __init__(self, model: TreeModel, comm: Comm, *sizes: int) -> None:
        """The file for `model` as it runs now, measured up to `sizes` (nodes, length, batch) on the ranks of `comm`."""
        facts = [
            *(model.config.to_json_string(), str(next(model.model.parameters()).dtype), str(model.device.type)),
            torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor(),
            *(torch.get_num_threads(), torch.__version__, model.attention, model.packed, model.graphs is not None),
            *(platform.node(), comm.size, comm.tp_size, model.exact, *sizes),
        ]
        name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(home) / "lpr" / "step_times" / f"{name}.json"
        self._comm = comm

    def read_or(self, measure: Callable[[], StepTimes]) -> StepTimes:
        """The step times in rank 0's file, the same on all ranks; without a file those of `measure`, which are kept."""
        known = self._read() if is_driver(self._comm) else b""
        length = int(self._comm.gather(torch.tensor([len(known)], dtype=torch.int32))[0, 0])
        found = self._comm.broadcast(known, length) if length else b""
        if found:  # nothing where rank 0 was lost meanwhile
            return StepTimes.from_json(json.loads(found))
        measured = measure()
        self.write(measured)
        return measured

    def write(self, times: StepTimes) -> None:
        """On rank 0, write the file. A failure is logged only: the next start measures again."""
        if not is_driver(self._comm):
            return
        try:
            replace_file(self.path, json.dumps(times.to_json()).encode() + b"\n")
        except OSError as failure:
            logging.getLogger(__name__).info("step times are not kept: %s", failure)

    def _read(self) -> bytes:
        """The file's content; empty if it is missing or damaged."""
        try:
            found = self.path.read_bytes()
            StepTimes.from_json(json.loads(found))
        except (OSError, ValueError, TypeError, InputError):
            return b""
        return found
