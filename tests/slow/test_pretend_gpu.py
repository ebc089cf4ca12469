"""The long tests of tests/model/test_pretend_gpu.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lpr import Engine, Lookahead
from lpr.model import loader
from lpr.model.fused import decoder_layer
from lpr.model.fused.decoder_layer import DecoderLayer
from lpr.model.kernels import elementwise_kernel
from lpr.model.rewrite.merged_linear import PackedLinear
from tests.fakes.again import again
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import OnGpu, PretendGpu, gpu, guard, held, short_steps, to_gpu
from tests.model import test_pretend_gpu as fast
from tests.model.test_pretend_gpu import (
    DECODE,
    FAMILIES,
    GREEDY,
    MIXED,
    PLAIN,
    PROMPTS,
    SMALL,
    expected,
    fails,
    ids,
    model,
)

pytestmark = pytest.mark.usefixtures("short_steps")


@pytest.mark.parametrize(
    "family, sizes",
    [
        ("gemma2", {"sliding_window": 9, "head_dim": 16}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    ],
)
def test_families_in_half_precision(family: str, sizes: dict[str, Any], gpu: PretendGpu) -> None:
    model = tiny_model(family, spread=0.12, **sizes).bfloat16()
    engine = Engine.from_model(to_gpu(model), decode=DECODE)
    assert engine.model.attention == "triton"
    assert all(len(each) == 16 for each in ids(engine, GREEDY))
    assert engine.model.graph_reason is None and gpu.num_replays > 3


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3", "gpt_neox"])
def test_families_give_the_cpus_ids(family: str, gpu: PretendGpu) -> None:
    model = tiny_model(family, spread=0.12, **FAMILIES[family])
    expected = ids(Engine.from_model(copy.deepcopy(model), decode=PLAIN), MIXED)
    engine = Engine.from_model(to_gpu(model), decode=SMALL)
    captured = gpu.num_captures
    gpu.events.clear()
    assert ids(engine, MIXED) == expected
    assert engine.model.attention == "triton" and engine.model.graph_reason is None, "fell back"
    assert gpu.count("wait") == gpu.count("pageable") == 0 and gpu.num_captures == captured


@pytest.mark.parametrize("layers", ["known", "unknown", "broken kernels", "wrong rows"])
def test_a_checkpoint(
    layers: str, gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """As a program loads one: packed, its layers replaced.

    A model of unknown layers goes to the compiler, which refuses to work on this machine and is given up. So does one
    whose layers' kernels do not work, which keeps the kernel of attention, or write K and V to other rows
    than the step's.
    """
    knows_layers, wanted = layers == "known", expected["mixed"]
    if knows_layers:  # of one layer nothing is left for the next
        model = tiny_model(spread=0.12, num_hidden_layers=3)
        wanted = ids(Engine.from_model(copy.deepcopy(model), decode=PLAIN), MIXED)
    if layers == "unknown":
        monkeypatch.setattr(decoder_layer, "layer_of", lambda *_: None)
    if layers == "broken kernels":
        monkeypatch.setattr("lpr.model.kernels.elementwise_kernel.gate", fails)

    written: list[int] = []
    place = elementwise_kernel.place

    def noted(states: Any, cosines: Any, sines: Any, num_queries: int, rows: Any, *sides: Any) -> None:
        written.append(num_queries)
        place(states, cosines, sines, num_queries, rows + 1 if layers == "wrong rows" else rows, *sides)

    monkeypatch.setattr(elementwise_kernel, "place", noted)

    def read_there(where: torch.device, read: Any, dtype: Any) -> Any:
        model, info = read(dtype=dtype)
        return (to_gpu(model) if where.type == "cuda" else model), info

    monkeypatch.setattr(loader, "_read_to", read_there)
    torch._dynamo.reset()  # other tests compile as well
    copy.deepcopy(model).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: module)  # it is there
    engine = Engine.from_pretrained(str(tmp_path), SMALL, device="cuda", dtype="float32")
    captured = gpu.num_captures
    gpu.events.clear()
    assert ids(engine, MIXED) == wanted
    assert engine.model.attention == "triton" and engine.model.graph_reason is None
    assert gpu.count("wait") == gpu.count("pageable") == 0 and gpu.num_captures == captured
    assert any(isinstance(module, PackedLinear) for module in engine.model.model.modules())
    replaced = [isinstance(vars(each).get("forward"), DecoderLayer) for each in engine.model.model.model.layers]
    assert replaced == [knows_layers] * len(replaced)
    compiled = engine.model.compiled
    assert compiled is None if knows_layers else compiled is not None and bool(compiled.reason)
    assert caplog.text.count("steps are not compiled") == (not knows_layers)
    assert caplog.text.count("using transformers' own: no such instruction") == (layers == "broken kernels")
    assert caplog.text.count("the faster modules do not fit") == (layers in ("broken kernels", "wrong rows"))
    assert bool(written) == (layers in ("known", "wrong rows"))


@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_the_drop_in_waits_once_a_step_and_not_for_each_token(
    penalty: float, gpu: PretendGpu, model: PreTrainedModel
) -> None:
    there = to_gpu(copy.deepcopy(model))
    prompt = torch.tensor([PROMPTS[0], PROMPTS[0]])
    wanted = {"eos_token_id": 50, "pad_token_id": 0, "do_sample": False, "repetition_penalty": penalty}
    waits = []
    for count in (30, 10, 30):  # the first one makes the engine
        expected = model.generate(prompt, max_new_tokens=count, **wanted)
        gpu.events.clear()
        found = there.generate(OnGpu(prompt), max_new_tokens=count, custom_generate=Lookahead(DECODE), **wanted)
        assert held(found).tolist() == expected.tolist() and found.shape[1] == len(PROMPTS[0]) + count
        waits.append(gpu.count("wait") + gpu.count("read"))
    tokens, steps = 2 * (30 - 10), waits[2] - waits[1]
    assert steps <= tokens / 2, "a step waits once, however many tokens it adds, and two rows share it"
