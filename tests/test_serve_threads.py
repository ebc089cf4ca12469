"""How the front starts its ranks' threads."""

import asyncio
from pathlib import Path

import pytest

from lpr.serve.keeper import Ranks


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_ranks_wait_asleep_unless_told_otherwise(given, policy, tmp_path: Path, monkeypatch) -> None:
    found = {}

    async def start(*_, env, **__):
        found.update(env)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    asyncio.run(Ranks([], 1, 1, tmp_path / "socket").start())
    assert found["OMP_WAIT_POLICY"] == policy
