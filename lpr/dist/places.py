"""What a supervisor says to the ranks that it starts, in their environment; imports no torch.

A rank finds torchrun's variables. RANK counts all ranks that were ever started: those of the start are below
WORLD_SIZE, as under torchrun, and one that replaces a lost one has a number that no other has had. LOCAL_RANK is its
place in the full mesh.
"""

SUPERVISED = "LPR_SUPERVISED"
"""Set where lost ranks are replaced while the others go on (lpr.dist.supervisor)."""
