"""The wheel, installed where there is no checkout and no compiler: the first command and the service run from it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.fakes.paths import ROOT


def run(command: Sequence[str | Path], folder: Path, environment: dict[str, str] | None = None) -> str:
    """The standard output of a command that ends well."""
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def fresh(folder: Path) -> tuple[Path, dict[str, str], Path]:
    """The Python of an environment with the wheel, variables without a compiler on PATH, and an empty folder.

    The wheel is built from the sdist, with the extension that this environment has compiled from the same sources. Its
    dependencies are those of the environment that runs the tests, which is a folder on the path: its own lpr, an
    editable one, is not seen there.
    """
    for kind, source in (("sdist", ROOT), ("wheel", folder / "unpacked")):
        command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder / kind, source]
        run(command, folder)
        if kind == "sdist":
            with tarfile.open(next((folder / kind).glob("*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
            next(folder.glob("lpr-*")).rename(folder / "unpacked")
            sources = [folder / "unpacked" / each.relative_to(ROOT) for each in (ROOT / "native").iterdir()]
            assert sources and all(each.exists() for each in sources)
            (compiled,) = (ROOT / "lpr").glob("_native*.so")
            shutil.copy(compiled, folder / "unpacked" / "lpr")
    (wheel,) = (folder / "wheel").glob("*.whl")
    assert re.match(r"lpr-[\d.]+-cp3\d+-cp3\d+-linux", wheel.name), "the extension is in it"
    home = folder / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LPR_"))}
    environment = {**variables, "PATH": str(home / "bin"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run([python, "-m", "pip", "install", "--no-deps", "--no-index", wheel], folder, environment)
    empty = folder / "empty"
    empty.mkdir()
    return python, environment, empty


@pytest.mark.timeout(1800)
def test_the_first_command_and_the_service_run_from_the_wheel(tmp_path: Path) -> None:
    python, environment, folder = fresh(tmp_path)
    place = run(
        [python, "-c", "import lpr, lpr.native; print(lpr.__file__, lpr.native.is_native)"], folder, environment
    )
    assert str(python.parent.parent) in place and place.split()[-1] == "True"
    printed = run(
        [python, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "lpr.generate"], folder, environment
    )
    assert "def " in printed and re.search(r"│ +yes │", printed), "the same tokens as plain decoding"
    process = subprocess.Popen(
        [python, "-m", "lpr.serve", "--port", "0"], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        lines = []
        while (line := process.stdout.readline()) and "listening on" not in line:
            lines.append(line)
        url = line.split("listening on ")[1].split()[0]
        end = time.monotonic() + 300
        while httpx.get(f"{url}/readyz", timeout=60).status_code != 200:
            assert time.monotonic() < end and process.poll() is None, lines
            time.sleep(0.5)
        body = {"prompt": "def add(a, b):\n", "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"], lines
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 0
