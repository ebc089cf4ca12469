"""The drop-in for transformers programs: `model.generate(**inputs, custom_generate=lpr.lookahead)`.

`generate` prepares the generation config, the logits processors and the stopping criteria as always; lpr replaces the
loop that runs the model. Greedy ids equal those of plain `generate`; with `do_sample=True` they are an exact sample of
the same distribution, drawn by lpr's keyed noise (lpr.model.sampling). Each row's seed is one draw of `torch.randint`
from torch's default CPU generator, so `torch.manual_seed` and `transformers.set_seed` make a call reproducible, and
further calls differ. One process decodes; for lookahead parallelism use `lpr.Engine`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from lpr.config import DecodeConfig, InputError
from lpr.drop_in.rows import OutputBatch, OutputRow
from lpr.engine.engine import Engine
from lpr.engine.options import EngineOptions, SelfDraft
from lpr.engine.request import Request
from lpr.engine.turns import PATIENCE
from lpr.model.adapter import evaluating, own_attention
from lpr.model.loader import wrap
from lpr.model.modes import autocasts
from lpr.model.transformers_versions import CACHE_ARGUMENTS


class HandOver:
    """The signature of a Lookahead, which passes arguments that transformers (5.23, 5.24) would drop.

    `generate` inspects the signature of a callable `custom_generate`, and passes those of its remaining keyword
    arguments that its own sampling loop does not have. It has already removed `streamer`, `tokenizer` and
    `assistant_model`. So each inspection of the signature restores them, under names that the sampling loop does not
    have.
    """

    def __get__(self, instance: Lookahead | None, owner: type) -> inspect.Signature | None:
        if instance is None:
            return None
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code is not _EXTRACT:
            frame = frame.f_back
        if frame.f_code is _EXTRACT:
            given, kwargs = frame.f_locals["generation_mode_kwargs"], frame.f_locals["kwargs"]
            kwargs.update({_HANDED_OVER[name]: value for name, value in given.items() if name in _HANDED_OVER})
        return inspect.signature(instance.__call__)


_EXTRACT = GenerationMixin._extract_generation_mode_kwargs.__code__
_HANDED_OVER = {name: f"lpr_{name}" for name in ("streamer", "assistant_model", "synced_gpus")}
_HANDED_OVER |= {name: name for name in ("tokenizer", "assistant_tokenizer")}


class Lookahead:
    """A `custom_generate` for transformers that decodes with lpr: the same tokens in fewer forwards.

    The engine (tree attention, K/V cache, draft indexes) stays on the model from call to call and grows with its
    batches; outside its steps the model has its own attention. Calls of several threads share the engine and take turns
    step by step; one that needs a larger engine, or another configuration, waits until the others have ended.
    """

    __signature__ = HandOver()

    def __init__(
        self, decode: DecodeConfig | None = None, *, exact: bool = False, self_draft: SelfDraft = "off"
    ) -> None:
        """Draft as `decode` asks, except that `max_batch_size` and `max_length` follow from each call.

        `exact` and `self_draft` are those of EngineOptions: with `exact`, ids and logits do not depend on `decode`, in
        half precision either.
        """
        self.decode = decode if decode is not None else DecodeConfig()
        self.options = EngineOptions(prefix_reuse=False, exact=exact, self_draft=self_draft)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        lpr_streamer: Any = None,
        lpr_assistant_model: Any = None,
        lpr_synced_gpus: bool = False,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate` with all it has prepared; returns the result of `generate`.

        `HandOver` renames arguments of `generate` to those that begin with `lpr_`. Raises InputError, which names the
        option, for one that a token tree cannot honour.
        """
        refuse(model, generation_config, lpr_assistant_model, lpr_synced_gpus, model_kwargs)
        refuse_other_inputs(model, input_ids, model_kwargs)
        prompts = prompts_of(input_ids, model_kwargs)
        num_pads = [input_ids.shape[1] - len(prompt) for prompt in prompts]
        batch = OutputBatch(input_ids, num_pads, generation_config, logits_processor, stopping_criteria, lpr_streamer)
        sampled = generation_config.do_sample
        seeds = torch.randint(2**63 - 1, (len(prompts),)).tolist() if sampled else [0] * len(prompts)
        call = Call(model, self.decode, len(prompts), max(map(len, prompts)) + batch.max_new_tokens, self.options)
        with EngineCache.of(model).engine_for(call) as engine:
            requests: dict[Request, OutputRow] = {}
            try:
                for row, prompt, seed in zip(batch.rows, prompts, seeds, strict=True):
                    room = min(batch.max_new_tokens, engine.max_length - len(prompt))
                    if room < 1:
                        raise InputError(f"row {row.index} fills the model's {engine.max_length} positions already")
                    params = replace(batch.params, max_new_tokens=room, seed=seed, ignore_eos=True)
                    requests[engine.submit(prompt, params, row.processors)] = row
                while not batch.is_complete:
                    advance(engine, requests, batch)
            finally:
                for request in requests:
                    engine.abort(request)
        return batch.result()


