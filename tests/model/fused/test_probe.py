"""Modules are recognised by what they do: a forward that is altered slightly is not, and a rewritten one is."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpr import native
from lpr.model.cpu.tiles import can_tile
from lpr.model.fused.decoder_layer import layer_of
from lpr.model.fused.elementwise import Weighing
from lpr.model.fused.modules import mlp_of, norm_of
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.step_inputs import Row
from tests.fakes.models import tiny_model
from tests.fakes.rewriting import make_faster, prepack

pytestmark = pytest.mark.skipif(
    native.rms_norm is None or not can_tile(torch.float32, 2), reason="no extension, or no AVX2"
)
Forward = Callable[..., Any]


def altered(module: nn.Module, forward: Callable[[Forward, Any], Forward]) -> None:
    """Give `module` a class whose forward is what `forward` makes of its own."""
    kind = type(module)
    own = forward(kind.forward, module)
    module.__class__ = type(f"Altered{kind.__name__}", (kind,), {"forward": own})


def before(change: Callable[..., Any]) -> Callable[[Forward, Any], Forward]:
    """A forward that changes its input."""
    return lambda own, _: lambda self, x, *args, **kwargs: own(self, change(x), *args, **kwargs)


def behind(change: Callable[[Tensor], Tensor]) -> Callable[[Forward, Any], Forward]:
    """A forward that changes its output."""

    def changed(own: Forward, _: Any) -> Forward:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = own(self, *args, **kwargs)
            return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

        return forward

    return changed


def with_argument(name: str, change: Callable[[Any], Any]) -> Callable[[Forward, Any], Forward]:
    """A forward that changes an argument."""
    return lambda own, _: lambda self, *args, **kwargs: own(self, *args, **{**kwargs, name: change(kwargs.get(name))})


def offset(self: Any, x: Tensor) -> Tensor:
    """Gemma's weight, rounded as Llama's."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return (1 + self.weight) * normed.to(x.dtype)


