"""Step times kept on disk, so that an engine that starts again need not measure for seconds before its first request.

One JSON file per model, precision, device, number of threads and version, in `~/.cache/lpr/step_times` (XDG_CACHE_HOME
moves it). Rank 0 reads it for all ranks, as it measures for all. Nothing rests on the table being right: rank 0 follows
what steps really take (lpr.core.step_times), all ranks decide by what it finds, and `close` writes that back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from lpr.config import InputError
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, is_driver
from lpr.files import replace_file
from lpr.model.runner import TreeModel


class TimesFile:
    """Where the step times of one setting are kept."""

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
        """The table in rank 0's file, on all ranks alike; where there is none, what `measure` says, which is kept."""
        known = self._read() if is_driver(self._comm) else b""
        length = int(self._comm.gather(torch.tensor([len(known)], dtype=torch.int32))[0, 0])
        found = self._comm.broadcast(known, length) if length else b""
        if found:  # nothing where rank 0 was lost meanwhile
            return StepTimes.from_json(json.loads(found))
        measured = measure()
        self.write(measured)
        return measured

    def write(self, times: StepTimes) -> None:
        """On rank 0, keep a table; a disk that takes none costs the next start its seconds, no more."""
        if not is_driver(self._comm):
            return
        try:
            replace_file(self.path, json.dumps(times.to_json()).encode() + b"\n")
        except OSError as failure:
            logging.getLogger(__name__).info("step times are not kept: %s", failure)

    def _read(self) -> bytes:
        """What the file holds; nothing if it is missing or no table."""
        try:
            found = self.path.read_bytes()
            StepTimes.from_json(json.loads(found))
        except (OSError, ValueError, TypeError, InputError):
            return b""
        return found
