"""The long tests of tests/benchmarks/test_soak.py."""

import time

import httpx
import pytest

from benchmarks import soak
from benchmarks.hostile.attack import Attack, Plan
from benchmarks.hostile.livez import Livez, summary
from benchmarks.hostile.neighbours import KEYS, at_rest, attacked
from lpr import bundled_model
from tests.benchmarks.test_soak import client_of
from tests.fakes.hostile.probes import PROBES


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    flags = ["--model", bundled_model(), "--max-batch-size", "4"]
    with attacked(folder, flags, threads=1) as running:
        yield running


def test_an_attacked_service_comes_to_rest(service):
    plan = Plan(url=service.url, key=KEYS[0], other=KEYS[1], probes=["drop", "unread_streams", "fields"], hold=0.2)
    livez, attack = Livez(service.url, 0.02), Attack(plan)
    time.sleep(1.5)
    seen, asked = attack.stop(), livez.asked()
    assert (
        not seen.problems
        and sum(sum(each.values()) for each in seen.seen.values()) > 2
        and set(seen.seen) <= {"drop", "unread_streams", "fields"}
    )
    found = summary(asked)
    assert found["asked"] > 20 and found["failed"] == 0
    assert at_rest(service.url)
    held = soak.left_open(service, 20.0)
    assert (held["running"], held["waiting"], held["cache"]) == (0, 0, 0)


@pytest.mark.parametrize("name", [name for name, each in PROBES.items() if not each.is_keyless])
def test_no_hostile_client_gets_more_than_it_should(name, service):
    seen, problem = PROBES[name].once(client_of(service.url, KEYS[0]))
    assert not problem and seen
    assert service.process.poll() is None and httpx.get(service.url + "/livez").status_code == 200
