"""Runs torchrun and its ranks with a time-out, and reports why a run failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
GRACE = 40.0
"""Seconds for torchrun to end its ranks; it gives them 30."""


class RunFailedError(RuntimeError):
    """A run failed; the message is one line."""


def execute(command: Sequence[str], timeout: float, threads: int = 0, folder: Path | None = None) -> str:
    """The stdout of `command`; raises RunFailedError if it fails or takes more than `timeout` seconds."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="lpr-run-") as made:
            return execute(command, timeout, threads, Path(made))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    # Files, not pipes: a rank that outlives its launcher would hold a pipe open.
    out, err = folder / "stdout", folder / "stderr"
    with out.open("w") as out_file, err.open("w") as err_file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file, env=env)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"did not end within {timeout:g} s") from None
        finally:
            stop(process)
    if code:
        raise RunFailedError(f"exit code {code}: {last_line(err.read_text(encoding='utf-8', errors='replace'))}")
    return out.read_text(encoding="utf-8")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a running launcher, which ends its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(stderr: str) -> str:
    """The most informative line of stderr: lpr's own, else an exception other than torchrun's, else the last."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" =-")]
    own = [line for line in lines if line.startswith("lpr.generate:")]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]+(Error|Exception): ", line)]
    raised = [line for line in raised if "ChildFailedError" not in line]
    return (own or raised or lines or ["nothing on stderr"])[-1]
