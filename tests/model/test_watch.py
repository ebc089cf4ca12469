"""Weights and models that change under an engine, against a fresh engine for the model as it is then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import lpr
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from tests.fakes.models import tiny_model

DECODE = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=4, kv_tokens=2000)
PROMPT = [(7 * i + 3 * i * i) % 97 for i in range(40)]


def engine_of(model: PreTrainedModel, **options: Any) -> Engine:
    return Engine.from_model(model, decode=DECODE, **options)


def output(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], SamplingParams(max_new_tokens=40))[0].token_ids


def noise(weight: torch.Tensor) -> torch.Tensor:
    return 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(9))


def step_of_an_optimizer(model: PreTrainedModel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise(weight))


def in_data(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data += noise(weight)


def new_data(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data = weight.data + noise(weight)


def assigned(model: PreTrainedModel) -> None:
    state = {name: weight + noise(weight) for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def loaded(model: PreTrainedModel) -> None:
    model.load_state_dict({name: weight + noise(weight) for name, weight in model.state_dict().items()})


def one_bias(model: PreTrainedModel) -> None:
    model.model.layers[1].input_layernorm.weight.data[5:40] = -3.0


def a_hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output)


CHANGES = (step_of_an_optimizer, in_place, in_data, new_data, assigned, loaded, one_bias, a_hook)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
@pytest.mark.slow(first=5)
def test_k_v_of_other_weights_is_not_used(change: Callable[[PreTrainedModel], None], tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    engine = engine_of(model)
    before = output(engine)
    change(model)
    expected = output(engine_of(copy.deepcopy(model)))
    assert output(engine) == expected != before
    cached = engine.scheduler.counts.hits
    assert output(engine) == expected and engine.scheduler.counts.hits > cached, "the new K/V is shared again"


def test_a_model_that_stays_the_same_keeps_its_k_v() -> None:
    engine = engine_of(tiny_model())
    output(engine)
    output(engine)
    assert engine.scheduler.counts.hits > 0 and not engine.replica.watch.has_changed()


def test_a_write_that_no_counter_shows_is_told() -> None:
    model = tiny_model()
    engine = engine_of(model)
    output(engine)
    model.model.embed_tokens.weight.data[PROMPT[3], 7] += 2.0  # one value of 6,208
    engine.weights_changed()
    assert output(engine) == output(engine_of(copy.deepcopy(model)))


def test_requests_that_run_end_with_an_error_and_others_go_on() -> None:
    model = tiny_model()
    engine = engine_of(model)
    stream = engine.stream(PROMPT, SamplingParams(max_new_tokens=40))
    next(stream)
    in_place(model)
    *_, last = stream
    assert last.finish_reason == "error" and last.failure is not None and "weights have changed" in last.failure.message
    assert output(engine) == output(engine_of(copy.deepcopy(model)))


def more_parts(model: PreTrainedModel) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.more = base, nn.Linear(64, 64)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.base(states) + self.more(states)

    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)


def another_forward(model: PreTrainedModel) -> None:
    mlp: Any = model.model.layers[0].mlp
    mlp.forward = lambda states: -type(mlp).forward(mlp, states)


def another_dtype(model: PreTrainedModel) -> None:
    model.double()


def larger(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(104)


@pytest.mark.parametrize("change", [more_parts, another_forward, another_dtype, larger], ids=lambda each: each.__name__)
def test_what_an_engine_cannot_follow_is_one_line_and_the_drop_in_makes_another(
    change: Callable[[PreTrainedModel], None],
) -> None:
    model = tiny_model()
    ids = torch.tensor([PROMPT])
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    how["attention_mask"] = torch.ones_like(ids)
    model.generate(ids, **how, custom_generate=lpr.lookahead)
    engine = engine_of(model)
    output(engine)
    change(model)
    for _ in range(2):
        with pytest.raises(InputError, match=r"model has changed since this engine was made, .*: make a new one"):
            output(engine)
    assert engine.is_idle
    expected = model.generate(ids, **how)
    assert torch.equal(model.generate(ids, **how, custom_generate=lpr.lookahead), expected)


def test_a_hook_on_layers_that_are_computed_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    engine = engine_of(model)
    monkeypatch.setattr(type(engine.replica.watch), "_are_joined", True)
    output(engine)
    a_hook(model)
    with pytest.raises(InputError, match="it has other hooks"):
        output(engine)


@pytest.mark.parametrize("change", [in_place, in_data, assigned, step_of_an_optimizer], ids=lambda each: each.__name__)
def test_the_drop_in_follows_by_itself(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model()
    ids = torch.tensor([PROMPT])
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    how["attention_mask"] = torch.ones_like(ids)
    for _ in range(2):
        expected = model.generate(ids, **how)
        assert torch.equal(model.generate(ids, **how, custom_generate=lpr.lookahead), expected)
        change(model)


def test_a_copy_of_weights_is_not_decoded_with() -> None:
    """Loaded by the engine itself, a model's products are laid out anew on a CPU; norms and embeddings are not."""
    engine = Engine.from_pretrained(lpr.bundled_model(), DECODE, device="cpu")
    params = SamplingParams(max_new_tokens=8)
    engine.generate(["def f"], params)
    model: Any = engine.model.model
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1.0)
    with pytest.raises(InputError, match="of which the engine holds a copy"):
        engine.generate(["def f"], params)
    with pytest.raises(InputError, match="of which the engine holds a copy"):
        engine.weights_changed()


@pytest.mark.parametrize("part", ["all", "one layer"])
def test_dropout_of_a_model_in_training_is_off_in_steps(part: str) -> None:
    model = tiny_model(attention_dropout=0.5)
    engine = engine_of(model)
    expected = output(engine)
    changed = model if part == "all" else model.model.layers[0]
    changed.train()
    assert output(engine_of(copy.deepcopy(model).eval())) == expected
    engine.configure(DECODE)  # without K/V of the first output
    assert output(engine) == expected
    assert changed.training and all(each.training for each in changed.modules())


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("attention", ["native", "sdpa"])
def test_a_program_may_set_another_attention(attention: str, name: str) -> None:
    model = tiny_model()
    expected = output(engine_of(model, attention=attention))
    engine = engine_of(model, attention=attention)
    model.set_attn_implementation(name)
    assert output(engine) == expected
    assert model.config._attn_implementation == name, "and keeps it outside of steps"


@pytest.mark.parametrize("first, second", [("native", "sdpa"), ("sdpa", "native")])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.slow(first=2)
def test_engines_of_one_model_have_each_its_own_attention(first: str, second: str, exact: bool) -> None:
    params = SamplingParams(max_new_tokens=20, logprobs=0)

    def bits(engine: Engine) -> list[Any]:
        done = engine.generate([PROMPT, PROMPT[::-1]], params)
        return [(each.token_ids, [found.logprob for found in each.logprobs or ()]) for each in done]

    model = tiny_model().bfloat16() if exact else tiny_model()
    alone = bits(engine_of(copy.deepcopy(model), attention=first, exact=exact))
    engines = engine_of(model, attention=first, exact=exact), engine_of(model, attention=second)
    other = bits(engines[1])
    assert bits(engines[0]) == alone
    engines[1].configure(DECODE)
    assert bits(engines[1]) == other
