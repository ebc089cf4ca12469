"""From a step's logits to its results: the chosen tokens, the most likely ones and log-probabilities."""

import torch
from torch import Tensor

from lpr.model.adapter import Adapter
from lpr.model.kv_cache import KVCache
from lpr.model.rewrite.sharded_layers import VocabularyHead
from lpr.model.sampling.choice import candidates, choose, four_to_a_word, log_probabilities
from lpr.model.sampling.parts import choose_among_parts, choose_in_part, may_be_in_parts
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row


class Sampler:
    """Samples the next tokens of a step; with a `part` of the head, vocab-parallel."""

    def __init__(self, part: VocabularyHead | None = None) -> None:
        self.part = part

    def in_parts(self, selection: Selection) -> bool:
        """True if `selection` is sampled vocab-parallel."""
        return self.part is not None and may_be_in_parts(selection)

    def results(self, logits: Tensor, selection: Selection, num_candidates: int, fixed_shapes: bool = False) -> Tensor:
        """Int32 [n, result_words(k)] of `logits` [n, V]: next token, k candidates, and their k scores, four a word.

        Then the words of `log_probabilities`, if requested. With `in_parts`, `logits` are this rank's part.
        """
        if self.in_parts(selection):
            assert self.part is not None
            mine = choose_in_part(logits, selection, self.part.first, num_candidates, fixed_shapes)
            chosen, *likely = choose_among_parts(self.part.gather(mine), selection, num_candidates)
        else:
            chosen = choose(logits, selection, fixed_shapes)
            likely = [*candidates(logits, num_candidates)] if num_candidates else []
        columns = [chosen[:, None], likely[0], four_to_a_word(likely[1])] if num_candidates else [chosen[:, None]]
        if selection.num_logprobs is not None:
            columns.append(log_probabilities(logits, columns[0][:, 0], selection.num_logprobs))
        return (columns[0] if len(columns) == 1 else torch.cat(columns, 1)).to(torch.int32)

    def check_part(self, adapter: Adapter) -> None:
        """Disable vocab-parallel sampling on all ranks if the head's part differs from that part of gathered logits."""
        if self.part is None:
            return
        found = []
        for in_parts in (False, True):
            cache = KVCache(1, 256)
            inputs = adapter.inputs([Row.chain(0, 0, [1, 2, 3], 3)], cache)
            inputs.in_parts = in_parts
            found.append(adapter.forward(inputs, cache).float())
        whole, mine = found
        there = whole[:, self.part.first : self.part.first + mine.shape[1]]
        same = mine.shape == there.shape and torch.allclose(mine, there, atol=1e-3 * float(whole.max() - whole.min()))
        words = torch.tensor([[int(same)]], dtype=torch.int32, device=mine.device)
        if not self.part.gather(words).all():
            self.part = None
