"""The ranks' side of the service: their processes, the driver on rank 0 and its line to the front."""

SOCKET = "LPR_SERVE_SOCKET"
"""Environment variable that tells rank 0 where the front listens."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
            "MASTER_PORT")  # fmt: skip
"""Environment variables of a launcher's ranks."""
ORIGIN = "LPR_SERVE_ORIGIN"
"""Environment variable that names one start of the ranks, so that a driver recognises its own shared drafts."""
