"""The ranks' side of the service: their processes, the driver on rank 0 and its line to the front."""
