"""Run the equality test over every decoder family and write its table into docs/families.md.

    python -m dev.families            run the matrix, rewrite the page's table
    python -m dev.families llama gpt2 run some types only, write nothing

A family works if the engine emits the ids of the untouched model's own greedy `generate`, for a ragged batch, with
drafts of which some are accepted and some rejected.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dev.family_table import FAMILIES, NOT_RUN, REFUSED, SIZES, TOWER, TRANSFORMERS, WORKS, WRAPPERS, Family
from lpr import DecodeConfig, Engine, InputError, SamplingParams

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
NEW_TOKENS = 18
DECODE = DecodeConfig(max_batch_size=2, window_size=4, ngram_size=3, guess_set_size=3, trie_nodes=16, max_length=120)
PROMPTS = [[(7 * i + i * i) % 89 + 2 for i in range(19)], [(5 * i + 3 * i * i) % 83 + 4 for i in range(33)]]
"""Ragged, and longer than the tiny configs' sliding windows."""


def tiny_config(family: Family) -> PreTrainedConfig:
    """The family's config with those of SIZES that its class, or the class of its text part, has."""
    return _sized(CONFIG_MAPPING[family.model_type], family.config)


def _sized(cls: Any, overrides: dict[str, Any], sizes: dict[str, Any] = SIZES) -> PreTrainedConfig:
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    sizes = {name: value for name, value in sizes.items() if name in known}
    if "qk_rope_head_dim" in known and "num_attention_heads" in sizes:
        sizes.pop("head_dim", None)  # latent attention: derived from the others; every head has its own key
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    overrides = dict(overrides)
    for name, sub in getattr(cls, "sub_configs", {}).items():
        if name == "text_config" and "model_type" not in overrides.get(name, {"model_type": ""}):
            overrides[name] = _sized(sub, overrides[name]).to_dict()
    return cls(**{**sizes, **overrides})


def wrapper_config(family: Family) -> PreTrainedConfig:
    """The config of a multimodal type: SIZES for its text part, TOWER for the others, and the family's values."""
    cls = CONFIG_MAPPING[family.model_type]
    parts = {name: _part_class(cls, name) for name in getattr(cls, "sub_configs", {})}
    values = dict(family.config)
    for name, part in parts.items():
        is_text = name in ("text_config", "decoder")
        values[name] = _sized(part, values.get(name, {}), SIZES if is_text else TOWER).to_dict()
    return _sized(cls, values)


def _part_class(cls: Any, name: str) -> Any:
    """The config class of a part, which some types leave to its default."""
    part = cls.sub_configs[name]
    return part if getattr(part, "model_type", "") else type(getattr(cls(), name))


def save_wrapper(family: Family, folder: str) -> PreTrainedModel:
    """A random fp32 model of a multimodal type, towers included, whose checkpoint is saved in `folder`."""
    config = wrapper_config(family)
    torch.manual_seed(0)
    model: PreTrainedModel = _randomised(AutoModelForMultimodalLM.from_config(config, dtype=torch.float32))
    model.save_pretrained(folder)
    return model


def tiny_model(family: Family, spread: float = 0.15) -> PreTrainedModel:
    """A random fp32 model of the family, with attention and logits far from uniform."""
    torch.manual_seed(0)
    return _randomised(AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32), spread)


def _randomised(model: Any, spread: float = 0.15) -> Any:
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and weight.dim() > 1:
                weight.normal_(0, spread)
    model.generation_config.eos_token_id = None
    return model


def stock_greedy(model: PreTrainedModel) -> list[list[int]]:
    """The greedy outputs of transformers' own `generate`, one prompt at a time."""
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        texts.append(done[0, len(prompt) :].tolist())
    return texts


@dataclass
class Observed:
    """The result of one family."""

    status: str
    detail: str
    """The refusal's message, or tokens per step."""

    def matches(self, family: Family) -> bool:
        """True if status and reason are those of the table."""
        if family.is_old:
            return self.status == REFUSED
        return self.status == family.status and (self.status == WORKS or family.note in self.detail)


