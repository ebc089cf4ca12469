"""How a rank's process starts."""

import asyncio
from pathlib import Path

import pytest

from lpr.serve.keeper import Ranks


@pytest.mark.parametrize(
    ("given", "policy", "num_ranks", "spin"),
    [(None, "PASSIVE", 1, True), (None, "PASSIVE", 2, False), ("ACTIVE", "ACTIVE", 1, False)],
)
def test_threads_of_ranks_wait_asleep_unless_told_otherwise(
    given, policy, num_ranks, spin, tmp_path: Path, monkeypatch
) -> None:
    found = {}

    async def start(*_, env, **__):
        found.update(env)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    asyncio.run(Ranks([], num_ranks, 1, tmp_path / "socket").start())
    assert found["OMP_WAIT_POLICY"] == policy and ("GOMP_SPINCOUNT" in found) == spin
