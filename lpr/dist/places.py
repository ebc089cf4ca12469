"""The environment of ranks that a supervisor starts; imports no torch.

A rank gets torchrun's variables. RANK counts all ranks that were ever started: the initial ones are below WORLD_SIZE,
as under torchrun, and a replacement gets a number that was never used. LOCAL_RANK is its place in the full mesh.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from lpr.config import InputError

SUPERVISED = "LPR_SUPERVISED"
"""Process id of the supervisor; set if lost ranks are replaced while the others continue."""
DOOR = "LPR_STORE_DOOR"  # file descriptor of a supervised rank's socket to the rendezvous store
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interface of gloo and of NCCL."""
_DIGITS = 9  # most digits of a number in the environment
_FOREIGN = ("GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT")


def is_launched() -> bool:
    """True if torchrun, or another launcher with its environment, started this process."""
    return bool(os.environ.get("RANK") and os.environ.get("MASTER_ADDR"))


def whole_number(name: str, default: int) -> int:
    """An integer environment variable of a launcher; raises InputError. An empty variable counts as unset."""
    text = os.environ.get(name) or str(default)
    if not text.strip().isdecimal() or len(text) > _DIGITS:
        raise InputError(f"{name} must be a whole number, not {text[:40]!r}: unset it, or use torchrun")
    return int(text)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG


def loopback() -> dict[str, str]:
    """Variables that keep gloo's and NCCL's sockets on this machine."""
    names = [name for _, name in socket.if_nameindex()]
    name = next((each for each in ("lo", "lo0") if each in names), None)
    return {} if name is None else dict.fromkeys(INTERFACES, name)


def rank_environment(
    variables: Mapping[str, str], rank: int, local_rank: int, num_ranks: int, door: int
) -> dict[str, str]:
    """The environment of a rank: `variables` without those of other launchers, plus torchrun's.

    `door` is the file descriptor of the rank's socket to the store.
    """
    kept = {
        name: value
        for name, value in variables.items()
        if name not in _FOREIGN and not name.startswith("TORCHELASTIC_")
    }
    # Ranks of one machine share its cores. (torchrun sets one thread per rank, with a warning.)
    share = max(1, (os.cpu_count() or 1) // num_ranks)
    return {
        "OMP_NUM_THREADS": str(share), **loopback(), **kept,
        "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", DOOR: str(door), SUPERVISED: str(os.getpid()),
    }  # fmt: skip


def process_state(pid: int) -> str:
    """The state of a process as `ps` shows it, one letter; empty without such a process or without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
