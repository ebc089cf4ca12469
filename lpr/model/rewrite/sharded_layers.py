"""The layers of a tensor-parallel replica as plain modules with a collective, which can be merged and compiled.

transformers holds a rank's shard as a DTensor and puts the collective into a wrapped `forward`, which a compiler does
not trace. Here the shard is the parameter, and the module calls the collective: torch.compile traces it as a functional
collective into the one graph of a step, as in gpt-fast. The results are the same.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from lpr.model.rewrite.base import Rewrite, Setting, Shards, Stage, carry_out
from lpr.model.step_inputs import current_step

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def summed(product: Tensor, group: dist.ProcessGroup, bias: Tensor | None) -> Tensor:
    """The sum of the ranks' products, plus `bias`."""
    dist.all_reduce(product, group=group)
    return product if bias is None else product + bias


class ReducedLinear(nn.Linear):
    """A projection that is split along its input: the sum of the ranks' products."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        """The whole output [..., outputs] for this rank's part [..., inputs / ranks]."""
        return summed(self.multiply(input), self.group, self.bias)

    def multiply(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


class VocabularyEmbedding(nn.Embedding):
    """An embedding that is split along the vocabulary."""

    group: dist.ProcessGroup
    first: int  # the first token of them

    def forward(self, input: Tensor) -> Tensor:
        """The embeddings of `input`, all-reduced over the ranks."""
        places = input - self.first
        is_here = (places >= 0) & (places < len(self.weight))
        found = F.embedding(places.clamp(0, len(self.weight) - 1), self.weight) * is_here[..., None]
        dist.all_reduce(found, group=self.group)
        return found


class VocabularyHead(nn.Linear):
    """An output head that is split along the vocabulary: in a step this rank's logits, elsewhere all of them."""

    group: dist.ProcessGroup
    first: int  # the first token of this rank's part

    def forward(self, input: Tensor) -> Tensor:
        """Within a step [..., part], for `whole` to gather outside of a compiled forward; else [..., vocabulary]."""
        mine = super().forward(input)
        return mine if current_step() is not None else self.whole(mine)

    def whole(self, mine: Tensor) -> Tensor:
        """The logits [..., vocabulary] of which `mine` is this rank's part."""
        if not mine.shape[:-1].numel():  # no row, on all ranks
            return mine.new_empty(*mine.shape[:-1], self.out_features)
        missing = -(-self.out_features // dist.get_world_size(self.group)) - mine.shape[-1]
        parts = self.gather(F.pad(mine, (0, missing)).flatten(0, -2))
        return parts.transpose(0, 1).flatten(1)[:, : self.out_features].unflatten(0, mine.shape[:-1])

    def gather(self, words: Tensor) -> Tensor:
        """All-gather `words` [n, w] over the ranks that share the head: [ranks, n, w]."""
        found = words.new_empty(dist.get_world_size(self.group), *words.shape)
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(found.flatten(0, 1), words.contiguous(), group=self.group)
        return found


def generic_name(name: str) -> str:
    """The name of a module or parameter in a plan: with * instead of the layer's number."""
    return _LAYER_NUMBER.sub("*", name)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def vocabulary_head(model: PreTrainedModel) -> VocabularyHead | None:
    """The head of `model` if it is split and every rank has tokens; else None."""
    head = model.get_output_embeddings()
    if not isinstance(head, VocabularyHead):
        return None
    count = dist.get_world_size(head.group)
    return head if -(-head.out_features // count) * (count - 1) < head.out_features else None


class ShardedLayers(Rewrite):
    """Replaces layers that transformers has split by plain ones; unknown kinds are kept."""

    name, stage = "plain shards", Stage.LOAD

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        return "no rank shares the weights" if setting.shards is None else None

    def match(self, model: Any, setting: Setting) -> Iterator[tuple[str, Any]]:
        assert setting.shards is not None
        head, parts = model.get_output_embeddings(), dict[int, tuple[Tensor, nn.Parameter]]()
        for name, module in list(model.named_modules()):
            made = _class_of(module, setting.shards.plan.get(generic_name(name), ""), module is head)
            if made is not None and all(_is_plain(local(each)) for each in module.parameters(False)):
                yield name, (made, parts, setting.shards)

    def apply(self, module: Any, found: Any) -> None:
        made, parts, shards = found
        vars(module).pop("forward", None)
        for key, parameter in list(module.named_parameters(recurse=False)):
            # Tied parameters stay tied. The old one is kept alive so that its id is not reused.
            parts.setdefault(id(parameter), (parameter, nn.Parameter(local(parameter.detach()), requires_grad=False)))
            setattr(module, key, parts[id(parameter)][1])
        module.__class__ = made
        if issubclass(made, ReducedLinear | VocabularyEmbedding | VocabularyHead):
            module.group = shards.group
        if issubclass(made, VocabularyEmbedding | VocabularyHead):
            rows = module.out_features if made is VocabularyHead else module.num_embeddings
            module.first = min(rows, -(-rows // dist.get_world_size(shards.group)) * shards.rank)


def make_plain(model: PreTrainedModel, plan: Mapping[str, str], group: dist.ProcessGroup, rank: int) -> None:
    carry_out(ShardedLayers(), model, Setting(model.device, tp=True, shards=Shards(plan, group, rank)))


def _class_of(module: nn.Module, style: str, is_head: bool) -> type[nn.Module] | None:
    """The class of a plain module equivalent to `module` with `style`; None if unknown."""
    if style in ("replicate", "replicated_with_grad_allreduce"):
        return type(module)
    if type(module) is nn.Linear:
        gathers = style in ("colwise_gather_output", "colwise_rep")
        return VocabularyHead if gathers and is_head else {"colwise": nn.Linear, "rowwise": ReducedLinear}.get(style)
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise" and module.max_norm is None:
        if type(module) is nn.Embedding:
            return VocabularyEmbedding
        return type(type(module).__name__, (type(module), VocabularyEmbedding), {})  # one that scales what it finds
    return None


def _is_plain(tensor: Tensor) -> bool:
    return not is_traceable_wrapper_subclass(tensor)


def still_split(model: nn.Module) -> Iterator[str]:
    """The names of modules that still depend on transformers' tensor-parallel wrappers."""
    for name, module in model.named_modules():
        is_dtensor = any(isinstance(each, DTensor) for each in module.parameters(recurse=False))
        if is_dtensor or type(module).__module__.startswith("deepspeed."):
            yield name
