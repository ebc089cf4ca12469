"""The initial step times of an engine: given by the user, read from a cache file, or measured.

There is one JSON file per model, precision, device, number of threads and version, in `~/.cache/lpr/step_times`
(under XDG_CACHE_HOME if set); it saves seconds of measuring. Rank 0 reads or measures for all ranks. Errors in the file
are corrected: rank 0 updates the times by measured steps (lpr.core.step_times), and `Engine.close` writes them back.
Implausible times, or ones measured while another program disturbed the machine, are used but not saved, so that the
next start measures again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from pathlib import Path

import torch

from lpr.config import InputError
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, agree, is_driver
from lpr.engine.kv_pool import lack_of_room
from lpr.engine.sizing import measure_step_times, measured_tokens
from lpr.files import replace_file
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel

_LOG = logging.getLogger(__name__)
_MEASURED_AS = 7  # incremented when `measure_step_times` changes, so that older files are not read


class StartTimes:
    """The initial step times of all ranks."""

    def __init__(self, given: StepTimes | None, comm: Comm) -> None:
        """No step times yet; `given`, on the driver, are those of the user, which `find` sends to all ranks."""
        self.given = given
        self.times: StepTimes | None = None
        self.follows = True  # True if measured steps update the times
        self.path: Path | None = None  # the cache file; None if the times were given, or disturbed
        self._comm = comm

    def find(self, model: TreeModel, like: KVCache, max_nodes: int, max_length: int, max_batch_size: int) -> StepTimes:
        """The step times, the same on all ranks; measured up to these sizes if they are neither known nor on disk.

        Raises InputError if the cache for measuring does not fit.
        """
        if self.times is None:
            tokens = measured_tokens(model.device, max_nodes, max_length, max_batch_size)
            agree(self._comm, lack_of_room(model.free_bytes(self._comm.num_sharing), tokens, like.bytes_per_token))
            limits = max_nodes, max_length, max_batch_size
            self.path = times_path(model, self._comm, *limits)
            self.times = self._read()
            if self.times is None:
                self.times, sure = measure_step_times(model, like, self._comm, *limits)
                if not sure:
                    _LOG.info("step times are not kept: repeated times differ, the machine is busy")
                    self.path = None
                self.keep(self.times)
        return self.times

    def keep(self, times: StepTimes | None) -> None:
        """On rank 0, write measured times for the next start. A failure is logged only: the next start measures."""
        if self.path is None or not self.follows or times is None or not is_driver(self._comm):
            return
        try:
            if fault := times.fault():
                raise ValueError(fault)
            replace_file(self.path, json.dumps(times.to_json()).encode() + b"\n")
        except (OSError, ValueError) as failure:
            _LOG.info("step times are not kept: %s", failure)

    def _read(self) -> StepTimes | None:
        """The step times in rank 0's file, on all ranks; None without a sound file, or if rank 0 was lost meanwhile."""
        known = b""
        if is_driver(self._comm) and self.path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, InputError):
                data = self.path.read_bytes()
                known = b"" if StepTimes.from_json(json.loads(data)).fault() else data
        length = int(self._comm.gather(torch.tensor([len(known)], dtype=torch.int32))[0, 0])
        found = self._comm.broadcast(known, length) if length else b""
        return StepTimes.from_json(json.loads(found)) if found else None


def times_path(model: TreeModel, comm: Comm, *sizes: int) -> Path:
    """The file for `model` as it runs now, measured up to `sizes` (nodes, length, batch) on the ranks of `comm`."""
    facts = [
        *(model.adapter.config.to_json_string(), str(next(model.model.parameters()).dtype), str(model.device.type)),
        torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor(),
        *(torch.get_num_threads(), torch.__version__, model.attention, model.packed, model.graphs is not None),
        *(platform.node(), comm.size, comm.tp_size, model.exact, _MEASURED_AS, *sizes),
    ]
    name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lpr" / "step_times" / f"{name}.json"
