"""LoRA adapters: what of PEFT's folders is read and refused, and what they add to the rows of a step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from dev import families
from dev.family_table import FAMILIES as FAMILY_TABLE
from lpr import DecodeConfig, Engine, InputError, SamplingParams, native
from lpr.model.kv_cache import KVCache
from lpr.model.lora.bank import Bank, RowAdapters, Site, SlotAdapters
from lpr.model.lora.files import Config, read_lora
from lpr.model.lora.load import check_lora, load_lora
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row
from tests.fakes.adapters import ATTENTION, merged, write_adapter
from tests.fakes.fake_graphs import FakeCapturer
from tests.fakes.models import stock_greedy, tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [(3 * i) % 89 for i in range(40)]]
DECODE = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=6)
PARAMS = SamplingParams(max_new_tokens=24)
MLP = ["gate_proj", "up_proj", "down_proj"]
NEEDS_CPP = pytest.mark.skipif(native.add_low_rank is None, reason="no extension")
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "qwen2": ({"tie_word_embeddings": True}, [*ATTENTION, *MLP]),
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}, ["c_attn", "c_fc", "c_proj"]),
    "gemma2": ({"sliding_window": 9, "head_dim": 16, "final_logit_softcapping": None}, [*ATTENTION, *MLP]),
    "phi3": ({}, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "qwen3_moe": ({"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, ATTENTION),
}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(seed=7, spread=0.12)


def check_mixed(engine: Engine, model: PreTrainedModel, folders: dict[str, Path]) -> int:
    """Compare a batch of all adapters and of none with merged models; the number of steps."""
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    twins = {None: model, **{name: merged(model, folder) for name, folder in folders.items()}}
    asked = [(name, prompt) for prompt in PROMPTS for name in twins]
    done = engine.generate([prompt for _, prompt in asked], PARAMS, adapter=[name for name, _ in asked])
    expected = [stock_greedy(twins[name], prompt, 24) for name, prompt in asked]
    assert [each.token_ids for each in done] == expected
    assert len({str(expected[index :: len(twins)]) for index in range(len(twins))}) == len(twins)
    return sum(each.stats.num_steps for each in done)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow(first=2)
def test_families(name: str, tmp_path: Path) -> None:
    sizes, modules = FAMILIES[name]
    model = tiny_model(name, seed=7, spread=0.12, **sizes)
    folders = {str(seed): write_adapter(tmp_path / str(seed), model, modules, seed, 0.4) for seed in range(2)}
    model.save_pretrained(tmp_path / "base")
    check_mixed(Engine.from_pretrained(str(tmp_path / "base"), DECODE), model, folders)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_hybrid_models_have_adapters_as_peft(tmp_path: Path) -> None:
    """A batch of two adapters and none, with drafts accepted, on gated delta nets and attention."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    model = families.tiny_model(next(each for each in FAMILY_TABLE if each.name == "qwen3_next"))
    modules = [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]
    folders = {name: write_adapter(tmp_path / name, model, modules, seed) for seed, name in enumerate("ab")}
    wanted = {None: stock_greedy(model, PROMPTS[1], 24)}
    for name, folder in folders.items():
        twin = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
        ids = torch.tensor([PROMPTS[1]])
        mask = torch.ones_like(ids)
        done = twin.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
        wanted[name] = done[0, ids.shape[1] :].tolist()
    engine = Engine.from_model(model, decode=DECODE)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    for _ in range(2):  # again with drafts of the first texts, and by the prefix
        done = engine.generate([PROMPTS[1]] * 3, PARAMS, adapter=[None, "a", "b"])
        assert [each.token_ids for each in done] == [wanted[None], wanted["a"], wanted["b"]]
    assert len({str(each) for each in wanted.values()}) == 3
    assert sum(each.stats.num_steps for each in done) < 3 * 24


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_without_the_extension_and_in_half_precision_torch_multiplies(
    model: PreTrainedModel, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "add_low_rank", None)
    folders = {str(seed): write_adapter(tmp_path / str(seed), model, [*ATTENTION, *MLP], seed) for seed in range(3)}
    if dtype is torch.float32:
        check_mixed(Engine.from_model(model, decode=DECODE), model, folders)
        return
    engine = Engine.from_model(model.to(dtype), decode=DECODE)  # its check compares logits
    engine.load_adapter("a", folders["0"])
    assert engine.generate(PROMPTS, PARAMS, adapter="a")[1].token_ids


