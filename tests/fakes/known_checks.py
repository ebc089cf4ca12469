"""Checks at load that are made once for models of one kind: most of what an engine of a tiny model costs."""

from __future__ import annotations

import json

import pytest

from lpr.engine import prepare
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check

KNOWN: dict[tuple[object, ...], tuple[str, bool, bool, KVCache]] = {}


def kind_of(runner: TreeModel) -> tuple[object, ...]:
    """All that the result of a check depends on but the weights: class, config, rewritten modules and backend."""
    adapter, model = runner.adapter, runner.model
    modules = tuple((type(each), "forward" in vars(each)) for each in model.modules())
    config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    asked = adapter.attention, adapter.exact, adapter.may_fall_back, adapter.packed, adapter.reads_tables
    return type(model), type(model).forward, config, model.dtype, str(model.device), modules, asked


def known_check(runner: TreeModel) -> KVCache:
    """As self_check, with the result of an equal model's check if there was one.

    Exact mode, which is prepared by the check, is checked each time.
    """
    adapter, kind = runner.adapter, kind_of(runner)
    if adapter.exact:
        return self_check(runner)
    if kind not in KNOWN:
        cache = self_check(runner)
        KNOWN[kind] = adapter.attention, adapter.reads_tables, adapter.packed, cache
    attention, reads_tables, packed, cache = KNOWN[kind]
    if adapter.attention != attention:
        adapter.set_attention(attention)
    adapter.reads_tables, adapter.packed = reads_tables, packed
    # Of caches with states each engine has its own: a low-bit copy adds states to it.
    return cache.resized(1, cache.rows_per_slot) if cache.has_states else cache


@pytest.fixture
def check_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "self_check", known_check)
