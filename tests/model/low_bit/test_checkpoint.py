"""Checkpoints in the formats of others: ids are those of the model of their dequantised weights, token by token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lpr import DecodeConfig, Engine, EngineOptions, InputError, SamplingParams
from lpr.cli.generate import main as generate
from lpr.model.loader import load, model_digest
from lpr.model.low_bit.formats import read_format
from lpr.model.low_bit.layers import CodedExperts, PackedCodedLinear, coded_modules
from tests.fakes.low_bit_checkpoints import CASES, Case, compressed, finish, packed, write
from tests.fakes.models import stock_greedy
from tests.fakes.pretend_gpu import gpu, guard

__all__ = ["gpu", "guard"]

PROMPTS = [[(7 * i + i * i) % 89 + 2 for i in range(19)], [(5 * i + 3 * i * i) % 83 + 4 for i in range(33)]]
DECODES = [DecodeConfig.autoregressive(max_batch_size=1), DecodeConfig(max_batch_size=2, trie_nodes=16)]
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip
MXFP4 = Case({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, None)


def check_ids(engine: Engine, reference: Any, count: int = 16) -> None:
    """Plain and drafted ids are those that `generate` finds with the dequantised weights."""
    expected = [stock_greedy(reference, prompt, count) for prompt in PROMPTS]
    for decode in DECODES:
        engine.configure(replace(decode, max_length=256, kv_tokens=1024))
        found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=count))
        assert [each.token_ids for each in found] == expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(first=6)
def test_ids_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path, CASES[name])
    engine = Engine.from_pretrained(str(tmp_path))
    layers = dict(coded_modules(engine.model.model))
    assert len(layers) == 14
    check_ids(engine, reference)


@pytest.mark.parametrize(
    ("family", "case"),
    [("mixtral", CASES["fp8-small-blocks"]), ("gpt_oss", MXFP4)]
    + [("qwen3_moe", CASES[name]) for name in ("fp8-tensor", "ct-fp8-channel", "ct-w4a16", "gptq-asymmetric", "awq")],
    ids=lambda each: each if isinstance(each, str) else each.config["quant_method"],
)
@pytest.mark.slow(first=2)
def test_ids_of_experts_are_those_of_the_dequantised_model(family: str, case: Case, tmp_path: Path) -> None:
    reference = write(tmp_path, case, family, **EXPERTS[family])
    engine = Engine.from_pretrained(str(tmp_path))
    experts = [each for _, each in coded_modules(engine.model.model) if isinstance(each.forward, CodedExperts)]
    assert len(experts) == 2
    check_ids(engine, reference)


def test_a_layer_that_the_config_names_stays_as_it_is(tmp_path: Path) -> None:
    """Of tensors and config the tensors decide: a weight without a scale is not low-bit."""
    reference = write(tmp_path, CASES["ct-w4a16"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    whole = {key: each for key, each in tensors.items() if not key.startswith(name)}
    whole[f"{name}.weight"] = reference.get_submodule(name).weight.detach()
    finish(tmp_path, whole, {**CASES["ct-w4a16"].config, "ignore": ["lm_head", "re:.*layers.1.mlp.down_proj"]})
    engine = Engine.from_pretrained(str(tmp_path))
    assert not isinstance(engine.model.model.get_submodule(name), PackedCodedLinear)
    check_ids(engine, reference)


def test_groups_of_a_config_have_forms_of_their_own(tmp_path: Path) -> None:
    """Four bits in attention and eight in MLPs, as mixed checkpoints have them."""
    eight, four = packed(8, -1), packed(4, 32)
    config = compressed("pack-quantized", group_size=32)
    args = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
    config["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": args}

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Any:
        return (eight if 96 in weight.shape else four)(weight, generator)

    reference = write(tmp_path, Case(config, pack))
    engine = Engine.from_pretrained(str(tmp_path))
    kinds = {name: each.pack.packed.coding.kind for name, each in coded_modules(engine.model.model)}
    assert {kinds["model.layers.0.mlp.up_proj"], kinds["model.layers.0.self_attn.q_proj"]} == {"int8", "int4"}
    check_ids(engine, reference)


def test_a_bias_is_added(tmp_path: Path) -> None:
    reference = write(tmp_path, CASES["gptq-by-activation"], "qwen2")
    assert reference.model.layers[0].self_attn.q_proj.bias is not None
    check_ids(Engine.from_pretrained(str(tmp_path)), reference)


def test_four_bits_are_read_as_four(tmp_path: Path) -> None:
    """Laid out, a weight of 4 bits in groups of 32 takes 5 bits of memory, its scales included."""
    write(tmp_path, CASES["ct-w4a16"])
    engine = Engine.from_pretrained(str(tmp_path))
    packs = {id(each.pack): each.pack for _, each in coded_modules(engine.model.model)}.values()
    weights = sum(sum(each.sizes) * each.packed.num_inputs for each in packs)
    assert sum(each.num_bytes for each in packs) * 8 == 5 * weights


def test_digests_see_codes_and_scales(tmp_path: Path) -> None:
    write(tmp_path, CASES["ct-w4a16"])
    tensors, found = load_file(tmp_path / "model.safetensors"), set()
    for name in (None, "weight_packed", "weight_scale"):
        changed = {key: each.clone() for key, each in tensors.items()}
        if name is not None:
            changed[f"model.layers.1.mlp.up_proj.{name}"][3, 1] += 1
        finish(tmp_path, changed, CASES["ct-w4a16"].config)
        found.add(model_digest(load(str(tmp_path)).model))
    assert len(found) == 3


def test_a_user_program_may_call_a_loaded_model(tmp_path: Path) -> None:
    """Before an engine lays its weights out, a model computes by torch's operators alone."""
    reference, model = write(tmp_path, CASES["awq"]), load(str(tmp_path)).model
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, reference(ids).logits, atol=1e-4)


