"""Multimodal checkpoints as text models: the wrapper's class without its towers.

Checkpoints such as `Mistral3ForConditionalGeneration` have a decoder beside vision or audio towers. The wrapper's class
is kept, so transformers maps the checkpoint's keys, quantisation and tensor parallelism as for the whole model. Modules
that text does not pass through are neither allocated nor read.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from lpr.config import InputError, first_line
from lpr.model.rewrite.base import Rewrite, Setting, Stage, carry_out

_PASSED = ("embed_",)  # name prefixes of modules outside the decoder that text passes through (Gemma 3n's embed_vision)


def decoder_class(config: PretrainedConfig) -> Any:
    """The class whose `from_pretrained` reads the decoder of `config`: AutoModelForCausalLM, or a wrapper's text part.

    Raises InputError for an encoder-decoder.
    """
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is not None and (is_text(config) or causal.config_class is not type(config)):
        return AutoModelForCausalLM
    wrapper: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if wrapper is None:
        return AutoModelForCausalLM  # its error lists the supported types
    if config.is_encoder_decoder or config.get_text_config(decoder=True).is_encoder_decoder:
        raise InputError(f"model type {config.model_type!r} is an encoder-decoder; lpr runs decoder-only models")
    return text_part(wrapper)


def is_text(config: PretrainedConfig) -> bool:
    return config.get_text_config(decoder=True) is config


def empty_decoder(config: PretrainedConfig) -> PreTrainedModel:
    """The model of `decoder_class`, with its initial weights; without memory on the meta device."""
    found = decoder_class(config)
    return found.from_config(config) if found is AutoModelForCausalLM else found(config)


def is_text_part(model: PreTrainedModel) -> bool:
    return getattr(type(model), "is_text_part", False)


@cache
def text_part(wrapper: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class `wrapper` without towers, with the same name and module, by which transformers finds key mappings."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.__init__(self, *args, **kwargs)
        known = self._keys_to_ignore_on_load_unexpected or ()
        carry_out(DroppedTowers(), self, Setting(torch.device("cpu")))
        dropped = [name for name, module in self.named_modules() if isinstance(module, Absent)]
        self._keys_to_ignore_on_load_unexpected = {*known, *(rf"^{re.escape(name)}\." for name in dropped)}

    own = {"__init__": build, "__module__": wrapper.__module__, "is_text_part": True}
    return type(wrapper.__name__, (wrapper,), own)


class Absent(nn.Module):
    """A placeholder for a tower, which is never called for text."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(f"text passes through its {self.name}, which a text model does not have")


class DroppedTowers(Rewrite):
    """Removes every module that is neither part nor ancestor of the decoder or the head."""

    name, stage = "no towers", Stage.LOAD

    def match(self, model: Any, setting: Setting) -> Iterator[tuple[str, str]]:
        kept = {id(model.get_decoder()), id(model.get_output_embeddings())}

        def towers(module: nn.Module, path: str) -> Iterator[tuple[str, str]]:
            for name, child in list(module.named_children()):
                if id(child) in kept or name.startswith(_PASSED):
                    continue
                if any(id(each) in kept for each in child.modules()):
                    yield from towers(child, f"{path}{name}.")
                else:
                    yield path[:-1], name

        if id(model) not in kept and is_text_part(model):
            yield from towers(model, "")

    def apply(self, module: nn.Module, found: str) -> None:
        setattr(module, found, Absent(found))


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Switch the attention of `model`, without a warning for the configs of absent towers."""
    config = model.config
    text = config.get_text_config(decoder=True)
    parts = [key for key in config.sub_configs if getattr(config, key, None) is text]
    chosen = {"": name, **dict.fromkeys(parts, name)}
    model.set_attn_implementation(chosen if parts and is_text_part(model) else name)


def takes_positions(model: PreTrainedModel) -> bool:
    """True if the forward of `model` takes position_ids, or passes keyword arguments to a decoder that does."""
    given = inspect.signature(type(model).forward).parameters
    if "position_ids" in given or not is_text_part(model):
        return "position_ids" in given
    inner = inspect.signature(type(model.get_decoder()).forward).parameters
    return "position_ids" in inner and any(each.kind is each.VAR_KEYWORD for each in given.values())


@torch.no_grad()
def check_generate(model: PreTrainedModel) -> None:
    """Raise InputError unless `generate` uses the logits of a plain forward over the text, as in a causal LM."""
    limit = 1e-4 if model.dtype in (torch.float32, torch.float64) else 6e-2
    name = model.config.model_type
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(0, vocab_size, (1, 12), generator=torch.Generator().manual_seed(6)).to(model.device)
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    how |= {"max_new_tokens": 2, "min_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
    try:
        generate: Any = model.generate
        done = generate(ids, **how)
        expected = model(input_ids=done.sequences[:, :-1], use_cache=False).logits[0, -2:].float()
        found = torch.cat(done.logits).float()
        error = ((found - expected).abs().max() / (expected.max() - expected.min())).item()
    except Exception as failure:  # whatever a class raises that needs an image
        reason = f"{type(failure).__name__}: {first_line(failure)}"[:200]
        raise InputError(f"model type {name!r} does not run as a text model: {reason}") from failure
    if not error <= limit:
        raise InputError(
            f"model type {name!r} does not run as a causal text model: the logits of its generate differ from those "
            f"of one forward by {error:.1e} of their range (at most {limit:.0e})"
        )


def text_keys(model: PreTrainedModel, keys: Iterable[str]) -> list[str]:
    """Those of `keys` in the decoder or the head of `model`, if it is a wrapper's text part; else all."""
    if not is_text_part(model):
        return []
    parts = model.get_decoder(), model.get_output_embeddings()
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if name and any(module is p for p in parts))
    return sorted(key for key in keys if key.startswith(prefixes))
