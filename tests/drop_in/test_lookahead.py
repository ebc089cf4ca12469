"""`model.generate(..., custom_generate=lpr.lookahead)` against `model.generate(...)`: the same ids for all options."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    set_seed,
)

import lpr
import lpr.drop_in.rows
from lpr import DecodeConfig, Engine, InputError, Lookahead, SamplingParams
from lpr.drop_in.lookahead import EngineCache
from lpr.drop_in.rows import OutputRow
from lpr.model.transformers_versions import cache_argument
from tests.fakes.models import tiny_model

SMALL = Lookahead(DecodeConfig(window_size=5, ngram_size=4, guess_set_size=4, trie_nodes=24))
PLAIN = Lookahead(DecodeConfig.autoregressive())
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gemma2": {"head_dim": 16, "sliding_window": 9},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param, seed=3, spread=0.1, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def llama3() -> PreTrainedModel:
    return tiny_model(seed=3, spread=0.1)


@pytest.fixture(scope="module")
def bundled() -> tuple[PreTrainedModel, Any]:
    model = AutoModelForCausalLM.from_pretrained(lpr.bundled_model(), dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(lpr.bundled_model())


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """Rows of these lengths, padded on the left with token 0."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 97, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


CACHE = cache_argument(LlamaForCausalLM.forward) or ""
ONE, THREE = padded(12), padded(12, 3, 30)


def both(model: PreTrainedModel, **kwargs: Any) -> tuple[Any, Any]:
    """What plain generate and the drop-in return."""
    kwargs = {"do_sample": False, "max_new_tokens": 25, "pad_token_id": 0, **kwargs}
    return model.generate(**copy.copy(kwargs)), model.generate(**kwargs, custom_generate=SMALL)


def tilt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[torch.arange(len(scores)), input_ids.sum(1) * 7 % 90] += 2.0
    return scores


