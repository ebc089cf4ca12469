"""The notebook of the documentation runs as it stands."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.fakes.paths import ROOT


def test_the_notebook_runs() -> None:
    cells = json.loads((ROOT / "docs" / "try_it.ipynb").read_text(encoding="utf-8"))["cells"]
    program = "\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "code")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in done.stdout.splitlines()[1:5]}
    for temperature in ("0.0", "0.8"):
        plain, ahead = rows[temperature, "plain"], rows[temperature, "lookahead"]
        assert plain[1] == ahead[1] and int(plain[0]) >= int(ahead[0])
