"""The sampling kernel against its specification, id for id; without a GPU in Triton's interpreter (see conftest.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers

from lpr.config import SamplingParams
from lpr.model.sampling import specification
from lpr.model.sampling.choice import ROWS_AT_ONCE, log_probabilities
from lpr.model.sampling.selection import Selection
from tests.fakes.difficult_logits import PARAMS, draws, peaked
from tests.fakes.largest import Largest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from triton.runtime.interpreter import InterpreterBuilder

from lpr.model.kernels import sampling_code, sampling_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def both(logits: torch.Tensor, selection: Selection, block: int = 4096) -> tuple[list[int], list[int]]:
    logits, selection = logits.to(DEVICE), selection.to(DEVICE)
    kernel = sampling_kernel.choose(logits, selection, block)[0]
    return kernel.tolist(), specification.pick(logits, selection).tolist()


@settings(max_examples=30, deadline=None)
@given(draws((1, 2, 5, 63, 64, 65, 200, 4096, 8321)))
def test_the_same_ids_as_the_specification(drawn: tuple[torch.Tensor, Selection]) -> None:
    logits, selection = drawn
    if selection.sampled:
        found, expected = both(logits, selection)
        assert found == expected


def test_totals_are_those_of_the_one_kernel() -> None:
    """Parts without limits are compared by them: those of other logarithms would fall otherwise in a near tie."""
    logits = peaked(torch.Generator().manual_seed(3), 16, 900)
    selection = Selection.build([(SamplingParams(), range(3)), (PARAMS[0], range(13))]).to(DEVICE)
    chosen, totals = sampling_kernel.choose(logits.to(DEVICE), selection)
    expected, theirs = specification.choose(logits.to(DEVICE), selection)
    assert chosen.tolist() == expected.tolist() and torch.allclose(totals, theirs, rtol=1e-5, atol=1e-5)
    logits[4, 7] = torch.nan
    assert sampling_kernel.choose(logits.to(DEVICE), selection)[1].isnan().tolist() == [row == 4 for row in range(16)]
    halves = [
        sampling_kernel.choose(logits[:, first : first + 450].to(DEVICE), selection.from_token(first))[1]
        for first in (0, 450)
    ]
    whole = sampling_kernel.choose(logits.to(DEVICE), selection)[1]
    assert torch.equal(torch.maximum(*halves).nan_to_num(), whole.nan_to_num())


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.slow(first=2)
def test_a_large_vocabulary_in_any_blocks(params: SamplingParams) -> None:
    logits = peaked(torch.Generator().manual_seed(7), 3, 128256)
    logits[2] *= 0.3
    selection = Selection.build([(params, [1, 2, 2])])
    found, expected = both(logits, selection, 1 << 17)
    assert found == expected
    assert found[1:] == both(logits[1:], selection.rows(torch.tensor([1, 2]).numpy()), 1 << 16)[0], (
        "alone, in other blocks"
    )


@pytest.mark.parametrize("params", PARAMS[:3], ids=range(3))
def test_a_part_of_a_vocabulary_has_the_noise_of_its_tokens(params: SamplingParams) -> None:
    logits = peaked(torch.Generator().manual_seed(5), 8, 3000)
    selection = Selection.build([(params, range(8))])
    found, expected = both(logits[:, 1100:], selection.from_token(1100), 1024)
    assert found == expected
    if selection.sampled:
        assert found != both(logits[:, 1100:], selection)[1], "it would be other tokens"


def test_views_and_half_precision() -> None:
    selection = Selection.build([(PARAMS[1], [3, 4])])
    for dtype in (torch.bfloat16, torch.float16):
        logits = peaked(torch.Generator().manual_seed(8), 2, 3000).to(dtype)
        wide = torch.zeros(2, 3100, dtype=dtype)
        wide[:, :3000] = logits
        assert both(wide[:, :3000], selection)[0] == both(logits, selection)[1]
        assert both(logits.T.contiguous().T, selection)[0] == both(logits, selection)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_top_k_is_found_by_digits(dtype: torch.dtype) -> None:
    """Of close, equal, negative and zero logits; a row is read once for each digit."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randn(300, generator=generator),
        torch.randn(300, generator=generator) * 1e-6 - 3.0,
        torch.randint(-2, 2, (300,), generator=generator).float() * 0.0,
        torch.randint(-40, 3, (300,), generator=generator).float(),
        torch.full((300,), -torch.inf).index_fill(0, torch.arange(0, 300, 7), -1e4),
    ]
    logits = torch.stack(rows).repeat(4, 1).to(dtype)
    params = [SamplingParams(temperature=7.0 / top_k**0.5, top_k=top_k, seed=5) for top_k in (1, 3, 60, 299)]
    found, expected = both(logits, Selection.build([(each, range(len(rows))) for each in params]), 256)
    assert found == expected


