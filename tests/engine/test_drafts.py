"""Tenants: what one writes neither drafts for another nor is found in its cache, and the same for all ranks."""

from pathlib import Path

import pytest

from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.engine.drafts import MOST_TENANTS, SHARE, DraftIndexes
from lpr.sched.block_tables import PagePool
from lpr.serve.front import Front
from lpr.serve.options import ServeArgs
from tests.fakes.fake_driver import served
from tests.fakes.worlds import ThreadWorld, run_ranks

PROMPT = [5, 9, 17, 33, 12]
DECODE = DecodeConfig(window_size=0, trie_nodes=16, num_candidates=0, max_batch_size=2)
GREEDY = SamplingParams(max_new_tokens=40)


def told(model, num_ranks, *order):
    """Per request of `order`, (tenant, learns): ids, steps, nodes drafted from other outputs, prompt tokens cached."""

    def program(comm):
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        found = []
        for tenant, learns in order:
            request = engine.submit(PROMPT, GREEDY, tenant=tenant, learns=learns)
            while request.finish_reason is None:
                engine.step()
            stats = request.completion().stats
            shared = stats.sources.get("shared_trie")
            drafted = shared.drafted if shared is not None else 0
            found.append((request.token_ids, stats.num_steps, drafted, request.num_cached_tokens))
        return found

    ranks = run_ranks(ThreadWorld(num_ranks), program)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def check_apart(model, num_ranks):
    first, other, again, alone, everybody = told(
        model, num_ranks, ("a", True), ("b", True), ("a", True), ("a", False), ("", True)
    )
    assert len({tuple(each[0]) for each in (first, other, again, alone, everybody)}) == 1, "the text is the same"
    assert first[2:] == (0, 0)
    assert other[1:] == first[1:], "another tenant is neither faster nor finds anything cached"
    assert everybody[1:] == first[1:], "nor does a request without a tenant"
    assert again[1] < first[1] and again[2] > 0 and again[3] > 0, "its own outputs are learnt from"
    assert alone[1:3] == first[1:3] and alone[3] > 0, "one that does not learn has only its cache"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow(first=1)
def test_what_one_tenant_writes_does_not_speed_another_up(llama, num_ranks):
    check_apart(llama, num_ranks)


def check_first_step(model):
    """A prompt that comes again is drafted from its very first step: the output is known behind the prompt's end."""
    engine = Engine.from_model(model, decode=DECODE)
    steps = [engine.generate([PROMPT], GREEDY)[0].stats for _ in range(2)]
    # 16 nodes and a bonus token a step, as a chain: nothing is left to find out.
    assert steps[1].num_steps == -(-steps[1].num_tokens // 17), "the first step had no draft"


def test_an_output_is_learnt_behind_its_prompt(llama, monkeypatch):
    check_first_step(llama)
    monkeypatch.setattr("lpr.engine.drafts.as_learnt", lambda prompt_ids, token_ids: token_ids)
    with pytest.raises(AssertionError, match="had no draft"):
        check_first_step(llama)


def everybodys_drafts(monkeypatch):
    monkeypatch.setattr(DraftIndexes, "of", lambda self, tenant, in_use=(): self.shared)


def everybodys_cache(monkeypatch):
    root = PagePool.root
    monkeypatch.setattr(PagePool, "root", lambda self, tenant: root(self, ""))


@pytest.mark.parametrize("fault", [everybodys_drafts, everybodys_cache])
def test_a_tenant_that_is_not_looked_at_is_found(llama, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="another tenant"):
        check_apart(llama, 1)


def test_the_least_recently_used_tenant_is_forgotten_and_its_share_is_bounded():
    indexes = DraftIndexes(16 * SHARE)
    for number in range(MOST_TENANTS):
        indexes.of(f"tenant {number}").extend([number])
    assert indexes.of("tenant 0").history().tolist() == [0]
    indexes.of("one more")
    assert indexes.of("tenant 0").history().tolist() == [0], "it was used lately"
    assert indexes.of("tenant 1").history().tolist() == [], "it was not"
    assert len(indexes.tenants) == MOST_TENANTS
    first = indexes.of("idle")
    assert indexes.of("idle") is first, "an empty index is kept, as a request may hold it"
    oldest, next_one = list(indexes.tenants)[:2]
    indexes.of("another", in_use={oldest})
    assert oldest in indexes.tenants and next_one not in indexes.tenants, "a tenant whose request runs is not forgotten"
    index = indexes.of("busy")
    index.extend(range(1000))
    assert len(index.history()) <= 16


@pytest.mark.parametrize("share, apart", [("none", True), ("key", True), ("all", False)])
def test_a_key_is_a_tenant_unless_all_share(share, apart):
    with served(api_key="one,two", share_drafts=share) as service:
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            service.client.post("/v1/completions", json={"prompt": "a"}, headers=headers).raise_for_status()
        one, two, again = (sent.tenant for sent in service.driver.submitted)
        assert one == again and (one != two) == apart == bool(one)
        assert "one" not in one.split("-"), "a key's name does not tell the key"


def test_a_kept_trie_is_everybodys_and_several_keys_must_agree():
    with pytest.raises(InputError, match="--share-drafts all"):
        Front(ServeArgs(port=0, api_key="a,b", trie=Path("trie")), [])
