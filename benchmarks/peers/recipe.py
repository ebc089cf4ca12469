"""What a peer is: where it comes from, what is done otherwise, and in which variants it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """Someone who completes prompts in a process of its own."""

    name: str
    """As the command line and the table call it."""
    module: str
    """The script that completes prompts with it."""
    variants: Mapping[str, str]
    """Settings under test, by name: what they are."""
    why: str
    """What a reader must know to judge its figures."""
    repository: str = ""
    """Where git finds it; nothing: it is a package of the environment that this command runs in."""
    commit: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)
    """What is taken of a checkout, and as which folder it is imported."""
    requirements: Sequence[str] = ()
    """What pip installs into its environment."""
    changes: Sequence[str] = ()
    """What is done otherwise than its authors do, so that it runs here. No peer's source is edited."""
    build: Callable[[Path, Path], None] | None = None
    """Compiles it, given the environment's folder and the one that holds `folders`."""
    old_weights: bool = False
    """Does it read the model folder of a transformers 4?"""
    model_type: str = ""
    """The architecture whose code it runs the model with, where that is not the model's own name for itself."""
    learns: Sequence[str] = ()
    """The variants that keep text from one prompt for the next."""
    samples: bool = True
    """Does it decode at a temperature?"""
    replays: bool = False
    """Does it draft for texts that are there already, instead of completing prompts?"""

    @property
    def identity(self) -> str:
        """What would make another installation necessary."""
        return json.dumps([self.repository, self.commit, dict(self.folders), list(self.requirements)])
