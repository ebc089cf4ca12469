"""tests/fleet/test_sharing.py in a service: flags, the ranks' environment, metrics, headers."""

import re

from lpr.engine.trie_file import fingerprint_of
from lpr.fleet import store
from tests.fakes.redis_server import redis_server
from tests.fakes.serving import serving
from tests.fakes.stores import HAS_SERVER, until
from tests.fleet.test_sharing import loaded, plain, raw

pytestmark = HAS_SERVER


def test_a_service_learns_from_the_store_and_outlives_it(loaded, plain):
    ids, wanted, steps = plain[0]
    body = {"prompt": ids, "max_tokens": 40, "temperature": 0, "return_token_ids": True, "return_sources": True}
    with redis_server() as server:
        flags = ("--draft-store", server.url, "--window-size", "0", "--trie-nodes", "16", "--num-candidates", "0")
        with serving(None, *flags, "--replica-name", "one") as service:

            def metric(name, event):
                text = service.client.get("/metrics").text
                found = re.search(rf'^lpr:{name}_total{{[^}}]*event="{event}"[^}}]*}} (\S+)$', text, re.M)
                return float(found[1]) if found else 0.0

            def ask():
                answer = service.client.post("/v1/completions", json=body)
                assert answer.headers["x-lpr-replica"] == "one"
                found = answer.json()
                assert found["choices"][0]["token_ids"] == wanted
                return found["lpr"]["num_steps"]

            until(lambda: service.client.get("/metrics").text.count("shared_draft_store_up"), "the driver says so")
            key = store.stream_of(fingerprint_of(loaded[1], loaded[0].config.vocab_size), "bundled", "")
            client = server.client()
            client.xadd(key, {b"d": raw([*ids[-8:], *wanted])})
            until(lambda: metric("shared_drafts", "learnt") == 1, "it is learnt")
            assert ask() < steps
            until(lambda: client.xlen(key) == 2 and metric("shared_drafts", "sent") == 1, "its own output is sent")
            server.kill()
            ask()
            assert service.stop() == 0, service.log()
