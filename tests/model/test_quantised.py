"""Quantised weights that transformers loads: the engine's output equals its own plain decoding, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.model.loader import model_digest
from tests.fakes.models import stock_greedy, tiny_model

PROMPTS = [[(7 * i + i * i) % 89 + 2 for i in range(19)], [(5 * i + 3 * i * i) % 83 + 4 for i in range(33)]]
PARAMS = SamplingParams(max_new_tokens=40)
DRAFTED = [DecodeConfig(max_batch_size=batch, trie_nodes=16) for batch in (1, 2)]


def torchao_config(name: str) -> Any:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install 'lpr[quant]'")
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


def quantised(folder: Path, config: Any) -> PreTrainedModel:
    tiny_model(intermediate_size=128).save_pretrained(folder / "full")
    return AutoModelForCausalLM.from_pretrained(folder / "full", quantization_config=config, dtype=torch.float32)


def check_equals_plain_decoding(engine: Engine) -> list[list[int]]:
    engine.configure(DecodeConfig.autoregressive(max_batch_size=1))
    plain = [done.token_ids for done in engine.generate(PROMPTS, PARAMS)]
    for decode in DRAFTED:
        engine.configure(decode)
        drafted = engine.generate(PROMPTS, PARAMS)
        assert [done.token_ids for done in drafted] == plain
        assert all(done.stats.tokens_per_step > 1 for done in drafted)
    return plain


def test_int8_weights_of_a_checkpoint(tmp_path: Path) -> None:
    model = quantised(tmp_path, torchao_config("Int8WeightOnlyConfig"))
    model.save_pretrained(tmp_path / "int8")
    expected = [stock_greedy(model, prompt, 40) for prompt in PROMPTS]
    engine = Engine.from_pretrained(str(tmp_path / "int8"))
    assert "Int8" in type(engine.model.model.model.layers[0].mlp.up_proj.weight).__name__
    assert check_equals_plain_decoding(engine) == expected


def test_activations_quantised_on_the_fly_are_refused(tmp_path: Path) -> None:
    """Their int8 rounding makes a whole step of a last bit, which the number of nodes in a forward changes."""
    model = quantised(tmp_path, torchao_config("Int8DynamicActivationInt8WeightConfig"))
    with pytest.raises(InputError, match="probably its activations are quantised on the fly"):
        Engine.from_model(model)


def test_the_model_digest_sees_into_quantised_tensors(tmp_path: Path) -> None:
    model = quantised(tmp_path, torchao_config("Int8WeightOnlyConfig"))
    before = model_digest(model)
    assert model_digest(model) == before
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.qdata[3, 5] += 1
    changed = model_digest(model)
    weight.qdata[3, 5] -= 1
    weight.scale[2] *= 2
    assert len({before, changed, model_digest(model)}) == 3


def test_bitsandbytes_4_bit_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = quantised(tmp_path, config)
    expected = [stock_greedy(model, prompt, 40) for prompt in PROMPTS]
    engine = Engine.from_model(model)
    assert check_equals_plain_decoding(engine) == expected