def observe(family: Family) -> Observed:
    """Run one family. Raises any error that is not a refusal, and AssertionError for a wrong token."""
    with TemporaryDirectory() as folder:
        is_wrapper = family in WRAPPERS
        model = save_wrapper(family, folder) if is_wrapper else tiny_model(family)
        expected = stock_greedy(model) if family.status == WORKS else []  # before the model is switched to trees
        try:
            read = Engine.from_pretrained if is_wrapper else Engine.from_model
            engine = read(folder if is_wrapper else model, decode=DECODE)
        except InputError as refusal:
            return Observed(REFUSED, str(refusal))
    expected = expected or stock_greedy(model)
    for text in expected:  # drafts that are right for five tokens and then wrong
        engine.learn([token if i % 6 else (token + 1) % 97 for i, token in enumerate(text)])
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
    for completion, ids in zip(done, expected, strict=True):
        if completion.token_ids != ids:
            raise AssertionError(f"{family.name}: {completion.token_ids} is not transformers' {ids}")
        drafted = sum(count.drafted for count in completion.stats.sources.values())
        accepted = sum(count.accepted for count in completion.stats.sources.values())
        if not 0 < accepted < drafted or completion.stats.tokens_per_step <= 1:
            raise AssertionError(f"{family.name}: {accepted} of {drafted} drafted nodes accepted: nothing was tested")
    return Observed(WORKS, f"{done[0].stats.tokens_per_step:.2f} tokens per step")


def table() -> str:
    """The page's table, from FAMILIES."""
    rows: dict[tuple[str, str], list[Family]] = {}
    for family in [*FAMILIES, *WRAPPERS]:
        rows.setdefault((family.status, family.row), []).append(family)
    lines = [
        f"Run by `python -m dev.families` with transformers {TRANSFORMERS}, on tiny random fp32 models: *works* means",
        "that greedy ids equal those of the untouched model's `generate`, in a ragged batch with drafts accepted and",
        "rejected; multimodal types are saved with their towers and loaded as text models. *refused* means one clear",
        "line when the model is loaded, and never a wrong token.",
        "",
        "| models | transformers types | lpr |",
        "|---|---|---|",
    ]
    for (status, row), families in sorted(rows.items(), key=lambda item: (WORKS, REFUSED, NOT_RUN).index(item[0][0])):
        types = " ".join(f"`{name}`" for name in dict.fromkeys(family.model_type for family in families))
        notes = "; ".join(dict.fromkeys(_noted(family, families) for family in families if family.note))
        lines.append(f"| {row} | {types} | {status}{': ' + notes if notes else ''} |")
    return "\n".join(lines)


def _noted(family: Family, row: list[Family]) -> str:
    """A note, with the type if other types of the row lack it."""
    if all(other.note == family.note for other in row):
        return family.note
    return family.note if family.variant else f"{family.model_type}: {family.note}"


def with_table(page: str) -> str:
    """The page's text with the table between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main(args: list[str]) -> int:
    """Run the matrix. Returns 1 and leaves the page unchanged if a family differs from the table."""
    parser = argparse.ArgumentParser(prog="python -m dev.families", description="Run lpr over the decoder families.")
    parser.add_argument("types", nargs="*", help="model types to run; all, and the page's table, without")
    chosen = parser.parse_args(args).types
    families = [*FAMILIES, *WRAPPERS]
    unknown = set(chosen) - {family.model_type for family in families}
    if unknown:
        parser.error(f"no such type in dev/family_table.py: {', '.join(sorted(unknown))}")
    if not chosen and transformers.__version__ != TRANSFORMERS:
        parser.error(f"the table is of transformers {TRANSFORMERS}, this is {transformers.__version__}")
    transformers.utils.logging.set_verbosity_error()
    unexpected = 0
    for family in families:
        if family.status == NOT_RUN or (chosen and family.model_type not in chosen):
            continue
        start = time.monotonic()
        try:
            seen = observe(family)
            right = seen.matches(family)
        except Exception as failure:  # reported in a line; the other families still run
            seen, right = Observed("failed", f"{type(failure).__name__}: {failure}"), False
        unexpected += not right
        took = time.monotonic() - start
        print(f"{' ' if right else '!'} {family.name:36} {seen.status:8} {took:5.1f} s  {seen.detail}", flush=True)
    if unexpected:
        print(f"{unexpected} families differ from dev/family_table.py; the page stays as it is", file=sys.stderr)
    elif not chosen:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
