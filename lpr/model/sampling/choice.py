"""Sampling of next tokens: a deterministic function of (logits, seed, position), for greedy and sampled requests.

Sampling is the Gumbel-max trick with noise keyed by (request seed, absolute position, token id): `argmax(logits /
temperature + gumbel)` samples softmax(logits / temperature) exactly. There is no random state (docs/rules.md, R4).
`specification.pick` defines the choice; `in_cpp.draw` and `kernels.sampling_kernel.choose` compute the same faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from lpr import native
from lpr.config import SamplingParams
from lpr.core.recycle import MAX_SCORE, SCORE_STEPS
from lpr.model.kernels import working
from lpr.model.sampling import in_cpp, specification
from lpr.model.sampling.selection import Selection
from lpr.model.sampling.specification import gumbel


def choose(logits: Tensor, selection: Selection, fixed_shapes: bool = False) -> Tensor:
    """The next token [n] int64 of every row of `logits` [n, V], or a code below 0 (see lpr.core.accept).

    `fixed_shapes` uses only operators whose shapes depend on no value, which a graph can hold.
    """
    chosen = pick(logits, selection, fixed_shapes)
    for path in selection.processor_paths:
        path.follow(logits, chosen, lambda scores, rows: pick(scores, selection.rows(rows), fixed_shapes))
    return chosen


def pick(logits: Tensor, selection: Selection, fixed_shapes: bool = False) -> Tensor:
    """The argmax [n] int64 of logits [n, V] after temperature, limits and noise; NOT_A_NUMBER if there is none."""
    on_cpu = logits.device.type == "cpu" and not fixed_shapes
    if on_cpu and not selection.sampled:
        return in_cpp.best_tokens(logits)
    if on_cpu and native.choose_rows is not None:
        return in_cpp.draw(logits, selection)
    return pick_with_totals(logits, selection, fixed_shapes)[0]


def pick_with_totals(logits: Tensor, selection: Selection, fixed_shapes: bool = False) -> tuple[Tensor, Tensor]:
    """As `pick`, and the totals [n] of score and noise of the chosen tokens, NaN if there is no choice."""
    if logits.is_cuda and selection.sampled:
        return gpu_pick(logits.device)(logits, selection)
    if fixed_shapes or not selection.sampled or native.choose_rows is None or logits.device.type != "cpu":
        return specification.choose(logits, selection)
    chosen, warm = in_cpp.draw(logits, selection), selection.temperature > 0
    place = chosen.clamp_min(0)
    scores = logits.gather(1, place[:, None])[:, 0].float() / torch.where(warm, selection.temperature, 1.0)
    noise = gumbel(selection.keys[selection.key_of], place + selection.first_token)
    return chosen, torch.where(chosen < 0, torch.nan, torch.where(warm, scores + noise, scores))


@lru_cache
def gpu_pick(device: torch.device) -> Pick:
    """The function that samples on a GPU, with totals: the kernel, if it works here, else the specification.

    The first call compiles and tests the kernel, which is impossible during a graph capture: the self-check makes it.
    """
    warning = "the sampling kernel does not work here, sampling is slower"
    return working("sampling_kernel.choose", partial(check_pick, device=device), specification.choose, warning)


Pick = Callable[[Tensor, Selection], tuple[Tensor, Tensor]]
Find = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
MOST_LIKELY = 32  # most top tokens for which the kernel is used: it scans a block once for each
TRIED = ((64, 1000), (6, 32_000), (2, 152_064))
"""(Rows, vocabulary size) with which a kernel is tested: one block, and many."""
ROWS_AT_ONCE = 64  # rows whose log-probabilities are computed together, which bounds the memory of their float32 copies


def tried_logits(sizes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Logits [rows, vocabulary] to test a kernel: with few distinct values, so that its blocks have ties.

    Every other row has the largest of them many times.
    """
    for size in sizes:
        logits = torch.randn(size, generator=torch.Generator().manual_seed(3)).mul(16).round().div(4)
        logits[::2].clamp_(max=10)
        yield logits


def check_pick(choose: Pick, device: torch.device) -> None:
    """Raise RuntimeError unless `choose` gives the specification's tokens. The first row of each size is greedy."""
    limited = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)
    for logits, params in product(tried_logits(TRIED), (SamplingParams(temperature=0.8), limited)):
        logits = logits.to(device)
        selection = Selection.build([(SamplingParams(), [0]), (params, range(1, len(logits)))], device)
        if not torch.equal(choose(logits, selection)[0], specification.pick(logits, selection)):
            raise RuntimeError(f"other tokens of {logits.shape[1]} were chosen with {params}")


def log_probabilities(logits: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Log-probabilities, per row of unprocessed `logits` [n, V], of the `chosen` [n] token and the `count` likeliest.

    Returns int32 [n, 1 + 2 count]: the bits of the chosen token's float32 log-probability, ids, and the bits of their
    log-probabilities. Float32 copies are made of ROWS_AT_ONCE rows at a time.
    """
    pieces = []
    for rows, tokens in zip(logits.split(ROWS_AT_ONCE), chosen.split(ROWS_AT_ONCE), strict=True):
        top, likely, total = specification.likeliest(rows, count)
        mine = rows.gather(1, tokens.clamp_min(0)[:, None]).float() - total[:, None]
        parts = mine, likely.to(torch.int32), (top - total[:, None]).contiguous()
        pieces.append(torch.cat([each.view(torch.int32) for each in parts], 1))
    return torch.cat(pieces)


def candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely next tokens [n, k] of every row and their scores [n, k] uint8 (see SCORE_STEPS)."""
    if logits.device.type == "cpu" and native.rank_rows is not None:
        return in_cpp.candidates(logits, k)
    top, tokens, total = likeliest(logits, k)
    return tokens, score_steps(top - total[:, None])


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    find = gpu_likeliest(logits.device) if logits.is_cuda and count <= MOST_LIKELY else specification.likeliest
    return find(logits, count)


@lru_cache
def gpu_likeliest(device: torch.device) -> Find:
    """The function that finds likely tokens on a GPU, as `gpu_pick`: the kernel, if it works here."""

    def check(find: Find) -> None:
        for logits in tried_logits(TRIED):
            logits = logits.to(device)
            first = logits.sort(dim=-1, descending=True, stable=True).indices[:, :8]
            expected, found = specification.likeliest(logits, 8), find(logits, 8)
            are_close = [torch.allclose(found[each], expected[each], atol=1e-4) for each in (0, 2)]
            if not all(are_close) or not torch.equal(found[1], first):
                raise RuntimeError(f"other tokens of {logits.shape[1]} were found")

    warning = "the kernel of likely tokens does not work here, drafts take longer"
    return working("sampling_kernel.likeliest", check, specification.likeliest, warning)


def has_kernels(device: torch.device) -> bool:
    """True if no choice on a GPU copies all logits."""
    return gpu_pick(device) is not specification.choose and gpu_likeliest(device) is not specification.likeliest


def score_steps(log_probs: Tensor) -> Tensor:
    """Log-probabilities as uint8 scores (see SCORE_STEPS)."""
    steps = (log_probs * -SCORE_STEPS).round().nan_to_num(nan=MAX_SCORE)
    return steps.clamp(0, MAX_SCORE).to(torch.uint8)


def four_to_a_word(scores: Tensor) -> Tensor:
    """Bytes [n, k] packed as int32 [n, ceil(k / 4)], the format of the payload."""
    missing = -scores.shape[1] % 4
    return (torch.nn.functional.pad(scores, (0, missing)) if missing else scores).view(torch.int32)
