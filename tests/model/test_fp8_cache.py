"""K/V in 8 bits: ids are those of transformers with K/V rounded alike; what cannot is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.model.attention import dense
from lpr.model.fp8_cache import FP8, as_read, as_stored
from tests.fakes.models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7] * 3, [2, 4], [(i * i) % 97 for i in range(40)]]
DECODE = DecodeConfig(window_size=4, trie_nodes=12, max_batch_size=3, max_length=128, kv_tokens=512)
PLAIN = DecodeConfig(window_size=0, trie_nodes=0, max_batch_size=1, max_length=128, kv_tokens=512)
NEW = 8


def engine(decode: DecodeConfig, model_type: str = "llama", **options: Any) -> Engine:
    chosen = {"attention": "triton", "kv_dtype": "fp8"} | options
    return Engine.from_model(tiny_model(model_type), decode=decode, **chosen)


class RoundedCache(DynamicCache):
    """transformers' cache with each number rounded to E4M3."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = [each.clamp(-448, 448).to(FP8).to(each.dtype) for each in (key_states, value_states)]
        return super().update(rounded[0], rounded[1], *args, **kwargs)


def rounded_greedy(model_type: str, prompt: list[int], cache: DynamicCache) -> list[int]:
    model, found = tiny_model(model_type), [*prompt]
    ids = torch.tensor([prompt])
    for _ in range(NEW):
        with torch.no_grad():
            ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        found.append(int(ids))
    return found[len(prompt) :]


def check_greedy(model_type: str) -> None:
    expected = [rounded_greedy(model_type, prompt, RoundedCache()) for prompt in PROMPTS]
    assert expected != [rounded_greedy(model_type, prompt, DynamicCache()) for prompt in PROMPTS]  # rounding shows
    made = engine(DECODE, model_type)
    found = made.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert [each.token_ids for each in found] == expected
    config = made.model.model.config
    numbers = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    )
    cache = made.replica.model.cache
    assert cache.bytes_per_token == numbers
    assert sum(pool.nbytes for pool in cache._pools) == numbers * cache.num_rows


def test_greedy_ids_are_those_of_transformers_with_rounded_keys_and_values() -> None:
    check_greedy("llama")


def test_large_numbers_do_not_become_nan() -> None:
    pool = torch.zeros(4, dtype=torch.uint8)
    stored = as_stored(torch.tensor([-1e4, 3.0, 447.0, 1e4]), pool)
    assert as_read(stored).float().tolist() == [-448, 3, 448, 448]


def test_attention_without_the_kernel_reads_them() -> None:
    """For a bias on scores, which the kernel does not take."""
    query, states = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8).to(FP8)
    parts = [dense._attend(query, each, each, None, dense.Scoring.of(query)) for each in (states, states.float())]
    assert torch.equal(*parts)


@pytest.mark.parametrize(
    "options",
    [{"kv_dtype": "int8"}, {"attention": "sdpa"}, {"attention": "native"}, {"attention": "auto"}, {"exact": True}],
    ids=str,
)
def test_what_cannot_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="kv_dtype='fp8'.* (it needs|rounds) |kv_dtype 'int8' is none of auto, fp8"):
        engine(PLAIN, **options)