lookahead = Lookahead()
"""`custom_generate=lpr.lookahead`, with the default DecodeConfig; `lpr.Lookahead(decode)` is one with another."""


def advance(engine: Engine, requests: dict[Request, OutputRow], batch: OutputBatch) -> None:
    """One step of all rows; a finished row that is padded leaves the engine."""
    if not any(request.chunks for request in requests):  # another thread's step may have added some
        engine.step()
    for request, row in requests.items():
        reason = request.finish_reason  # read first: another thread's step may end it after `take`
        for chunk in request.take():
            for token in chunk.token_ids:
                batch.push(row, token)
        if row.finished_at is not None and (batch.pads or batch.is_complete):
            engine.abort(request)  # tokens and errors after its end are dropped
        elif reason == "error":
            raise row.failure or RuntimeError(f"row {row.index}: {request.error}")
        elif reason == "length" and row.length < batch.ids.shape[1]:
            raise InputError(
                f"row {row.index} reached the model's {engine.max_length} positions unfinished; ask for fewer tokens"
            )


def prompts_of(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The rows of `input_ids` [B, L] without their padding on the left."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
    if mask.shape != input_ids.shape:
        raise InputError(f"attention_mask is {list(mask.shape)} for input_ids {list(input_ids.shape)}")
    if (mask.diff(dim=1) < 0).any():
        raise InputError("attention_mask hides tokens after the first: pad on the left (padding_side='left')")
    positions = model_kwargs.get("position_ids")
    if positions is not None and ((positions.to(mask.device) != mask.cumsum(1) - 1) & (mask == 1)).any():
        raise InputError("position_ids other than 0, 1, 2, ... are not supported by lpr.lookahead")
    starts = (input_ids.shape[1] - mask.sum(1)).tolist()
    prompts = [ids[start:] for ids, start in zip(input_ids.tolist(), starts, strict=True)]
    if not prompts:
        raise InputError("input_ids has no rows")
    if [] in prompts:
        raise InputError(f"row {prompts.index([])} is empty: a model needs at least one token to continue")
    return prompts


# generate() passes these for every model; other inputs are not supported.
_HONOURED = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", *CACHE_ARGUMENTS}
_PREPARED = {"input_ids", "cache_position", *_HONOURED}
_TRANSFORMERS = Path(transformers.__file__).parent


def refuse(
    model: PreTrainedModel, config: Any, assistant_model: Any, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> None:
    """Raise InputError that names an unsupported option."""
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        options = ("num_beams", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "use_mtp")
        given = [name for name in options if getattr(config, name, None) not in (None, 1, False)]
        given += ["assistant_model"] if assistant_model is not None else []
        _refuse(f"{mode.value.replace('_', ' ')} ({', '.join(given) or 'generation mode'})")
    if model.config.is_encoder_decoder:
        _refuse("an encoder-decoder model")
    if autocasts():
        _refuse("torch.autocast, as it runs a model in the model's own dtype")
    if synced_gpus:
        _refuse("synced_gpus (ZeRO-3 or FSDP)")
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                _refuse(name)
    if config.cache_implementation == "quantized":
        _refuse("cache_implementation='quantized'")
    for name in CACHE_ARGUMENTS:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):  # and not made by generate
            _refuse(f"{name}: it keeps a cache of its own")
    for name, value in model_kwargs.items():
        if value is not None and name not in _HONOURED:
            _refuse(name)


def refuse_other_inputs(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise InputError if a `prepare_inputs_for_generation` from outside transformers makes other inputs.

    PEFT's prompt tuning puts embeddings in front of the prompt there, and prefix tuning a cache. A step of lpr gives
    the forward tokens only.
    """
    prepare: Any = model.prepare_inputs_for_generation
    code = getattr(prepare, "__code__", None)
    if code is not None and Path(code.co_filename).is_relative_to(_TRANSFORMERS):
        return
    made: dict[str, Any] = dict(prepare(input_ids, is_first_iteration=True, **model_kwargs))
    passed, mask = model_kwargs.get("attention_mask"), made.get("attention_mask")
    changed = [name for name in CACHE_ARGUMENTS if made.get(name) is not model_kwargs.get(name)]
    if made.get("input_ids") is None or not torch.equal(made["input_ids"], input_ids):
        changed.append("input_ids")
    wanted = torch.ones_like(input_ids) if passed is None else passed
    if torch.is_tensor(mask) and mask.dim() == 2 and not torch.equal(mask != 0, wanted != 0):
        changed.append("attention_mask")
    changed += [name for name, value in made.items() if torch.is_tensor(value) and name not in _PREPARED]
    if changed:
        _refuse(f"a prepare_inputs_for_generation that makes its own {' and '.join(changed)}")
    prompts_of(input_ids, {"attention_mask": passed, "position_ids": made.get("position_ids")})


def _refuse(what: str) -> None:
    raise InputError(f"lpr.lookahead cannot decode with {what}; call generate without custom_generate for that")


class Call(NamedTuple):
    """What a call of `generate` needs of an engine."""

    model: PreTrainedModel
    decode: DecodeConfig
    slots: int
    longest: int  # tokens of the longest row, its output included
    options: EngineOptions

    @property
    def key(self) -> tuple[Any, ...]:
        """The properties that an engine cannot change."""
        model, options = self.model, self.options
        vocab_size = model.config.get_text_config(decoder=True).vocab_size  # drafts must not have ids of a larger one
        return model.device, model.dtype, vocab_size, options, torch.get_num_threads() if options.exact else None


class EngineCache:
    """A model's engine between calls.

    It is an attribute of the model: the engine references the model, so a table would keep both alive forever. Copies
    and pickles of the model do not include it.
    """

    NAME = "_lpr_kept"

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._free = threading.Condition()  # notified when a call ends, or has made the engine
        self._callers: set[int] = set()  # threads whose calls the engine works on
        self._mode = ExitStack()  # restores the model's mode after the last call

    def __reduce__(self) -> tuple[type[EngineCache], tuple[()]]:
        return EngineCache, ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> EngineCache:
        return model.__dict__.setdefault(cls.NAME, cls())

    @contextmanager
    def engine_for(self, call: Call) -> Iterator[Engine]:
        """The engine for one call, with a slot per prompt and room for its tokens as far as the model has positions.

        The cache grows by powers of two and never shrinks. Learned outputs of earlier calls stay, their K/V does not:
        the model may have been trained in between. While calls of other threads run, one that fits joins them, and
        another one waits. Raises InputError within a call of the same thread.
        """
        caller = threading.get_ident()
        with ExitStack() as leaving:
            with self._free:
                if caller in self._callers:
                    raise InputError("generate with lpr.lookahead cannot run inside another such call on its model")
                if not self._free.wait_for(lambda: not self._callers or self._fits(call), PATIENCE):
                    raise RuntimeError(f"another thread's generate has used this model for {PATIENCE:.0f} seconds")
                is_alone = not self._callers
                self._callers.add(caller)
                leaving.callback(self._leave, caller)
                if is_alone:
                    self._mode.enter_context(evaluating(call.model))
                    self._make(call)
                    self._free.notify_all()
                engine = self.engine
            assert engine is not None
            yield engine

    def _leave(self, caller: int) -> None:
        with self._free:
            self._callers.discard(caller)
            if not self._callers:
                self._mode.close()
            self._free.notify_all()

    def _wanted(self, call: Call) -> DecodeConfig:
        """The configuration for a call; no smaller than the engine's."""
        slots, length = call.slots, max(256, 1 << (call.longest - 1).bit_length())
        length = min(length, wrap(call.model, None).max_positions or length)
        if self.engine is not None:
            length, slots = max(length, self.engine.max_length), max(slots, self.engine.decode.max_batch_size)
        return replace(call.decode, max_batch_size=slots, max_length=length)

    def _fits(self, call: Call) -> bool:
        return self.engine is not None and self._made_for == call.key and self.engine.decode == self._wanted(call)

    def _make(self, call: Call) -> None:
        """Make the engine, or configure the one that there is."""
        key = call.key
        if self.engine is not None and (self._made_for != key or not self.engine.replica.watch.is_followed()):
            self.engine = None
        wanted = self._wanted(call)
        if self.engine is None:
            with own_attention(call.model):
                self.engine = Engine.from_model(call.model, decode=wanted, options=call.options)
            self._made_for = key
        elif self.engine.decode != wanted:
            self.engine.configure(wanted, keep_drafts=True)
