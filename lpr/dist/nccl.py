"""NCCL for a mesh that outlives its members: settings of the process, and groups that are connected when they are made.

By default torch's watchdog ends the process when a collective fails or takes long, and asks other ranks through the
rendezvous store to end theirs. lpr detects failed collectives itself (lpr.dist.group).
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_SETTINGS = {
    "NCCL_GRAPH_REGISTER": "0",  # else a capture registers its buffers with all ranks, which may not all capture
    "NCCL_RUNTIME_CONNECT": "0",  # connect all at once instead of in the first collective that needs a connection
}
_ELASTIC = {
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # a wait holds up the stream alone: the host looks for losses meanwhile
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Settings that keep the watchdog from ending a process whose group is broken: the rank continues in a new group."""
_TIMEOUT = timedelta(days=30)  # NCCL's time-out ends the communicator, so it is longer than all of lpr's waits
_POLL = 0.001


def prepare_environment(survives: bool) -> None:
    """Set environment variables that torch and NCCL read at the first group; `survives`: a lost rank ends no other."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if survives:
        os.environ.update(_ELASTIC)


def make_connected(store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """An NCCL group of `size` ranks that has completed a first collective; raises RuntimeError.

    NCCL connects in the first collective, in a call that cannot be interrupted if a rank is lost. Call this in a thread
    that may be abandoned.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    made: Any = dist.ProcessGroupNCCL(store, rank, size, options)  # its sockets check a random number of the store
    with torch.cuda.device(device):  # the current device of a new thread is 0
        made.eager_connect_single_device(device)
        found = torch.empty(size, dtype=torch.int32, device=device)
        work = made._allgather_base(found, torch.full((1,), rank, dtype=torch.int32, device=device))
        until = time.monotonic() + timeout
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"the first collective of {size} ranks did not end within {timeout:.0f} s")
            time.sleep(_POLL)
        work.wait()
    return made
