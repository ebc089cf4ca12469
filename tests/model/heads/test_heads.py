"""Prediction heads as a draft source: equal ids, guesses that are right, and faults that must show."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from dev import gpu_texts
from dev.head_texts import KINDS, Text, keep_texts, kept_texts, read_texts, skeletons, write_texts
from dev.train_head import asked_of, batches_of, commonest, first_tensors, outputs, save, train
from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.config import InputError
from lpr.core.heads import HeadDraft, read_block
from lpr.engine.options import EngineOptions
from lpr.engine.pace import FIRST_STAY, TRIAL, Pace
from lpr.model.heads import guesses
from lpr.model.heads.forms import DEEPSEEK, MIMO, QWEN, Form
from lpr.model.heads.guesses import Chain, Guesser
from lpr.model.heads.head import DraftHead
from lpr.model.heads.read import OWN_FILE, make_head, read_head
from lpr.model.kv_cache import KVCache
from lpr.model.loader import Loaded, wrap
from lpr.model.step_inputs import Row
from lpr.model.transformers_versions import CACHE_ARGUMENTS, passed
from tests.fakes.fake_graphs import FakeCapturer
from tests.fakes.models import tiny_model
from tests.fakes.models_with_heads import checkpoint_with_head
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

PROMPTS = [[(7 * i + 3 * j * j + j) % 97 for j in range(6 + 20 * (i % 2))] for i in range(4)]
PARAMS = [SamplingParams(max_new_tokens=40, temperature=0.9 * (i % 2), seed=i) for i in range(len(PROMPTS))]
DECODE = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=2, prefill_chunk=8)


@torch.no_grad()
def text_of(model: Any, ids: torch.Tensor, num_prompt: int) -> Text:
    return Text(ids, num_prompt, model.get_decoder()(input_ids=ids[None]).last_hidden_state[0].half())


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A tiny model, with a head that has learned a little from its texts."""
    model = tiny_model(seed=3, spread=0.12)
    head = make_head(model, DEEPSEEK, first_tensors(model))
    ids = torch.randint(0, 97, (24, 4), generator=torch.Generator().manual_seed(1))
    how = {"do_sample": True, "temperature": 0.9, "pad_token_id": 0}
    torch.manual_seed(0)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=28, **how)
    steps = iter(range(31))
    texts = [text_of(model, text, 4) for text in written]
    batches = batches_of(texts, model.config.vocab_size, 8, 32, 0)
    train(model, head, batches, lambda: next(steps) / 30, 3e-3)
    return replace(wrap(model, None), head=head)


@pytest.fixture(scope="module")
def plain(loaded: Loaded) -> list[list[int]]:
    engine = Engine(loaded, DecodeConfig.autoregressive())
    return [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [each.token_ids for each in completions]


def accepted(completions: Sequence[Completion]) -> int:
    return sum(each.stats.sources["head"].accepted for each in completions if "head" in each.stats.sources)


def num_steps(completions: Sequence[Completion]) -> int:
    return sum(each.stats.num_steps for each in completions)


@pytest.mark.parametrize("attention", ["auto"])
def test_ids_are_those_of_plain_decoding_and_guesses_are_accepted(
    loaded: Loaded, plain: list[list[int]], attention: str
) -> None:
    engine = Engine(loaded, DECODE, EngineOptions(attention=attention))
    with_head = engine.generate(PROMPTS, PARAMS)
    assert ids(with_head) == plain
    engine.configure(replace(DECODE, draft_heads="off"))
    without = engine.generate(PROMPTS, PARAMS)
    assert ids(without) == plain and accepted(without) == 0
    assert accepted(with_head) > 30 and num_steps(with_head) < num_steps(without)


DECODES = [replace(DECODE, home_ranks=0), DECODE, DecodeConfig(window_size=3, trie_nodes=16)]


@pytest.mark.parametrize("decode", DECODES[:1])
def test_two_ranks(loaded: Loaded, plain: list[list[int]], decode: DecodeConfig) -> None:
    def program(comm: ThreadComm) -> list[Completion]:
        return Engine(loaded, decode, comm=comm).generate(PROMPTS, PARAMS)

    for completions in run_ranks(ThreadWorld(2), program):
        assert ids(completions) == plain and accepted(completions) > 20


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Chain, HeadDraft]]:
    """All chains and what was guessed after them."""
    found: list[tuple[Chain, HeadDraft]] = []
    guess = Guesser.guess

    def recorded(self: Guesser, chains: Sequence[Chain], *rest: Any) -> list[HeadDraft]:
        drafts = guess(self, chains, *rest)
        found.extend(zip(chains, drafts, strict=True))
        return drafts

    monkeypatch.setattr(Guesser, "guess", recorded)
    return found