def tilt_rows(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Something else for each row of a batch of three."""
    return scores + torch.eye(97)[torch.arange(3) * 5 + input_ids[:, -1] % 5] * 3


def even_tokens(row: int, input_ids: torch.Tensor) -> list[int]:
    return list(range(row + len(input_ids) % 3, 97, 2))


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one row": ONE,
    "eos list": {"eos_token_id": [11, 23, 40, 41, 42, 43, 44, 60, 61, 62, 63, 64], "pad_token_id": 7},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "min_new_tokens": {"eos_token_id": list(range(40, 70)), "min_new_tokens": 9},
    "min_length": {"eos_token_id": list(range(40, 70)), "min_length": 45, "max_length": 60, "max_new_tokens": None},
    "bad words, suppressed, forced": {
        "bad_words_ids": [[7], [8, 9], [50, 51]], "suppress_tokens": [3, 4], "forced_eos_token_id": 5,
        "begin_suppress_tokens": list(range(30, 60)), "eos_token_id": 5,
    },
    "sequence_bias": {"sequence_bias": [[[10], -2.0], [[20, 21], 3.0]]},
    "decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 9},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": even_tokens},
    "user processors": {"logits_processor": LogitsProcessorList([tilt, tilt_rows])},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)},
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "encoder penalties": {"encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2},
    "guidance": {**ONE, "guidance_scale": 1.5},
    "use_cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}  # fmt: skip


CASES = [("llama", option) for option in OPTIONS]
CASES += [("gpt2", option) for option in ("one row", "static cache")]
CASES += [("gemma2", option) for option in ("user processors", "use_cache")]


@pytest.mark.parametrize("model, option", CASES, indirect=["model"])
@pytest.mark.slow(first=8)
def test_greedy_ids_equal(model: PreTrainedModel, option: str) -> None:
    stock, mine = both(model, **{**THREE, **OPTIONS[option]})
    assert mine.dtype == stock.dtype and mine.tolist() == stock.tolist()


def without_padding(patch: pytest.MonkeyPatch) -> None:
    make = OutputRow.__init__
    patch.setattr(OutputRow, "__init__", lambda self, index, num_pads, batch: make(self, index, 0, batch))


def one_row_for_all(patch: pytest.MonkeyPatch) -> None:
    each = lpr.drop_in.rows.for_row
    patch.setattr(lpr.drop_in.rows, "for_row", lambda function, index, *rest: each(function, 0, *rest))


def chosen_by_raw_logits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutputRow, "_process", lambda self, input_ids, scores: scores)


@pytest.mark.parametrize(
    ("fault", "option"),
    [
        (without_padding, "min_length"),
        (one_row_for_all, "prefix_allowed_tokens_fn"),
        (one_row_for_all, "user processors"),
        (chosen_by_raw_logits, "penalties"),
    ],
)
def test_equality_notices(
    llama3: PreTrainedModel, fault: Callable[[pytest.MonkeyPatch], None], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    stock, mine = both(llama3, **{**THREE, **OPTIONS[option]})
    assert mine.tolist() != stock.tolist()


def user_stop(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    return input_ids.sum(1) % 17 == 0


def stop_after_one_row(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """OutputRow i of three stops at a length of its own."""
    return torch.tensor([input_ids.shape[1] >= 35 + 4 * row for row in range(3)])


@pytest.mark.parametrize("eos", [None, [11, 23]])
@pytest.mark.parametrize("stop", [user_stop, stop_after_one_row])
def test_stopping_criteria(llama3: PreTrainedModel, stop: Callable[..., Any], eos: list[int] | None) -> None:
    """Without an end-of-text token a finished row runs on until the others are finished too."""
    how = {"stopping_criteria": StoppingCriteriaList([stop]), "eos_token_id": eos, "max_new_tokens": 40}
    stock, mine = both(llama3, **THREE, **how)
    assert mine.tolist() == stock.tolist()
    assert mine.shape[1] < 70


def test_stop_strings(bundled: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = bundled
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    texts = ["def add(a, b):\n", "class Stack:\n    def __init__(self):\n"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    for strings in (["return"], ["\n\n", "self.items"]):
        arguments = {"stop_strings": strings, "tokenizer": tokenizer, "pad_token_id": tokenizer.pad_token_id}
        stock, mine = both(model, **inputs, **arguments)
        assert mine.tolist() == stock.tolist()
    with pytest.raises(ValueError, match="must pass the model's tokenizer"):
        model.generate(**inputs, stop_strings=["x"], max_new_tokens=4, custom_generate=lpr.lookahead)


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


@pytest.mark.parametrize("rows", [ONE, THREE], ids=["one row", "three rows"])
@pytest.mark.parametrize("eos", [None, list(range(40, 50))])
def test_streamers_get_the_same(llama3: PreTrainedModel, rows: dict[str, torch.Tensor], eos: list[int] | None) -> None:
    streams = []
    for options in ({}, {"custom_generate": SMALL}):
        streams.append(Recorder())
        llama3.generate(
            **rows,
            streamer=streams[-1],
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            **options,
        )
    assert streams[0].values == streams[1].values


def test_text_streamers(bundled: tuple[PreTrainedModel, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = bundled
    inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
    ids = model.generate(
        **inputs, max_new_tokens=20, streamer=TextStreamer(tokenizer, skip_prompt=True), custom_generate=lpr.lookahead
    )
    text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out == text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {**inputs, "streamer": streamer, "max_new_tokens": 20, "custom_generate": lpr.lookahead}
    thread = threading.Thread(target=model.generate, kwargs=arguments)
    thread.start()
    assert "".join(streamer) == text
    thread.join(timeout=60)


def test_dict_with_scores_and_logits(llama3: PreTrainedModel) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    stock, mine = both(llama3, **THREE, **wanted, repetition_penalty=1.2, eos_token_id=list(range(40, 50)))
    assert mine.sequences.tolist() == stock.sequences.tolist()
    assert len(mine.scores) == len(stock.scores) == len(mine.logits)
    new = stock.sequences[:, 30:]
    for place in range(len(stock.scores)):
        running = ~torch.isin(new[:, :place], torch.arange(40, 50)).any(1)
        for kind in ("scores", "logits"):
            expected, got = getattr(stock, kind)[place], getattr(mine, kind)[place]
            assert torch.allclose(got[running], expected[running], atol=1e-4) and got.shape == expected.shape
            assert not got[~running].any()


def test_sampled_scores_are_those_of_transformers(llama3: PreTrainedModel) -> None:
    """The first token's, which do not depend on what is drawn; and asking for them changes no id."""
    options = {
        **ONE, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 20,
        "pad_token_id": 0,
    }  # fmt: skip
    stock = llama3.generate(**options, return_dict_in_generate=True, output_scores=True)
    set_seed(4)
    with_scores = llama3.generate(**options, return_dict_in_generate=True, output_scores=True, custom_generate=SMALL)
    assert torch.allclose(with_scores.scores[0], stock.scores[0], atol=1e-4)
    set_seed(4)
    assert llama3.generate(**options, custom_generate=SMALL).tolist() == with_scores.sequences.tolist()


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "limits": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "typical": {"typical_p": 0.8, "temperature": 1.2},
    "others": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "top_h": 0.6},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "temperature": 0.9, "top_k": 40},
    "return sequences": {"num_return_sequences": 2},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
}


