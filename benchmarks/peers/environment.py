"""Installs a peer: its source at a pinned commit, and packages in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import git, read_json, write_json
from benchmarks.peers.worker import Peer
from lpr.config import InputError

INSTALL_SECONDS = 1800
MARK = "installed.json"
TO_PACKAGES = "peer.pth"


def python_of(peer: Peer, work: Path) -> Path:
    """The interpreter that the peer runs in."""
    return work / peer.name / "environment" / "bin" / "python" if peer.repository else Path(sys.executable)


def install(peer: Peer, work: Path, source: Path | None = None) -> None:
    """Install `peer` under `work`, unless it is there; `source` is a checkout to use instead of cloning."""
    home = work / peer.name
    if not peer.repository or installed(peer, work):
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    checkout = source or clone(peer, home / "checkout")
    copy(peer, checkout, home / "packages")
    venv.create(home / "environment", with_pip=True)
    wanted = [each.format(torch=torch.__version__.split("+")[0]) for each in peer.requirements]
    python = python_of(peer, work)
    call([str(python), "-m", "pip", "install", "--quiet", *wanted], f"cannot install what {peer.name} needs")
    packages = next((home / "environment" / "lib").glob("python*/site-packages"))
    (packages / TO_PACKAGES).write_text(f"{(home / 'packages').resolve()}\n", encoding="utf-8")
    if peer.build is not None:
        try:
            peer.build(home / "environment", home / "packages")
        except (OSError, subprocess.SubprocessError) as failure:
            raise InputError(f"cannot compile {peer.name}: {last_line(failure)}") from failure
    write_json(home / MARK, {"identity": peer.identity, "commit": commit_of(checkout)})


def installed(peer: Peer, work: Path) -> dict[str, Any] | None:
    """The record of the peer's installation, if it is of the same recipe."""
    mark = work / peer.name / MARK
    if not mark.exists():
        return None
    found: dict[str, Any] = read_json(mark)
    return found if found.get("identity") == peer.identity else None


def clone(peer: Peer, folder: Path) -> Path:
    """The pinned commit, fetched by git; raises InputError."""
    folder.mkdir(parents=True)
    for words in (
        ["init", "--quiet"],
        ["fetch", "--quiet", "--depth", "1", peer.repository, peer.commit],
        ["checkout", "--quiet", "FETCH_HEAD"],
    ):
        what = f"cannot fetch {peer.repository}; --source {peer.name}=DIR takes a checkout"
        call(["git", "-C", str(folder), *words], what)
    return folder


def copy(peer: Peer, checkout: Path, packages: Path) -> None:
    """Copy the recipe's folders from the checkout to the packages; raises InputError."""
    for name, place in peer.folders.items():
        if not (checkout / name).is_dir():
            raise InputError(f"{checkout} is no checkout of {peer.repository}: it has no folder {name}")
        shutil.copytree(checkout / name, packages / place)


def commit_of(checkout: Path) -> str:
    """The commit of a checkout; "unknown" without git's records."""
    return (git(checkout, "rev-parse", "HEAD") if (checkout / ".git").exists() else "") or "unknown"


def weights_for(peer: Peer, model: Path, work: Path) -> Path:
    """A model folder that the peer can read: `model`, or its weights with a configuration in an older form."""
    if not peer.old_weights:
        return model
    folder = work / peer.name / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", older(read_json(model / "config.json"), peer.model_type))
    for file in model.glob("*.safetensors"):
        (folder / file.name).symlink_to(file.resolve())
    return folder


def older(config: Mapping[str, Any], model_type: str = "") -> dict[str, Any]:
    """A configuration as transformers 4.36 reads it, with another architecture's name if one is given."""
    left_out = ("rope_parameters", "dtype", "transformers_version")
    made = {key: value for key, value in config.items() if key not in left_out}
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"rope of the kind {rope['rope_type']} is not supported by the peers")
    made["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if model_type:
        made["model_type"] = model_type
        made["architectures"] = [f"{model_type.capitalize()}ForCausalLM"]
        made["sliding_window"] = None
    return made


def call(command: list[str], what: str) -> None:
    """Run a command; raises InputError with `what` and the last line of its output."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.SubprocessError) as failure:
        raise InputError(f"{what}: {last_line(failure)}") from failure


def last_line(failure: Exception) -> str:
    """The last line that a failed command printed, or the failure."""
    output = getattr(failure, "stderr", None) or getattr(failure, "stdout", None) or b""
    text = output if isinstance(output, str) else output.decode(errors="replace")
    return (text.strip().splitlines() or [str(failure)])[-1]