def test_half_precision_computes_with_the_same_codes(tmp_path: Path) -> None:
    reference = write(tmp_path, CASES["ct-w4a16-asymmetric"])
    engine = Engine.from_pretrained(str(tmp_path), dtype="bfloat16")
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    expected = [stock_greedy(reference, prompt, 8) for prompt in PROMPTS]
    assert [each.token_ids[:2] for each in done] == [each[:2] for each in expected]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes', whose package"),
    "bitsandbytes without a name": ({"load_in_8bit": True}, "'bitsandbytes', whose package"),
    "another method": ({"quant_method": "quark"}, "quantised by 'quark'; lpr knows"),
    "no method": ({"bits": 4}, "quantised by None"),
    "nvfp4": (compressed("nvfp4-pack-quantized", type="float"), "format 'nvfp4-pack-quantized' is not supported"),
    "marlin": (compressed("marlin-24"), "format 'marlin-24'"),
    "two bits": (compressed("pack-quantized", num_bits=2), "type 'int' with 2 bits"),
    "sparse": ({**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "turned": ({**compressed("pack-quantized"), "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "AWQ's gemv": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv'"),
    "three bits": ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits 3 is not supported"),
    "GPTQ in Marlin's order": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'",
    ),
    "sizes by layer": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, "differ from layer to layer",
    ),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    "a damaged config": ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "bitsandbytes" in name:
        try:
            import bitsandbytes  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("bitsandbytes is installed")
    config, line = REFUSED[name]
    write(tmp_path, CASES["ct-w4a16"])
    finish(tmp_path, load_file(tmp_path / "model.safetensors"), config)
    assert generate(["--model", str(tmp_path), "--prompt", "x"]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and line in printed[0]


def spoil_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] = float("nan")


def spoil_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[0, 0] = 0x7F


def drop_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def cut_scale(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name][:1]


def tie_head(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors["model.embed_tokens.weight_scale_inv"] = tensors[f"{name}_scale_inv"]


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (spoil_scale, "scales that are not finite"),
        (spoil_weight, "weights that are NaN"),
        (drop_scale, "weights in 8 bits without a scale"),
        (tie_head, "no low-bit weights of model.embed_tokens"),
        (cut_scale, r"scales of shape \[1, 4\], not \[3, 4\]"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(spoil: Any, line: str, tmp_path: Path) -> None:
    write(tmp_path, CASES["fp8-small-blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    finish(tmp_path, tensors, CASES["fp8-small-blocks"].config)
    with pytest.raises(InputError, match=line):
        Engine.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["fp8-tensor", "gptq", "ct-w4a16", "awq"])
def test_scales_that_no_config_tells_of_are_refused(name: str, tmp_path: Path) -> None:
    """transformers would read such weights without their scales, or make new ones."""
    write(tmp_path, CASES[name])
    finish(tmp_path, load_file(tmp_path / "model.safetensors"), None)
    with pytest.raises(InputError, match="lack|are not read, the first"):
        Engine.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_model_has_not_may_only_be_zero(value: float, tmp_path: Path) -> None:
    """AutoGPTQ writes zeros for layers without a bias."""
    reference = write(tmp_path, CASES["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    finish(tmp_path, {**tensors, "model.layers.1.mlp.up_proj.bias": torch.full((96,), value)}, CASES["gptq"].config)
    if not value:
        return check_ids(Engine.from_pretrained(str(tmp_path)), reference, 8)
    with pytest.raises(InputError, match="no place for model.layers.1.mlp.up_proj.bias"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["gptq-asymmetric", "fp8-small-blocks"])
def test_exact_mode_has_the_same_ids(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path, CASES[name])
    check_ids(Engine.from_pretrained(str(tmp_path), options=EngineOptions(exact=True)), reference)


@pytest.mark.parametrize(
    ("form", "args"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel", "group_size": None}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": False}),
        ("naive-quantized", {"num_bits": 8, "strategy": "channel", "group_size": None}),
        ("float-quantized", {"num_bits": 8, "strategy": "channel", "group_size": None, "type": "float"}),
        ("float-quantized", {"num_bits": 8, "strategy": "tensor", "group_size": None, "type": "float"}),
    ],
)
def test_weights_are_those_that_compressed_tensors_finds(form: str, args: dict[str, Any]) -> None:
    package = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    assert package is not None
    config = compressed(form, **args)
    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"], format=form)
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    size = args.get("group_size")
    parts = weight.unflatten(1, (-1, size)) if size else weight[:, None]
    low, high = (parts.amin(2), parts.amax(2)) if args["strategy"] != "tensor" else (weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    kind = BaseCompressor.get_value_from_registry(form)
    stored = kind.compress(dict(state), scheme)
    expected = kind.decompress(dict(stored), scheme)["weight"]
    form_of = read_format(_Config(config))
    assert form_of is not None
    found = form_of.read("layer", stored, weight.shape)
    assert found is not None
    assert torch.equal(found.coding.to_dense(found.rows, torch.float32), expected.float())


class _Config:
    def __init__(self, values: dict[str, Any]) -> None:
        self.quantization_config = json.loads(json.dumps(values))

    def get_text_config(self, decoder: bool) -> _Config:
        return self
