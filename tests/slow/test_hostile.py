"""The long tests of tests/benchmarks/test_soak.py."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.hostile.neighbours import KEYS
from tests.benchmarks.test_soak import client_of, service
from tests.fakes.hostile.probes import PROBES


@pytest.mark.parametrize("name", [name for name, each in PROBES.items() if not each.is_keyless])
def test_no_hostile_client_gets_more_than_it_should(name, service):
    seen, problem = PROBES[name].once(client_of(service.url, KEYS[0]))
    assert not problem and seen
    assert service.process.poll() is None and httpx.get(service.url + "/livez").status_code == 200
