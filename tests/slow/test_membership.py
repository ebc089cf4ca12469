"""The long tests of tests/dist/test_membership.py."""

from __future__ import annotations

from pathlib import Path

from tests.dist.test_membership import supervise


def test_ranks_that_cannot_start_are_given_up(tmp_path: Path) -> None:
    """Bad input is not tried again; a start that fails is, a few times."""
    code = "import os, sys\nopen('started', 'a').write(os.environ['RANK'] + ' ')\nsys.exit(2)"
    refused = supervise(tmp_path, code)
    assert refused.returncode == 2
    assert sorted((tmp_path / "started").read_text().split()) == ["0", "1"]
    (tmp_path / "started").unlink()
    failed = supervise(tmp_path, code.replace("exit(2)", "exit(3)"), num_ranks=1)
    assert failed.returncode == 1
    assert (tmp_path / "started").read_text().split() == ["0", "1", "2"]
    assert "replica 2 was lost (codes [3])" in failed.stderr
