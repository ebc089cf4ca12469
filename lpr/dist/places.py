"""What a supervisor says to the ranks that it starts, in their environment; imports no torch.

Besides these, a rank finds torchrun's variables: RANK and WORLD_SIZE are its place in the full mesh.
"""

REPLICA = "LPR_REPLICA"
"""Number of the rank's replica among all that the job has started."""
JOINS = "LPR_JOINS"
"""Set where the rank replaces one that was lost, and so joins a mesh that may be running."""