def check_from_scratch(
    loaded: Loaded, text: list[int], guessed: Sequence[tuple[Chain, HeadDraft]], fewest: int = 8
) -> None:
    """What a greedy request's head guesses follows from its text alone, however steps have cut it."""
    assert loaded.head is not None
    assert len([chain for chain, _ in guessed if chain.params]) >= fewest
    for chain, draft in guessed:
        if chain.params is None:
            continue
        known = torch.tensor([text[: chain.row.num_cached + len(chain.tokens) + 1]])
        with torch.no_grad():
            hidden = loaded.model.get_decoder()(input_ids=known[:, :-1]).last_hidden_state
            how = {"position_ids": torch.arange(hidden.shape[1])[None], "use_cache": False}
            state = loaded.head(loaded.model.get_input_embeddings()(known[:, 1:]), hidden, **how)
            logits = loaded.model.lm_head(state[0, -1])
            limited = loaded.head.vocabulary if loaded.head.vocabulary is not None else torch.arange(len(logits))
            share = logits[limited].softmax(-1).topk(2)
        assert draft.tokens[1:3] == limited[share.indices].tolist()
        assert [each / 65535 for each in draft.steps[1:3]] == pytest.approx(share.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_guesses_follow_from_the_text_alone(
    loaded: Loaded, guessed: list[tuple[Chain, HeadDraft]], attention: str
) -> None:
    engine = Engine(loaded, DECODE, EngineOptions(attention=attention))
    guessed.clear()
    done = engine.generate(PROMPTS[1:2], PARAMS[:1])
    check_from_scratch(loaded, PROMPTS[1] + done[0].token_ids, guessed)
    guessed.clear()
    again = engine.generate(PROMPTS[1:2], PARAMS[:1])  # the prompt's pages are found
    assert ids(again) == ids(done)
    check_from_scratch(loaded, PROMPTS[1] + again[0].token_ids, guessed, fewest=2)


def rest_now_and_then(engine: Engine, params: SamplingParams) -> list[int]:
    """The ids of an engine whose head rests in two steps of three."""
    request, step = engine.submit(PROMPTS[1], params), 0
    while request.finish_reason is None:
        engine.model.rests = step % 3 > 0
        engine.step()
        step += 1
    return request.completion().token_ids


@pytest.mark.parametrize("late", [1, 5, 256])
@pytest.mark.slow(first=1)
def test_a_head_that_has_rested_has_missed_nothing(
    loaded: Loaded, guessed: list[tuple[Chain, HeadDraft]], monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    monkeypatch.setattr(guesses, "LATE", late)
    engine, params = Engine(loaded, DECODE), replace(PARAMS[0], max_new_tokens=80)
    guessed.clear()
    check_from_scratch(loaded, PROMPTS[1] + rest_now_and_then(engine, params), guessed)
    monkeypatch.setattr(Guesser, "rest", lambda *args: None)
    guessed.clear()
    done = rest_now_and_then(Engine(loaded, DECODE), params)
    with pytest.raises(AssertionError):
        check_from_scratch(loaded, PROMPTS[1] + done, guessed)


@pytest.mark.slow
def test_captured_steps_hand_out_their_hidden_states(
    loaded: Loaded, plain: list[list[int]], guessed: list[tuple[Chain, HeadDraft]]
) -> None:
    engine = Engine(loaded, replace(DECODE, prefill_chunk=64), EngineOptions(attention="sdpa"))
    engine.model.adapter.packed = False
    engine.model.capturer = capturer = FakeCapturer()
    engine.configure(engine.decode)
    assert ids(engine.generate(PROMPTS, PARAMS)) == plain and capturer.num_replays > 20
    guessed.clear()
    done = engine.generate(PROMPTS[1:2], PARAMS[:1])
    check_from_scratch(loaded, PROMPTS[1] + done[0].token_ids, guessed)


def wrong_position(patch: pytest.MonkeyPatch) -> None:
    step = DraftHead.step

    def mutant(self: DraftHead, embeddings: torch.Tensor, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        inputs.positions += torch.arange(inputs.positions.shape[1])
        return step(self, embeddings, hidden, inputs)

    patch.setattr(DraftHead, "step", mutant)


def rows_that_a_commit_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "add_fixed", lambda self, layer: None)


def hidden_state_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    forward = DraftHead.forward

    def mutant(self: DraftHead, embeddings: torch.Tensor, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shifted = hidden.roll(1, 1) if kwargs.keys() & CACHE_ARGUMENTS else hidden
        return forward(self, embeddings, shifted, **kwargs)

    patch.setattr(DraftHead, "forward", mutant)


@pytest.mark.parametrize("fault", [wrong_position, rows_that_a_commit_moves, hidden_state_of_the_next_token])
def test_a_head_that_goes_wrong_is_noticed(
    loaded: Loaded, guessed: list[tuple[Chain, HeadDraft]], monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    done = Engine(loaded, DECODE).generate(PROMPTS[1:2], PARAMS[:1])
    with pytest.raises(AssertionError):
        check_from_scratch(loaded, PROMPTS[1] + done[0].token_ids, guessed)


def test_a_head_that_writes_into_the_models_own_cache_is_noticed(
    loaded: Loaded, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = KVCache.update

    def mutant(self: KVCache, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        return update(self, keys, values, 1 if layer == 2 else layer, *args, **kwargs)

    monkeypatch.setattr(KVCache, "update", mutant)
    assert ids(Engine(loaded, DECODE).generate(PROMPTS, PARAMS)) != plain


def test_a_block_holds_for_its_path_alone() -> None:
    draft = HeadDraft()
    first = draft.add(0, 7, 40000)
    draft.add(first, 8, 3)
    block = draft.pack(5, 6, 4)
    assert read_block(block, 5, 6) == draft
    assert read_block(block, 4, 6) is None and read_block(block, 5, 7) is None
    block[4] = 9 << 16  # a parent that comes later
    assert read_block(block, 5, 6) is None


@pytest.mark.parametrize(
    ("model_type", "form"), [("deepseek_v3", DEEPSEEK), ("glm4_moe", DEEPSEEK), ("qwen3_next", QWEN), ("qwen2", MIMO)]
)
@pytest.mark.slow(first=2)
def test_checkpoints_of_families_that_have_heads(tmp_path: Path, model_type: str, form: Form) -> None:
    checkpoint_with_head(tmp_path, model_type, form)
    decode = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=2, max_length=96)
    engine = Engine.from_pretrained(str(tmp_path), decode=decode, dtype="float32")
    params = [replace(each, max_new_tokens=20) for each in PARAMS[:2]]
    done = engine.generate(PROMPTS[:2], params)
    assert all(each.stats.sources["head"].drafted for each in done)
    engine.configure(DecodeConfig.autoregressive(max_batch_size=2, max_length=96))
    assert ids(done) == ids(engine.generate(PROMPTS[:2], params))


def test_a_head_beside_a_checkpoint(loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded.head is not None
    loaded.model.save_pretrained(tmp_path)
    assert read_head(str(tmp_path), loaded.model) is None
    save(loaded.head, tmp_path / OWN_FILE, torch.float32)
    found = read_head(str(tmp_path), loaded.model)
    assert found is not None
    for name, weight in loaded.head.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    off = Engine.from_pretrained(str(tmp_path), decode=DecodeConfig(draft_heads="off"), dtype="float32")
    assert off.model.guesser is None and off.sizes.num_guesses == 0
    tensors = load_file(tmp_path / OWN_FILE)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / OWN_FILE)
    assert read_head(str(tmp_path), loaded.model) is None
    assert "mlp.up_proj.weight" in caplog.text


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.slow(first=1)
def test_guesses_of_a_draft_vocabulary(
    loaded: Loaded, plain: list[list[int]], guessed: list[tuple[Chain, HeadDraft]], tmp_path: Path, is_ours: bool
) -> None:
    assert loaded.head is not None
    loaded.model.save_pretrained(tmp_path)
    save(loaded.head, tmp_path / OWN_FILE, torch.float32, torch.arange(1, 97, 2))
    found = read_head(str(tmp_path), loaded.model)
    assert found is not None and found.lm_head is not None and found.lm_head.weight.shape[0] == 48
    limited = replace(loaded, head=found)
    if is_ours:  # all weights are packed
        engine = Engine.from_pretrained(str(tmp_path), decode=DECODE, dtype="float32")
    else:
        engine = Engine(limited, DECODE)
    guessed.clear()
    alone = engine.generate(PROMPTS[:1], PARAMS[:1])[0]
    check_from_scratch(limited, PROMPTS[0] + alone.token_ids, guessed)
    done = engine.generate(PROMPTS, PARAMS)
    assert ids(done) == plain and accepted(done) > 5
    assert {token % 2 for _, draft in guessed for token in draft.tokens[1:]} == {1}


@pytest.mark.parametrize("vocabulary", [[5, 97], [-1, 5], []])
def test_a_draft_vocabulary_of_another_model_is_left_out(
    loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture, vocabulary: list[int]
) -> None:
    assert loaded.head is not None
    loaded.model.save_pretrained(tmp_path)
    save(loaded.head, tmp_path / OWN_FILE, torch.float32, torch.tensor(vocabulary))
    assert read_head(str(tmp_path), loaded.model) is None
    assert "its draft vocabulary is not the model's" in caplog.text


def test_a_draft_vocabulary_is_left_out_where_ranks_split_the_output_head(
    loaded: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded.head is not None
    loaded.model.save_pretrained(tmp_path)
    save(loaded.head, tmp_path / OWN_FILE, torch.float32, torch.arange(1, 97, 2))
    monkeypatch.setattr("lpr.model.heads.read.VocabularyHead", type(loaded.model.get_output_embeddings()))
    assert read_head(str(tmp_path), loaded.model) is None
    assert "a draft vocabulary is not used with --tp" in caplog.text


def test_texts_to_learn_from_are_those_of_plain_decoding(loaded: Loaded, plain: list[list[int]]) -> None:
    decode = DecodeConfig.autoregressive(max_batch_size=2, prefill_chunk=8)
    engine = Engine(loaded, decode, EngineOptions(prefix_reuse=False))
    ends = [replace(each, max_new_tokens=40 - 7 * i) for i, each in enumerate(PARAMS)]  # a slot changes when one ends
    texts = write_texts(engine, zip(PROMPTS, ends, strict=True))
    for text, prompt, each, done in zip(texts, PROMPTS, ends, plain, strict=True):
        assert text.ids.tolist() == (prompt + done[: each.max_new_tokens])[:-1] and text.num_prompt == len(prompt)
        assert (text.temperature, text.seed) == (each.temperature, each.seed)
        states = text_of(loaded.model, text.ids, 0).states
        torch.testing.assert_close(text.states, states, atol=5e-3, rtol=0)


def test_texts_that_a_gpu_writes_are_those_of_plain_decoding(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths together, the last two in a piece of their own; the texts are read afterwards."""
    loaded.model.save_pretrained(tmp_path)
    model = gpu_texts.writing_model(str(tmp_path), torch.float32, "cpu")
    monkeypatch.setattr(gpu_texts, "ENTRIES", 2 * (len(PROMPTS[1]) + 20))
    assert [len(piece) for piece in gpu_texts.pieces_of(PROMPTS, 20)] == [2, 2]
    engine = Engine(loaded, DecodeConfig.autoregressive())
    expected = [each.token_ids for each in engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, ignore_eos=True))]
    end = expected[0][7]  # cuts one text at least
    wanted = [ids[: ids.index(end) + 1] if end in ids else ids for ids in expected]
    assert sum(map(len, wanted)) < 80
    texts = gpu_texts.write_texts(model, PROMPTS, 20, end)
    assert sorted(text.temperature for text in texts) == sorted(4 * list(KINDS))
    greedy = {tuple(text.ids.tolist()): text for text in texts if text.temperature == 0}
    assert set(greedy) == {tuple((prompt + ids)[:-1]) for prompt, ids in zip(PROMPTS, wanted, strict=True)}
    keep_texts(texts, tmp_path / "texts.safetensors")
    read_texts(loaded.model, kept := kept_texts(tmp_path / "texts.safetensors"))
    for text in kept:
        torch.testing.assert_close(text.states, text_of(loaded.model, text.ids, 0).states, atol=5e-3, rtol=0)


def test_a_group_ends_when_most_of_its_texts_have_ended() -> None:
    ends, looked = gpu_texts.MostEnded(2, 9), gpu_texts.LOOK_EVERY
    texts = torch.ones(10, 2 + looked, dtype=torch.long)
    texts[:8, 5] = texts[8, 1] = 9  # the ninth has it in its prompt
    assert not ends(texts, texts).any()
    texts[8, 7] = 9
    assert ends(texts, texts).all() and not ends(texts[:, :-1], texts).any()


def test_a_head_is_trained_on_what_it_sees_when_it_guesses(loaded: Loaded) -> None:
    head, ids = copy.deepcopy(loaded.head), torch.tensor([PROMPTS[1][:10]])
    assert head is not None
    hidden, embeddings = text_of(loaded.model, ids[0], 0).states.float()[None], loaded.model.get_input_embeddings()(ids)
    trained = list(outputs(head, embeddings, hidden, 3))
    assert [each.shape[1] for each in trained] == [9, 8, 7]
    for last in range(7):  # the text's last entry; two of its own output follow
        state, cache = hidden[:, : last + 1], DynamicCache()
        for ahead, place in enumerate((slice(0, last + 1), slice(last + 1, last + 2), slice(last + 2, last + 3))):
            tokens, positions = embeddings[:, place.start + 1 : place.stop + 1], torch.arange(10)[None, place]
            with torch.no_grad():
                state = head(tokens, state, position_ids=positions, use_cache=True, **passed(cache, head.block))[:, -1:]
            torch.testing.assert_close(state[0, 0], trained[ahead][0, last].detach())


def test_each_prompt_has_every_temperature_in_its_turn() -> None:
    asked = list(asked_of(PROMPTS, 9))
    for turn in range(4):
        assert sorted(prompt for prompt, _ in asked[4 * turn : 4 * turn + 4]) == sorted(PROMPTS)
    for prompt in PROMPTS:
        assert sorted(each.temperature for known, each in asked if known == prompt) == [0.0, 0.8, 0.8, 1.0]
    assert len({each.seed for _, each in asked}) == 16


def test_skeletons_of_classes_have_docstrings_for_bodies(tmp_path: Path) -> None:
    method = '    def {}(self, key, n=1):\n        """' + "Say what comes. " * 12 + '"""\n        return {}\n'
    source = (
        'class A(dict):\n    """Known."""\n    x = 1\n' + method.format("f", "SECRET") + method.format("g", "SECRET")
    )
    (tmp_path / "a.py").write_text(source + "class B:\n" + method.format("f", "x"))
    (tmp_path / "b.py").write_text("class (:")
    (text,) = skeletons(tmp_path)
    assert text.startswith('class A(dict):\n    """Known."""\n') and "def g(self, key, n=1):" in text
    assert "SECRET" not in text and "x = 1" not in text


def test_tokens_by_chance_stand_for_all_the_rest(loaded: Loaded) -> None:
    text = text_of(loaded.model, torch.tensor(PROMPTS[0]), 4)
    batch = next(batches_of([text], 97, 2, 8, 0, most_compared=8))
    assert batch.tokens.unique().numel() == len(batch.tokens) < 97
    assert batch.rest.exp().sum().item() == pytest.approx(97)


def test_a_draft_vocabulary_has_what_the_model_writes() -> None:
    text = Text(torch.tensor([9, 9, 9, 9, 5, 5, 8]), 4, torch.zeros(7, 1))
    assert commonest([text, text], 97, 4).tolist() == [0, 1, 5, 8], "not the prompt's; of the rest low ids"


def test_automatic_sizes_use_a_head_if_asked_and_do_not_count_its_time(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = DecodeConfig(max_batch_size=1, max_length=96)
    engine = Engine(loaded, decode)
    assert engine.sizes.num_guesses == 0
    engine.configure(replace(decode, draft_heads="on"))
    replica, guesser = engine.replica, engine.model.guesser
    assert engine.sizes.num_guesses == 48 and replica.pace is not None and guesser is not None
    guess, of_sizer, of_pace = guesser.guess, list[float](), list[float]()
    engine.model.adapter.clock = time.perf_counter  # a sleep takes none of the processor's

    def slow(*args: Any) -> list[HeadDraft]:
        time.sleep(0.2)
        return guess(*args)

    monkeypatch.setattr(guesser, "guess", slow)
    monkeypatch.setattr(replica.sizer, "observe", lambda batch, outcomes, ms: of_sizer.append(ms))
    monkeypatch.setattr(replica.pace, "observe", lambda outcomes, ms: of_pace.append(ms))
    engine.generate(PROMPTS[:1], [replace(PARAMS[0], max_new_tokens=8)])
    assert of_pace and all(whole - ms >= 200 for whole, ms in zip(of_pace, of_sizer, strict=True))


def test_a_wrong_choice_is_named() -> None:
    with pytest.raises(InputError, match="draft_heads='yes' must be auto or on or off"):
        DecodeConfig(draft_heads="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no prediction head that works"):
        Engine.from_model(tiny_model(), decode=DecodeConfig(draft_heads="on"))


def test_guesses_are_followed_as_far_as_they_are_worth_a_forward(
    loaded: Loaded, guessed: list[tuple[Chain, HeadDraft]]
) -> None:
    pace, outcome = Pace(), SimpleNamespace(concluded=SimpleNamespace(tree=SimpleNamespace(sources=[0]), path=[0]))
    assert pace.least(3.0) == 0.0, "nothing is known yet"
    outcome.concluded.emitted = [5, 6]
    pace.observe([outcome], 12.0)  # type: ignore[list-item]
    assert pace.least(3.0) == pytest.approx(1.0), "a token takes 6 ms, and half of the right guesses lead on"
    lengths = []
    for least in (0.0, 100.0):
        engine = Engine(loaded, DECODE)
        assert engine.model.guesser is not None
        engine.model.guesser.least = least
        guessed.clear()
        engine.generate(PROMPTS[:1], PARAMS[:1])
        further = [sum(parent > 0 for parent in draft.parents) for chain, draft in guessed if chain.params]
        lengths.append(sum(further) / len(further))
        assert (engine.model.guesser.forward_ms > 0) == (least < 100)
    assert lengths[0] > lengths[1] == 0


@pytest.mark.parametrize(("nodes", "most", "followed"), [(16, 48, 6), (64, 64, 8), (256, 128, 16)])
def test_a_larger_tree_has_more_guesses(
    loaded: Loaded, guessed: list[tuple[Chain, HeadDraft]], nodes: int, most: int, followed: int
) -> None:
    engine = Engine(loaded, replace(DECODE, trie_nodes=nodes))
    guesser = engine.model.guesser
    assert guesser is not None and engine.sizes.num_guesses == guesser.num_guesses == most
    assert guesses.num_entries(most) == followed * 4
    guessed.clear()
    engine.generate(PROMPTS[:2], PARAMS[:2])
    sizes = [len(draft.tokens) - 1 for _, draft in guessed]
    assert most // 3 < max(sizes) <= most
    engine.configure(replace(DECODE, trie_nodes="auto", window_size="auto", draft_heads="on"))
    assert engine.sizes.num_guesses == guesser.num_guesses == 48


def test_the_likeliest_guesses_are_kept_with_those_that_they_follow() -> None:
    growing = guesses._Growing(Chain(Row.chain(0, 0, [1], 0), [0], [2], None))
    for parent, token, path in ((0, 10, 0.5), (0, 11, 0.1), (1, 12, 0.5), (2, 13, 0.05), (3, 14, 0.2), (3, 15, 0.3)):
        growing.draft.add(parent, token, token)
        growing.paths.append(path)
    kept = growing.best(4)
    assert (
        kept.tokens == [-1, 10, 12, 14, 15] and kept.parents == [-1, 0, 1, 2, 2] and kept.steps == [0, 10, 12, 14, 15]
    )
    assert growing.best(6) is growing.draft


def test_a_head_rests_where_steps_without_it_are_faster() -> None:
    """Credited tokens would tell otherwise: the text may have proposed them too."""

    def steps_until(rests: bool, with_guesses: tuple[int, float], without: tuple[int, float]) -> int:
        for step in range(1, 10_000):
            tokens, ms = without if pace.rests else with_guesses
            pace.observe([SimpleNamespace(concluded=SimpleNamespace(emitted=[5] * tokens))], ms)  # type: ignore[list-item]
            if pace.rests is rests:
                return step
        raise AssertionError

    pace, slower, faster, plain = Pace(), (4, 90.0), (4, 50.0), (3, 60.0)
    assert steps_until(True, slower, plain) == TRIAL
    for stay in (FIRST_STAY, 2 * FIRST_STAY, 4 * FIRST_STAY):
        assert steps_until(False, slower, plain) == stay + TRIAL * (stay == FIRST_STAY), "tried again, ever more rarely"
        assert steps_until(True, slower, plain) == TRIAL
    steps_until(False, faster, plain)
    assert steps_until(True, faster, plain) > TRIAL, "guesses pay now, and go on"
    assert steps_until(False, faster, plain) == TRIAL
