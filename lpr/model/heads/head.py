"""An MTP layer as a module: one decoder layer of the model's own class, fed with hidden states and embeddings."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lpr.model.step_inputs import StepInputs, in_step
from lpr.model.transformers_versions import passed


class DraftHead(nn.Module):
    """One MTP layer (lpr.model.heads.forms). Its K/V is in an additional layer, `layer`, of the model's cache."""

    hidden_first: bool
    layer: int
    vocabulary: Tensor | None  # int64 [V'], ids of the tokens that it guesses, ascending; None: all
    lm_head: nn.Linear | None  # the rows of the model's output head for `vocabulary`; None: the model's own is used

    def __init__(
        self,
        block: PreTrainedModel,
        embedding_norm: nn.Module,
        hidden_norm: nn.Module,
        join: nn.Module,
        hidden_first: bool,
        num_layers: int,
        vocabulary: Tensor | None = None,
        lm_head: nn.Linear | None = None,
    ) -> None:
        """A head whose `block` is the model's decoder with one layer, and without embeddings."""
        super().__init__()
        self.block, self.embedding_norm, self.hidden_norm, self.join = block, embedding_norm, hidden_norm, join
        self.lm_head = lm_head
        self.hidden_first, self.layer = hidden_first, num_layers
        self.register_buffer("vocabulary", vocabulary)
        module: Any
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = num_layers

    def forward(self, embeddings: Tensor, hidden: Tensor, **kwargs: Any) -> Tensor:
        """g [R, N, H] (lpr.model.heads.forms) of the embeddings and hidden states [R, N, H] of a chain or tree."""
        parts = [self.embedding_norm(embeddings), self.hidden_norm(hidden)]
        joined = self.join(torch.cat(parts[::-1] if self.hidden_first else parts, -1))
        return self.block(inputs_embeds=joined, **kwargs).last_hidden_state

    def set_attention(self, name: str) -> None:
        """Switch to the attention that the model uses."""
        self.block.set_attn_implementation(name)

    def step(self, embeddings: Tensor, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """`forward` over the entries of `inputs`; writes their K/V to the cache."""
        given: Any = {"position_ids": inputs.positions, "use_cache": True, **passed(inputs.cache, self.block)}
        return in_step(inputs, self, embeddings, hidden, **given)