@pytest.mark.parametrize("option", ["limits", "penalties", "return sequences", "synthid"])
@pytest.mark.slow(first=3)
def test_sampled_ids_equal_plain_decoding_with_the_seed(llama3: PreTrainedModel, option: str) -> None:
    options = {**THREE, "do_sample": True, "max_new_tokens": 30, "pad_token_id": 0, **SAMPLED[option]}
    texts = []
    for how in (PLAIN, SMALL, SMALL):
        set_seed(17)
        texts.append(llama3.generate(**options, custom_generate=how).tolist())
    again = llama3.generate(**options, custom_generate=SMALL).tolist()
    assert texts[0] == texts[1] == texts[2] != again
    assert len({tuple(row[30:]) for row in texts[0]}) == len(texts[0]), "a seed of its own for each row"


def test_seeds_and_engine(llama3: PreTrainedModel) -> None:
    """The seed of a row is a draw of torch's generator, and the text that of an engine with that seed."""
    set_seed(5)
    seeds = torch.randint(2**63 - 1, (3,)).tolist()
    set_seed(5)
    ids = llama3.generate(
        **THREE, do_sample=True, temperature=0.8, top_k=30, max_new_tokens=25, pad_token_id=0, custom_generate=SMALL
    )
    engine = Engine.from_model(copy.deepcopy(llama3), decode=DecodeConfig.autoregressive())
    for row, seed, mask in zip(ids.tolist(), seeds, THREE["attention_mask"].tolist(), strict=True):
        params = SamplingParams(max_new_tokens=25, temperature=0.8, top_k=30, seed=seed)
        assert engine.generate([row[30 - sum(mask) : 30]], params)[0].token_ids == row[30:]


def test_a_processor_with_a_state(llama3: PreTrainedModel) -> None:
    class Alternating:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            scores[:, self.calls % 2 :: 2] -= 1.5
            return scores

    made = [Alternating(), Alternating()]
    texts = [
        llama3.generate(
            **ONE,
            do_sample=False,
            max_new_tokens=40,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([each]),
            **how,
        ).tolist()
        for each, how in zip(made, ({}, {"custom_generate": SMALL}), strict=True)
    ]
    assert texts[0] == texts[1]
    assert made[0].calls == made[1].calls == 40


