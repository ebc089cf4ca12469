"""The long tests of tests/benchmarks/test_serve.py."""

from __future__ import annotations

import httpx
import pytest
from benchmarks.hostile.probes import PROBES
from benchmarks.hostile.under_test import KEYS
from tests.benchmarks.test_serve import client_of, service


@pytest.mark.parametrize("name", [name for name, each in PROBES.items() if not each.is_keyless])
def test_no_hostile_client_gets_more_than_it_should(name, service):
    seen, problem = PROBES[name].once(client_of(service.url, KEYS[0]))
    assert not problem and seen
    assert service.process.poll() is None and httpx.get(service.url + "/livez").status_code == 200
