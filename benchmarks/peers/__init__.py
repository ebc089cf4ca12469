"""lpr and its peers on the same prompts and the same weights: `python -m benchmarks.peers` (see `command`).

A script per peer (`lade`, `pia`, `arctic`, `prompt_lookup`; `own` is lpr) says where the peer comes from, what is done
otherwise than by its authors so that it runs, and completes prompts with it in a process of its own, in the peer's own
environment. Nothing of a peer is part of this repository. The scripts import no package at their top, as the command
reads them in another environment.
"""
