"""The environment of ranks that a supervisor starts; imports no torch.

A rank finds torchrun's variables. RANK counts all ranks that were ever started: those of the start are below
WORLD_SIZE, as under torchrun, and one that replaces a lost one has a number that no other has had. LOCAL_RANK is its
place in the full mesh.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

SUPERVISED = "LPR_SUPERVISED"
"""Set where lost ranks are replaced while the others go on: the process id of their supervisor."""
_FOREIGN = ("GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG


def rank_environment(
    variables: Mapping[str, str], rank: int, local_rank: int, num_ranks: int, port: int
) -> dict[str, str]:
    """The environment of a rank: `variables` without what another launcher meant for its own ranks, and torchrun's."""
    kept = {
        name: value
        for name, value in variables.items()
        if name not in _FOREIGN and not name.startswith("TORCHELASTIC_")
    }
    # Ranks of one machine share its cores; torchrun would give each of them a single thread, with a warning.
    share = max(1, (os.cpu_count() or 1) // num_ranks)
    return {
        "OMP_NUM_THREADS": str(share), **kept,
        "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", SUPERVISED: str(os.getpid()),
    }  # fmt: skip
