"""lpr and its peers on the same prompts and the same weights: `python -m benchmarks.peers`.

A script per peer (`lade`, `pia`, `arctic`, `prompt_lookup`; `own` is lpr) names the peer's source and the deviations
from its authors' setup, and completes prompts with it in a process in the peer's own environment. Nothing of a peer is
part of this repository. The scripts import no package at module level, as the command imports them in another
environment.
"""