def in_another_order(self: Any, x: Tensor) -> Tensor:
    """Llama's norm as another release may write it."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=self.variance_epsilon).to(x.dtype) * self.weight


NORMS: dict[str, Callable[[Forward, Any], Forward]] = {
    "scale": behind(lambda x: x * 1.001),
    "offset of weights": lambda own, _: offset,
    "epsilon": lambda own, _: (
        lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)
    ),
    "centred": before(lambda x: x - x.mean(-1, keepdim=True)),
    "clamped": before(lambda x: x.clamp(-20, 20)),
    "another dtype": behind(lambda x: x.double()),
    "by shape": lambda own, _: lambda self, x: own(self, x) * (1 if x.dim() < 4 else 1.5),
    "more arguments": lambda own, _: lambda self, x, gate=None: own(self, x),
}
MLPS: dict[str, Callable[[Forward, Any], Forward]] = {
    "scale of the output": behind(lambda x: x * 1.01),
    "scale of the input": before(lambda x: x * 1.01),
    "another activation": lambda own, _: lambda self, x: self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x)),
    "linear gate": lambda own, _: lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x)),
    "exchanged": lambda own, _: lambda self, x: self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x))),
    "residual": lambda own, _: lambda self, x: own(self, x) + 0.1 * x,
    "limit": lambda own, _: (
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x).clamp(-7, 7))
    ),
}
ATTENTION: dict[str, Callable[[Forward, Any], Forward]] = {
    "other rope": with_argument("position_embeddings", lambda tables: (tables[0], -tables[1])),
    "scaled rope": with_argument("position_embeddings", lambda tables: tuple(each * 1.1 for each in tables)),
    "no mask": with_argument("attention_mask", lambda _: None),
    "softcap": with_argument("softcap", lambda _: 30.0),
    "sinks": with_argument("s_aux", lambda _: torch.zeros(4)),
    "scale": behind(lambda x: x * 1.01),
    "no cache": with_argument("past_key_values", lambda _: None),
}
LAYERS: dict[str, Callable[[Forward, Any], Forward]] = {
    "scale": behind(lambda x: x * 1.01),
    "input": before(lambda x: x * 1.01),
    "residual": lambda own, _: lambda self, x, *args, **kwargs: own(self, x, *args, **kwargs) + x,
    "parallel": lambda own, _: (
        lambda self, x, **kwargs: (
            x
            + self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0]
            + self.mlp(self.post_attention_layernorm(x))
        )
    ),
    "no position embeddings": with_argument("position_embeddings", lambda tables: tuple(map(torch.ones_like, tables))),
}


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    made = tiny_model(request.param, head_dim=16)
    prepack(made)
    return made


@pytest.mark.parametrize("mutant", NORMS)
def test_an_altered_norm(mutant: str, model: Any) -> None:
    norm = model.model.norm
    found = norm_of(norm)
    assert found is not None and found.weighing == Weighing.ROUNDED
    altered(norm, NORMS[mutant])
    assert norm_of(norm) is None


@pytest.mark.parametrize("mutant", MLPS)
def test_an_altered_mlp(mutant: str, model: Any) -> None:
    mlp = model.model.layers[0].mlp
    assert mlp_of(mlp) is not None
    altered(mlp, MLPS[mutant])
    assert mlp_of(mlp) is None


@pytest.mark.parametrize("mutant", [*LAYERS, *(f"attention: {name}" for name in ATTENTION)])
def test_an_altered_layer(mutant: str, model: Any) -> None:
    layer = model.model.layers[1]
    assert layer_of(layer) is not None
    name = mutant.removeprefix("attention: ")
    if name == mutant:
        altered(layer, LAYERS[name])
    else:
        altered(layer.self_attn, ATTENTION[name])
    assert layer_of(layer) is None


@pytest.mark.parametrize("change", ["rotation", "scaling", "child"])
def test_other_code_that_attention_calls(change: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = model.model.layers[0]
    attention = layer.self_attn
    code = __import__(type(attention).__module__, fromlist=["apply_rotary_pos_emb"])
    own = code.apply_rotary_pos_emb
    if change == "rotation":  # of neighbours, as in Cohere's models
        pairs = lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)  # noqa: E731
        rotate = lambda q, k, cos, sin: tuple(x * cos[:, None] + pairs(x) * sin[:, None] for x in (q, k))  # noqa: E731
        monkeypatch.setattr(code, "apply_rotary_pos_emb", rotate)
    elif change == "scaling":
        monkeypatch.setattr(code, "apply_rotary_pos_emb", lambda q, *rest: (own(q, *rest)[0] * 1.01, own(q, *rest)[1]))
    else:
        attention.gate = nn.Linear(2, 2)
    assert layer_of(layer) is None


def test_a_partial_rotation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that rotates as much of a head as its tables have is not known to rotate all of it."""
    layer = model.model.layers[0]
    code = __import__(type(layer.self_attn).__module__, fromlist=["apply_rotary_pos_emb"])
    own = code.apply_rotary_pos_emb

    def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        width = cos.shape[-1]
        parts = own(q[..., :width], k[..., :width], cos, sin)
        q, k = (torch.cat([part, x[..., width:]], -1) for part, x in zip(parts, (q, k), strict=True))
        return q, k

    monkeypatch.setattr(code, "apply_rotary_pos_emb", partial)
    assert layer_of(layer) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_way_to_write_it_is_recognised(dtype: torch.dtype) -> None:
    """No set of known sources: what computes the same is known."""
    model = tiny_model().to(dtype)
    altered(model.model.norm, lambda own, _: in_another_order)
    silu = lambda self, x: self.down_proj(self.up_proj(x) * torch.nn.functional.silu(self.gate_proj(x)))  # noqa: E731
    altered(model.model.layers[0].mlp, lambda own, _: silu)
    prepack(model)
    found = norm_of(model.model.norm)
    assert found is not None and found.weighing == Weighing.ROUNDED
    assert mlp_of(model.model.layers[0].mlp) is not None and layer_of(model.model.layers[0]) is not None


def test_weights_and_hooks_take_no_part(model: Any) -> None:
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(_))
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    assert layer_of(model.model.layers[0]) is not None
    assert not calls and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("where", ["norm", "mlp", "attention", "layer"])
def test_an_altered_model_keeps_its_own_logits(where: str) -> None:
    model = tiny_model()
    layer = model.model.layers[1]
    parts = {"norm": layer.input_layernorm, "mlp": layer.mlp, "attention": layer.self_attn, "layer": layer}
    altered(parts[where], behind(lambda x: x * 1.25))
    plain = copy.deepcopy(model)
    make_faster(model)
    rows = [Row(0, 0, [3, 4, 5, 6], [-1, 0, 0, 1], [0, 1, 1, 2], 4)]
    one, other = (TreeModel(each).adapter.logits(rows, KVCache(1, 64)) for each in (plain, model))
    assert torch.allclose(one, other, atol=1e-5)


def test_recognition_takes_little_time() -> None:
    model = tiny_model(num_hidden_layers=4)
    prepack(model)
    layer_of(model.model.layers[0])
    began = time.thread_time()
    for layer in model.model.layers:
        assert layer_of(layer) is not None
    assert (time.thread_time() - began) / 4 < 0.1, "seconds a layer; 0.01 where it was measured"