BISECTION = """    low = tl.full([], LEAST, tl.int64)
    high = tl.full([], 2147483648, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        count = 0
        for start in range(0, vocabulary, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            held = tokens < vocabulary
            count += tl.sum((held & (_ordered(_scores(row_at, tokens, held, temperature)) >= middle)).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
    return low


"""
"""The k-th largest score by one bit with each pass over a row, as it was before radix selection."""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter counts loads")
@pytest.mark.parametrize("dtype, passes", [(torch.bfloat16, 4), (torch.float16, 5), (torch.float32, 6)])
@pytest.mark.parametrize("bisects", [False, True])
def test_a_top_k_takes_few_passes(
    dtype: torch.dtype, passes: int, bisects: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One for the largest, DIGITS for the k-th, one for the choice; by bisection, the defect, 34."""
    if bisects:
        source = Path(sampling_code.__file__).read_text()
        begin = source.index("    bins = tl.arange(0, 256)")
        end = source.index("@triton.jit\ndef _largest")
        mutant = _imported(source[:begin] + BISECTION + source[end:], tmp_path)
        monkeypatch.setattr(sampling_kernel, "choose_rows", mutant.choose_rows)
    vocabulary, loads = 1000, []
    load = InterpreterBuilder.create_masked_load

    def counted(self: InterpreterBuilder, pointers: Any, *rest: Any) -> Any:
        loads.append(pointers.data.size)
        return load(self, pointers, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    logits = peaked(torch.Generator().manual_seed(4), 1, vocabulary).to(dtype)
    found, expected = both(logits, Selection.build([(SamplingParams(temperature=1.0, top_k=50, seed=3), [0])]), 1024)
    assert found == expected
    assert loads.count(1024) == (34 if bisects else passes)


@settings(max_examples=15, deadline=None)
@given(draws((1, 2, 5, 64, 65, 200)), integers(1, 9))
def test_the_likeliest_tokens(drawn: tuple[torch.Tensor, Selection], count: int) -> None:
    logits = drawn[0][~drawn[0].isnan().any(1)].to(DEVICE)
    if not len(logits):
        return
    best, tokens, totals = sampling_kernel.likeliest(logits, count, 64)
    expected = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best, expected.values[:, :count]) and torch.equal(tokens, expected.indices[:, :count])
    assert torch.allclose(totals, logits.float().logsumexp(-1), atol=1e-5, equal_nan=True)


def test_the_likeliest_tokens_of_a_large_vocabulary_need_no_copy_of_it() -> None:
    """Float32 copies of 8 x 192 rows of 128k would take 800 MB each."""
    wide = torch.zeros(2, 130000, dtype=torch.bfloat16)
    logits = wide[:, :128256].copy_(peaked(torch.Generator().manual_seed(6), 2, 128256))
    there = wide.to(DEVICE)[:, :128256]
    with Largest() as largest:
        best, tokens, totals = sampling_kernel.likeliest(there, 8)
    assert largest.size <= wide.nbytes // 32
    assert torch.equal(best.cpu(), logits.float().topk(8).values)
    assert torch.equal(logits.float().gather(1, tokens.cpu()), best.cpu())
    assert torch.allclose(totals.cpu(), logits.float().logsumexp(-1), atol=1e-4)
    with Largest() as largest:
        specification.choose(logits, Selection.build([]))
        log_probabilities(logits.repeat(45, 1), torch.zeros(90, dtype=torch.long), 2)
    assert largest.size <= ROWS_AT_ONCE * 128256 * 4


def test_weights_of_logits_that_are_no_numbers() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[1.0, inf, 2.0], [-inf] * 3, [nan, 1.0, 2.0], [-200.0, -300.0, -inf], [200.0, -300.0, -inf]]
    logits = torch.nn.functional.pad(torch.tensor(rows), (0, 60), value=-inf).to(DEVICE)
    found = sampling_kernel.likeliest(logits, 2, 16)[2]
    assert torch.allclose(found, logits.logsumexp(-1), equal_nan=True)


# Seeded faults.


def _imported(source: str, folder: Path) -> Any:
    """The changed code as a module."""
    path = folder / "mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


def many_ids(params: SamplingParams) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(10)
    logits = torch.cat([peaked(generator, 8, 500) * scale for scale in (1.0, 0.3)])
    levels = torch.randint(0, 4, (12, 60), generator=generator).float()  # many ties among few tokens
    logits = torch.cat([logits, torch.nn.functional.pad(levels, (0, 440), value=-torch.inf)])
    return both(logits, Selection.build([(params, range(len(logits)))]), 512)


NARROW = SamplingParams(temperature=1.0, top_p=0.4, seed=2)
FAULTS = {
    "ties by the highest id": ("(tokens < end_token)", "(tokens > end_token)", NARROW),
    "one token too many": ("before < top_p.to(tl.float64) * whole", "before <= (top_p + 0.05) * whole", NARROW),
    "k less one": ("(above >= k)", "(above > k)", SamplingParams(temperature=1.5, top_k=3)),
    "top-p of the whole": ("counted = held & (order >= kept)", "counted = held", PARAMS[3]),
    "min-p of the sum": ("weight >= min_p.to(tl.float64)", "weight >= 2 * min_p.to(tl.float64)", PARAMS[4]),
    "no temperature": ("scores + _gumbel(key, ", "scores * temperature + _gumbel(key, ", PARAMS[0]),
    "another hash": ("x >> 11", "x >> 12", PARAMS[0]),
}


def test_there_are_no_faults_yet() -> None:
    for params in {id(each[2]): each[2] for each in FAULTS.values()}.values():
        found, expected = many_ids(params)
        assert found == expected


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter reads the changed source")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new, params = FAULTS[name]
    source = Path(sampling_code.__file__).read_text()
    assert source.count(old) >= 1
    mutant = _imported(source.replace(old, new), tmp_path)
    monkeypatch.setattr(sampling_kernel, "choose_rows", mutant.choose_rows)
    found, expected = many_ids(params)
    assert found != expected