@pytest.mark.parametrize("drop", ["", "aten::where"])
@pytest.mark.slow(first=1)
def test_captured_steps_have_adapters(model: PreTrainedModel, tmp_path: Path, drop: str) -> None:
    engine = Engine.from_model(model, decode=DECODE)
    capturer, runner = FakeCapturer(), engine.model
    runner.capturer, runner.adapter.packed, runner.adapter.kv_bucket = capturer, False, 256  # as on a GPU
    runner.bank.is_native = False
    engine.configure(DECODE)
    before = runner.num_captures
    folders = {str(seed): write_adapter(tmp_path / str(seed), model, ["q_proj", "v_proj"], seed) for seed in range(2)}
    check_mixed(engine, model, folders)
    first, replays = runner.num_captures, capturer.num_replays
    assert first > before and replays > 10 and runner.graph_reason is None
    # A third adapter moves the weights of the others, and a graph would go on with those of before.
    check_mixed(engine, model, {"2": write_adapter(tmp_path / "2", model, [*ATTENTION, "down_proj"], 2)})
    assert runner.num_captures > first and capturer.num_replays > replays
    assert all(shape.with_adapters for shape in list(runner.graphs._graphs)[-1:])  # type: ignore[union-attr]
    runner.forget_adapters()
    assert not any(shape.with_adapters for shape in runner.graphs._graphs)  # type: ignore[union-attr]


