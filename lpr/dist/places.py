"""What a supervisor says to the ranks that it starts, in their environment; imports no torch.

A rank finds torchrun's variables. RANK counts all ranks that were ever started: those of the start are below
WORLD_SIZE, as under torchrun, and one that replaces a lost one has a number that no other has had. LOCAL_RANK is its
place in the full mesh.
"""

from __future__ import annotations

import ctypes
import signal
import sys

SUPERVISED = "LPR_SUPERVISED"
"""Set where lost ranks are replaced while the others go on: the process id of their supervisor."""


def die_with_parent() -> None:
    """Ask Linux to end this process when the one that started it dies, whichever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
