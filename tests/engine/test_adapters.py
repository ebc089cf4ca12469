"""Adapters in an engine: the ids of PEFT's own `generate`, in mixed batches with drafts, on several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lpr.engine.request
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.engine.adapters import Adapters
from lpr.engine.options import named_folders
from lpr.model.lora.bank import SlotAdapters, _Native
from lpr.model.lora.files import Pair
from lpr.model.step_inputs import StepInputs
from tests.fakes.adapters import ATTENTION, KINDS, merged, write_adapter
from tests.fakes.models import stock_greedy, tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [(3 * i) % 89 for i in range(40)]]
DECODE = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=18)
PARAMS = SamplingParams(max_new_tokens=24)
NAMES = [f"kind{index}" for index in range(len(KINDS))]
Ids = list[list[int]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(seed=7, spread=0.12).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def of_peft(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Ids]]:
    """Adapters that PEFT has saved, and the ids of its `generate` for each prompt."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    folders, expected = {}, {"": [stock_greedy(tiny_model(seed=7, spread=0.12), prompt, 24) for prompt in PROMPTS]}
    for index, (name, settings) in enumerate(zip(NAMES, KINDS, strict=True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT asks it
            model = peft.get_peft_model(tiny_model(seed=7, spread=0.12), peft.LoraConfig(**settings))
        torch.manual_seed(100 + index)
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.data.normal_(0, 0.15)
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
        expected[name] = [stock_greedy(model, prompt, 24) for prompt in PROMPTS]
    return folders, expected


@pytest.fixture(scope="module")
def two(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Ids]]:
    """Two adapters of all projections, and the ids of models into which they are merged."""
    model = tiny_model(seed=7, spread=0.12)
    folders, expected = {}, {"": [stock_greedy(model, prompt, 24) for prompt in PROMPTS]}
    for seed, name in enumerate(("one", "other")):
        folder = write_adapter(tmp_path_factory.mktemp(name), model, [*ATTENTION, "up_proj", "down_proj"], seed)
        folders[name], twin = str(folder), merged(model, folder)
        expected[name] = [stock_greedy(twin, prompt, 24) for prompt in PROMPTS]
    return folders, expected


def mixed(engine: Engine, names: list[str]) -> dict[str, Ids]:
    """The ids of all prompts with each adapter, of one batch in which neighbours have others."""
    asked = [(name, prompt) for prompt in PROMPTS for name in names]
    done = engine.generate([prompt for _, prompt in asked], PARAMS, adapter=[name or None for name, _ in asked])
    found: dict[str, Ids] = {}
    for (name, _), each in zip(asked, done, strict=True):
        found.setdefault(name, []).append(each.token_ids)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.slow(first=1)
def test_a_mixed_batch_has_the_ids_of_peft(base: Path, of_peft: Any, num_ranks: int, is_ours: bool) -> None:
    folders, expected = of_peft
    models = [tiny_model(seed=7, spread=0.12) for _ in range(num_ranks)]

    def program(comm: ThreadComm) -> tuple[dict[str, Ids], int]:
        how: dict[str, Any] = {"decode": DECODE, "comm": comm, "lora_modules": folders}
        make: Any = Engine.from_pretrained if is_ours else Engine.from_model
        engine = make(str(base) if is_ours else models[comm.rank], **how)
        found = mixed(engine, ["", *NAMES])
        again = mixed(engine, ["", *NAMES])  # finds prefixes, and drafts from what came before
        assert again == found
        return found, len(engine.adapters)

    for found, num_adapters in run_ranks(ThreadWorld(num_ranks), program):
        assert num_adapters == 8 and found == expected
    assert len({str(ids) for ids in expected.values()}) == 9  # each adapter changes the text


def test_prefixes_and_drafts_are_an_adapters_own(base: Path, two: Any) -> None:
    folders, expected = two
    engine = Engine.from_pretrained(str(base), DECODE, lora_modules=folders)
    first = engine.submit(PROMPTS[1], PARAMS, adapter="one")
    while first.finish_reason is None:
        engine.step()
    cached = []
    for name in ("one", "other", None):
        request = engine.submit(PROMPTS[1], PARAMS, adapter=name)
        while request.finish_reason is None:
            engine.step()
        assert request.token_ids == expected[name or ""][1]
        cached.append(request.num_cached_tokens)
    assert cached[0] >= 32 and cached[1:] == [0, 0]
    drafts = engine.replica.drafts
    histories = [drafts.history(tenant).tolist() for tenant in drafts.tenants]
    assert len(histories) == 2 and len(drafts.history()) > 0
    assert not any(_has(history, expected["one"][1]) for history in [*histories[1:], drafts.history().tolist()])


def _has(history: list[int], ids: list[int]) -> bool:
    return any(history[at : at + len(ids)] == ids for at in range(len(history)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_adapters_come_and_go_while_requests_run(base: Path, two: Any, tmp_path: Path, num_ranks: int) -> None:
    folders, expected = two

    def program(comm: ThreadComm) -> None:
        engine = Engine.from_pretrained(str(base), DECODE, comm=comm)
        loading = engine.load_adapter("a", folders["one"])
        plain = engine.submit(PROMPTS[0], PARAMS)
        while not loading.done():
            engine.step()
        assert loading.result() is None and engine.adapters == {"a": folders["one"]}
        first = engine.submit(PROMPTS[0], PARAMS, adapter="a")
        for _ in range(2):
            engine.step()
        # The name gets another adapter while a request of the first one runs.
        loading = engine.load_adapter("a", folders["other"])
        while not loading.done():
            engine.step()
        assert first.finish_reason is None and len(engine.model.bank.places) == 2
        second = engine.submit(PROMPTS[0], PARAMS, adapter="a")
        engine.step()
        leaving = engine.unload_adapter("a")
        while not leaving.done():
            engine.step()
        with pytest.raises(InputError, match="no adapter is named 'a'; loaded: none"):
            engine.submit(PROMPTS[0], PARAMS, adapter="a")
        while any(each.finish_reason is None for each in (plain, first, second)):
            engine.step()
        assert [each.token_ids for each in (plain, first, second)] == [
            expected[name][0] for name in ("", "one", "other")
        ]
        done = engine.generate(PROMPTS[:1], PARAMS)  # a step without it drops the last weights
        assert done[0].token_ids == expected[""][0] and not engine.model.bank.places

    run_ranks(ThreadWorld(num_ranks), program)


def test_what_cannot_be_loaded_is_one_line_on_all_ranks(base: Path, two: Any, tmp_path: Path) -> None:
    model = tiny_model(seed=7, hidden_size=32)
    wrong = write_adapter(tmp_path / "wrong", model, ["q_proj"])

    def program(comm: ThreadComm) -> None:
        engine = Engine.from_pretrained(str(base), DECODE, comm=comm, lora_modules=two[0])
        if comm.rank == 0:
            with pytest.raises(InputError, match=r"cannot read the adapter .*absent.*No such file"):
                engine.load_adapter("absent", tmp_path / "absent")
        loading = engine.load_adapter("wrong", wrong)
        request = engine.submit(PROMPTS[0], PARAMS, adapter="one")
        while request.finish_reason is None or not loading.done():
            engine.step()
        with pytest.raises(InputError, match=r"rank 0: .*lora_A of .*q_proj has shape \[4, 32\].*want \[4, 64\]"):
            loading.result()
        assert sorted(engine.adapters) == ["one", "other"] and request.token_ids == two[1]["one"][0]
        with pytest.raises(InputError, match="no adapter is named 'wrong'; loaded: one, other"):
            engine.submit(PROMPTS[0], PARAMS, adapter="wrong")

    run_ranks(ThreadWorld(2), program)
    with pytest.raises(InputError, match="lora_A of"):
        Engine.from_pretrained(str(base), DECODE, lora_modules={"wrong": str(wrong)})
    with pytest.raises(InputError, match="lora_A of"):
        Engine.from_pretrained(str(base), DECODE).load_adapter("wrong", wrong)
    with pytest.raises(InputError, match="tenant"):
        Engine.from_pretrained(str(base), DECODE).submit(PROMPTS[0], tenant="\0one\0")


def test_a_copy_drafts_without_the_adapter(base: Path, two: Any) -> None:
    folders, expected = two
    decode = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=6)
    engine = Engine.from_pretrained(str(base), decode, lora_modules=folders, self_draft="int8")
    assert engine.model.self_drafter is not None
    assert mixed(engine, ["", "one", "other"]) == expected


def test_no_more_adapters_than_allowed(base: Path, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpr.engine.adapters.MOST", 1)
    engine = Engine.from_pretrained(str(base), DECODE)
    engine.load_adapter("a", two[0]["one"])
    engine.load_adapter("a", two[0]["other"])
    with pytest.raises(InputError, match="1 adapters are loaded, which is the most: unload one before 'b'"):
        engine.load_adapter("b", two[0]["one"])
    engine.unload_adapter("a")
    engine.load_adapter("b", two[0]["one"])


def test_a_product_that_is_no_plain_one_is_not_written_to() -> None:
    """C++ gets its address."""
    pair = Pair(torch.ones(16, 4).T[:4].T, torch.ones(8, 16))
    found = _Native.of({0: [(0, pair)]})
    for product in (torch.zeros(8, 2).T, torch.zeros(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match="a product of torch.float32 gave"):
            found.add(product, torch.ones(2, 4), torch.zeros(2, dtype=torch.int32))


def test_names_and_folders() -> None:
    given = ("a=/x", '{"name": "b", "path": "/y", "base_model_name": "m"}', "c=/z=1")
    assert named_folders(given) == {"a": "/x", "b": "/y", "c": "/z=1"}
    for wrong in ("a", "=x", "a=", '{"name": "b"}', "{", '{"name": 1, "path": "x"}'):
        with pytest.raises(InputError, match="give NAME=FOLDER"):
            named_folders([wrong])
    with pytest.raises(InputError, match="each name once"):
        named_folders(["a=b", "a=c"])


def test_two_engines_of_a_model_have_adapters_of_their_own(two: Any) -> None:
    folders, expected = two
    model = tiny_model(seed=7, spread=0.12)
    one = Engine.from_model(model, decode=DECODE, lora_modules={"a": folders["one"]})
    other = Engine.from_model(model, decode=DECODE, lora_modules={"a": folders["other"]})
    assert mixed(one, ["", "a"]) == {"": expected[""], "a": expected["one"]}
    assert mixed(other, ["", "a"]) == {"": expected[""], "a": expected["other"]}
    one.close()
    assert mixed(other, ["", "a"]) == {"": expected[""], "a": expected["other"]}
    assert [stock_greedy(model, prompt, 24) for prompt in PROMPTS] == expected[""]


# Seeded faults: each must be found by the comparison with what PEFT, or a merged model, emits.


def next_rows_adapter(patch: pytest.MonkeyPatch) -> None:
    own = SlotAdapters.of_step

    def mutant(self: SlotAdapters, inputs: StepInputs) -> Any:
        found = own(self, inputs)
        if found is not None and len(self.places) > 1:
            found.places.copy_(found.places.roll(1))
        return found

    patch.setattr(SlotAdapters, "of_step", mutant)


def prefix_of_another_adapter(patch: pytest.MonkeyPatch) -> None:
    own = lpr.engine.request.Request.__init__

    def mutant(self: Any, command: Any, *args: Any, **kwargs: Any) -> None:
        own(self, command, *args, **kwargs)
        self.tenant = command.tenant

    patch.setattr(lpr.engine.request.Request, "__init__", mutant)


def adapter_of_another_slot(patch: pytest.MonkeyPatch) -> None:
    own = Adapters.of_slots

    def mutant(self: Adapters, running: Any, rank: int) -> Any:
        found = own(self, running, rank)
        if found is None:
            return None
        slots = sorted(found.places)
        places = np.roll([found.places[slot] for slot in slots], 1).tolist()
        return SlotAdapters(found.bank, dict(zip(slots, places, strict=True)))

    patch.setattr(Adapters, "of_slots", mutant)


@pytest.mark.parametrize("fault", [None, next_rows_adapter, adapter_of_another_slot, prefix_of_another_adapter])
def test_the_comparison_finds_faults(
    base: Path, two: Any, fault: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, expected = two
    engine = Engine.from_pretrained(str(base), DECODE, lora_modules=folders)
    if fault is not None:
        fault(monkeypatch)
    found = [mixed(engine, ["", "one", "other"]) for _ in range(2)]
    assert (found == [expected] * 2) == (fault is None)


def shared_drafts(patch: pytest.MonkeyPatch) -> None:
    from lpr.engine.drafts import DraftIndexes

    patch.setattr(DraftIndexes, "_learned", lambda self, request, running: self.shared)


@pytest.mark.parametrize("fault", [None, shared_drafts])
def test_a_tenants_drafts_do_not_reach_its_other_adapters(
    base: Path, two: Any, fault: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of steps tells what was drafted from: with an output that was seen, few suffice."""
    folders, _ = two
    engine = Engine.from_pretrained(str(base), DecodeConfig(window_size=0, trie_nodes=24), lora_modules=folders)
    if fault is not None:
        fault(monkeypatch)

    def steps(adapter: str, tenant: str) -> int:
        request = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=60), adapter=adapter, tenant=tenant)
        while request.finish_reason is None:
            engine.step()
        return request.stats.num_steps

    first = steps("one", "t")
    assert steps("one", "t") < first / 2
    engine.configure(engine.decode)
    steps("other", "t")
    after_another_adapter = steps("one", "t")
    after_another_tenant = steps("one", "u")
    assert (after_another_adapter == after_another_tenant == first) == (fault is None)