@NEEDS_CPP
@pytest.mark.parametrize("fault", [None, "height"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow(first=1)
def test_exact_mode_has_the_same_bits_for_each_batch_and_tree(
    model: PreTrainedModel, tmp_path: Path, dtype: torch.dtype, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with an adapter and of those without, whatever stands beside them."""
    model.save_pretrained(tmp_path / "base")
    engine = Engine.from_pretrained(str(tmp_path / "base"), DECODE, exact=True, dtype=str(dtype)[6:])
    for seed in range(2):
        engine.load_adapter(str(seed), write_adapter(tmp_path / str(seed), model, [*ATTENTION, *MLP], seed))
    if fault:
        own = Site.add

        def by_torch(self: Site, product: torch.Tensor, states: torch.Tensor, rows: Any) -> None:
            """Whose bits depend on the number of rows."""
            if len(rows.places) > 8:
                product += torch.finfo(product.dtype).eps * product.abs()
            own(self, product, states, rows)

        monkeypatch.setattr(Site, "add", by_torch)
    runner, text = engine.model, [(7 * i * i + 3 * i) % 97 for i in range(60)]
    adapter, bank = runner.adapter, runner.bank
    places = [None, *bank.places.values()]

    def logits(rows: list[Row], cache: KVCache, of_slots: list[int | None]) -> torch.Tensor:
        cache.adapters = SlotAdapters(bank, {slot: at for slot, at in enumerate(of_slots) if at is not None})
        return adapter.forward(adapter.step_inputs(rows, cache), cache)

    differ = 0
    for place in places:
        cache = KVCache(1, 96)
        single = torch.cat([logits([Row.chain(0, at, text[at : at + 1], 1)], cache, [place]) for at in range(60)])
        whole = logits([Row.chain(0, 0, text, 60)], KVCache(1, 96), [place])
        others = [each for each in places if each != place]
        rows = [Row.chain(slot, 0, text[: 60 - 7 * slot], 60 - 7 * slot) for slot in range(3)]
        batch = logits(rows, KVCache(3, 96), [place, *others])
        cache = KVCache(2, 96)
        logits([Row.chain(0, 0, text[:50], 0)], cache, [place, others[0]])
        tokens = [text[50], 96, text[51], 95, text[52]]
        tree = Row(0, 50, tokens, [-1, 0, 0, 2, 2], [50, 51, 51, 52, 52], 5)
        in_tree = logits([tree, Row.chain(1, 0, text[:9], 1)], cache, [place, others[0]])[[0, 2, 4]]
        differ += not torch.equal(single, whole)
        differ += not torch.equal(single, batch[:60])
        differ += not torch.equal(single[50:53], in_tree)
    assert (differ == 0) == (fault is None)


def refused(folder: Path, model: PreTrainedModel, **fields: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_lora(write_adapter(folder, model, ["q_proj"], **fields)).pairs(model)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("use_qalora", True),
        ("target_parameters", ["experts.down_proj"]),
        ("trainable_token_indices", [3]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1, 2]),
        ("megatron_config", {"a": 1}),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("peft_type", "IA3"),
        ("a_field_of_tomorrow", True),
        ("rank_pattern", {"v_proj": 0}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    model: PreTrainedModel, tmp_path: Path, field: str, value: object
) -> None:
    said = refused(tmp_path, model, **{field: value})
    assert f"{field}={json.dumps(value)} in its adapter_config.json is not supported" in said


def test_weights_and_config_must_agree(model: PreTrainedModel, tmp_path: Path) -> None:
    cases = {
        "it has weights for model.layers.0.self_attn.q_proj, which target_modules does not name": {
            "target_modules": ["v_proj"]
        },
        "it has no weights for model.layers.0.self_attn.k_proj, which target_modules names": {
            "target_modules": ["q_proj", "k_proj"]
        },
        "it has weights for model.layers.1.self_attn.q_proj, which target_modules does not": {"layers_to_transform": 0},
        "lora_A of model.layers.0.self_attn.q_proj has shape [4, 64], and config and model want [2, 64]": {
            "rank_pattern": {"layers.0.self_attn.q_proj": 2}
        },
    }
    for index, (words, fields) in enumerate(cases.items()):
        assert words in refused(tmp_path / str(index), model, **fields)
    folder = write_adapter(tmp_path / "a", model, ["q_proj"])
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    good, tensors = config.read_text(), load_file(weights)
    for text in ('{"peft_type": "LORA", "r": "4"}', "[]", "{", '{"r": 4}'):
        config.write_text(text)
        with pytest.raises(InputError, match="cannot be read"):
            read_lora(folder)
    config.write_text(good)
    key = "base_model.model.model.layers.0.self_attn.q_proj"
    for extra in (f"{key}.lora_magnitude_vector", f"{key}.lora_B.bias", f"{key}.lora_embedding_A", "lm_head.weight"):
        save_file({**tensors, extra: torch.ones(3)}, weights)
        with pytest.raises(InputError, match=f"its tensor {extra} is not supported"):
            read_lora(folder)
    save_file({name: each for name, each in tensors.items() if name != f"{key}.lora_B.weight"}, weights)
    with pytest.raises(InputError, match=r"lora_B of model\.layers\.0\.self_attn\.q_proj has no tensor"):
        read_lora(folder).pairs(model)
    weights.write_bytes(b"no tensors")
    with pytest.raises(InputError, match="cannot be read"):
        read_lora(folder)
    weights.unlink()
    with pytest.raises(InputError, match=r"cannot read the adapter .*adapter_model\.safetensors: No such file"):
        read_lora(folder)


def test_heads_experts_and_other_layers_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "head", model, ["lm_head"])
    with pytest.raises(InputError, match="it adapts lm_head, the output head"):
        read_lora(folder).pairs(model)
    everything = write_adapter(tmp_path / "all", model, [*ATTENTION, *MLP], target_modules="all-linear")
    assert len(read_lora(everything).pairs(model)) == 14  # the head is none of them
    folder = write_adapter(tmp_path / "norm", model, ["q_proj"], target_modules=["q_proj", "input_layernorm"])
    tensors = load_file(folder / "adapter_model.safetensors")
    for layer in range(2):
        for letter, shape in (("A", (4, 64)), ("B", (64, 4))):
            tensors[f"base_model.model.model.layers.{layer}.input_layernorm.lora_{letter}.weight"] = torch.ones(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(InputError, match="it adapts model.layers.0.input_layernorm, a LlamaRMSNorm"):
        read_lora(folder).pairs(model)


def test_targets_are_those_of_peft(model: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    from peft.tuners.tuners_utils import check_target_module_exists

    settings: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "layers.1.mlp.up_proj"]},
        {"target_modules": r"model\.layers\.\d+\.mlp\.(up|down)_proj"},
        {"target_modules": ATTENTION, "exclude_modules": ["k_proj", "layers.0.self_attn.q_proj"]},
        {"target_modules": ATTENTION, "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": MLP, "layers_to_transform": 1},
        {"target_modules": MLP, "layers_to_transform": [0], "layers_pattern": "layers"},
        {"target_modules": MLP, "layers_to_transform": [0], "layers_pattern": ["h", "layers"]},
        {"target_modules": MLP, "layers_to_transform": [0], "layers_pattern": "blocks"},
    ]
    patterns = {"rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\..*": 5}, "alpha_pattern": {"up_proj": 7}}
    for each in settings:
        theirs = peft.LoraConfig(**each, **patterns)
        ours = Config("LORA", r=8, lora_alpha=8, **each, **patterns)
        for name, module in model.named_modules():
            wanted = bool(check_target_module_exists(theirs, name))
            assert ours.targets(name, module, None) == wanted, (each, name)
    ranks = {"model.layers.0.self_attn.q_proj": 3, "model.layers.1.mlp.up_proj": 5, "model.layers.0.mlp.up_proj": 8}
    assert {name: ours.rank(name) for name in ranks} == ranks
    assert [round(ours.scaling(name), 6) for name in ranks] == [round(8 / 3, 6), 1.4, 0.875]


def test_a_layer_that_is_not_called_is_found_at_load(model: PreTrainedModel, tmp_path: Path) -> None:
    """In silence nothing would be added to its product."""
    attention = model.model.layers[0].self_attn
    own = type(attention).forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        called, layer = attention.o_proj, attention.o_proj
        attention._modules["o_proj"] = _by_weight(layer)
        try:
            return own(attention, hidden_states, *args, **kwargs)
        finally:
            attention._modules["o_proj"] = called

    attention.forward = forward
    runner = TreeModel(model)
    self_check(runner)
    files = read_lora(write_adapter(tmp_path / "a", model, ["o_proj"]))
    load_lora(runner, files)
    with pytest.raises(InputError, match=r"computes model\.layers\.0\.self_attn\.o_proj in a way that adapters do not"):
        check_lora(runner, files.digest)


def _by_weight(layer: Any) -> Any:
    class ByWeight(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(states, layer.weight)

    return ByWeight()


def test_the_check_compares_rows(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TreeModel(model)
    self_check(runner)
    files = read_lora(write_adapter(tmp_path / "a", model, ["q_proj"]))
    load_lora(runner, files)
    check_lora(runner, files.digest)
    own = Site.add
    monkeypatch.setattr(Site, "add", lambda self, product, *given: own(self, product.neg_().neg_() * 1.0, *given))
    with pytest.raises(InputError, match="logits differ by"):
        check_lora(runner, files.digest)


def test_half_precision_compares_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits there differ between a tree and a chain by more than an adapter changes: SmolLM2 took none in bfloat16."""
    model = tiny_model(seed=7, spread=0.5).to(torch.bfloat16)
    runner = TreeModel(model)
    own = Site.add
    for is_native in (runner.bank.is_native, False):
        runner.bank.is_native = is_native
        files = read_lora(write_adapter(tmp_path / "a", model, [*ATTENTION, *MLP], spread=0.02))
        load_lora(runner, files)
        check_lora(runner, files.digest)

        def twice(self: Site, *given: Any) -> None:
            own(self, *given)
            own(self, *given)

        def shifted(self: Site, product: torch.Tensor, states: torch.Tensor, rows: Any) -> None:
            own(self, product, states, RowAdapters(rows.bank, rows.places.roll(1)))

        for mutant in (twice, shifted, lambda self, *given: None):
            monkeypatch.setattr(Site, "add", mutant)
            with pytest.raises(InputError, match="does not compute model.layers"):
                check_lora(runner, files.digest)
            monkeypatch.setattr(Site, "add", own)
        runner.bank.remove(files.digest)


def test_places_are_used_again(model: PreTrainedModel, tmp_path: Path) -> None:
    bank = Bank(model)
    files = [read_lora(write_adapter(tmp_path / str(seed), model, ["q_proj"], seed)) for seed in range(3)]
    assert [bank.add(each) for each in files] == [0, 1, 2] and bank.num_bytes == 3 * 2 * 4 * (4 * 64 * 2)
    bank.remove(files[1].digest)
    assert bank.add(files[1]) == 1
    for each in files:
        bank.remove(each.digest)
    assert not bank.num_bytes