@pytest.mark.filterwarnings("ignore")  # that slow kernels are used
def test_a_model_without_attention() -> None:
    mamba = tiny_model("mamba", seed=3, spread=0.1, state_size=8)
    for _ in range(2):
        stock, mine = both(mamba, **ONE)
        assert mine.tolist() == stock.tolist()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, r"beam search \(num_beams\)"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, r"assisted generation \(prompt_lookup_num_tokens\)"),
    "contrastive": ({"penalty_alpha": 0.5, "top_k": 4}, r"contrastive search \(penalty_alpha\)"),
    "dola": ({"dola_layers": "low"}, r"dola generation \(dola_layers\)"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "past": ({CACHE: DynamicCache()}, CACHE),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale one row at a time"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "no rows": ({"input_ids": torch.empty(0, 3, dtype=torch.int64), "attention_mask": None}, "input_ids has no rows"),
    "right padding": ({"attention_mask": THREE["attention_mask"].flip(1)}, "pad on the left"),
    "empty row": ({"attention_mask": THREE["attention_mask"] * torch.tensor([[1], [0], [1]])}, "row 1 is empty"),
    "positions": ({"position_ids": torch.arange(30).repeat(3, 1) + 1}, "position_ids"),
    "inputs_embeds": ({"inputs_embeds": torch.zeros(3, 30, 64)}, "inputs_embeds"),
    "too long": ({"max_new_tokens": 600, "max_length": None}, "reached the model's 512 positions unfinished"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", REFUSED)
def test_what_a_tree_cannot_honour_is_refused_by_name(llama3: PreTrainedModel, option: str) -> None:
    arguments, message = REFUSED[option]
    arguments = {**THREE, "do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, **arguments}
    with pytest.raises(InputError, match=message) as caught:
        llama3.generate(**arguments, custom_generate=SMALL)
    assert "\n" not in str(caught.value)
    stock, mine = both(llama3, **ONE, max_new_tokens=5)
    assert mine.tolist() == stock.tolist(), "the next call works"


def test_an_assistant_is_refused(llama3: PreTrainedModel) -> None:
    with pytest.raises(InputError, match=r"assisted generation \(assistant_model\)"):
        llama3.generate(**ONE, max_new_tokens=4, assistant_model=tiny_model(), custom_generate=SMALL)


PREPARED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "input_ids": lambda made: {"input_ids": made["input_ids"] * 7 % 97},
    "attention_mask": lambda made: {"attention_mask": torch.ones(1, 16).long()},
    "inputs_embeds": lambda made: {"inputs_embeds": torch.zeros(1, 16, 64), "input_ids": None},
    "position_ids": lambda made: {"position_ids": made["position_ids"] + 3},
    CACHE: lambda made: {CACHE: DynamicCache()},
}


@pytest.mark.parametrize("changed", PREPARED)
def test_inputs_that_the_program_makes_itself_are_refused(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=3, spread=0.1)
    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def same(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**prepare(*args, **kwargs), "cache_position": torch.arange(12)}

    @functools.wraps(prepare)
    def other(*args: Any, **kwargs: Any) -> dict[str, Any]:
        made = prepare(*args, **kwargs)
        return {**made, **PREPARED[changed](made)}

    plain = model.generate(**ONE, max_new_tokens=9, do_sample=False, pad_token_id=0)
    monkeypatch.setattr(model, "prepare_inputs_for_generation", same)
    for more in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        found = model.generate(**ONE, max_new_tokens=9, do_sample=False, pad_token_id=0, custom_generate=SMALL, **more)
        assert found.tolist() == plain.tolist()
    monkeypatch.setattr(model, "prepare_inputs_for_generation", other)
    with pytest.raises(InputError, match=changed):
        model.generate(**ONE, max_new_tokens=9, do_sample=False, pad_token_id=0, custom_generate=SMALL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused(kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny_model(seed=3, spread=0.1), config)
    with pytest.raises(InputError, match="prepare_inputs_for_generation"):
        model.generate(**ONE, max_new_tokens=9, do_sample=False, pad_token_id=0, custom_generate=SMALL)


def test_errors_of_users_code_and_nan(llama3: PreTrainedModel) -> None:
    def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 20:
            raise KeyError("mine")
        return scores

    with pytest.raises(KeyError, match="mine"):
        llama3.generate(
            **ONE, max_new_tokens=30, logits_processor=LogitsProcessorList([failing]), custom_generate=SMALL
        )
    broken = copy.deepcopy(llama3)
    broken.generate(**ONE, max_new_tokens=2, custom_generate=SMALL)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="row 0: the model's logits for output token 1 are not numbers"):
        broken.generate(**ONE, max_new_tokens=30, custom_generate=SMALL)


def test_what_comes_behind_the_end_never_happened(llama3: PreTrainedModel) -> None:
    """A processor that cannot stand the end-of-text token is not asked what follows it, in effect."""
    free = llama3.generate(**ONE, max_new_tokens=40, do_sample=False, pad_token_id=0)[0, 12:].tolist()
    asked = []
    for eos in sorted(set(free[5:])):

        def strict(input_ids: torch.Tensor, scores: torch.Tensor, eos: int = eos) -> torch.Tensor:
            if eos in input_ids[0, 12:].tolist():
                asked.append(eos)
                raise ValueError("after the end")
            return scores

        stock, mine = both(llama3, **ONE, eos_token_id=eos, logits_processor=LogitsProcessorList([strict]))
        assert mine.tolist() == stock.tolist()
    assert asked, "no draft went past the end"


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    fresh = copy.deepcopy(model)
    fresh.set_attn_implementation("eager")
    fresh.train()
    first = next(fresh.children())
    first.eval()
    before = [module.training for module in fresh.modules()]
    ids = fresh.generate(**ONE, max_new_tokens=10, do_sample=False, custom_generate=SMALL)
    assert [module.training for module in fresh.modules()] == before
    assert fresh.config._attn_implementation == "eager"
    fresh.eval()
    output = fresh.generate(
        **ONE, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, output_attentions=True
    )
    assert output.sequences.tolist() == ids.tolist()
    assert output.attentions[0][0] is not None


def test_the_engine_stays_and_grows(llama3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(llama3)
    assert EngineCache.NAME not in model.__dict__ or EngineCache.of(model).engine is None, "a copy starts afresh"
    both(model, **ONE)
    engine = EngineCache.of(model).engine
    assert engine is not None and engine.decode.max_batch_size == 1 and engine.max_length == 256
    assert engine.replica.drafts.shared is not None
    shared = engine.replica.drafts.shared
    monkeypatch.setattr(lpr.Engine, "from_model", None)  # never made again
    for arguments in ({**THREE}, {**ONE, "max_new_tokens": 300}, {**THREE}):
        stock, mine = both(model, **arguments)
        assert mine.tolist() == stock.tolist()
    assert EngineCache.of(model).engine is engine and engine.replica.drafts.shared is shared
    assert engine.decode.max_batch_size == 3 and engine.max_length == 512
    forwards = []
    hook = model.register_forward_pre_hook(lambda *args: forwards.append(1))
    model.generate(**ONE, max_new_tokens=60, do_sample=False, pad_token_id=0, custom_generate=SMALL)
    hook.remove()
    assert len(forwards) <= 15, "earlier outputs are drafted from"
    assert pickle.loads(pickle.dumps(EngineCache.of(model))).engine is None


def test_the_engine_goes_with_the_model(llama3: PreTrainedModel) -> None:
    model = copy.deepcopy(llama3)
    model.generate(**ONE, max_new_tokens=3, custom_generate=SMALL)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_other_dtypes(llama3: PreTrainedModel) -> None:
    model = copy.deepcopy(llama3)
    model.generate(**ONE, max_new_tokens=3, custom_generate=SMALL)
    model.to(torch.float64)
    stock, mine = both(model, **THREE)
    assert mine.tolist() == stock.tolist()
    model.to(torch.bfloat16)
    assert model.generate(**THREE, max_new_tokens=5, pad_token_id=0, custom_generate=SMALL).shape == (3, 35)


def test_a_call_inside_a_call_is_refused(llama3: PreTrainedModel) -> None:
    def nested(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        llama3.generate(**ONE, max_new_tokens=2, custom_generate=SMALL)
        return scores

    with pytest.raises(InputError, match="cannot run inside another such call"):
        llama3.generate(**ONE, max_new_tokens=4, logits_processor=LogitsProcessorList([nested]), custom_generate=SMALL)


def test_a_resized_vocabulary_gets_an_engine_of_its_own() -> None:
    model = tiny_model(seed=3, spread=0.1)
    for size in (97, 104, 50):
        model.resize_token_embeddings(size)
        plain, ours = both(model, input_ids=torch.tensor([[5, 6, size - 1]]))
        assert torch.equal(plain, ours)
