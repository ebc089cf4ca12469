"""The sampling kernel against its specification, id for id; without a GPU in Triton's interpreter (see conftest.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from difficult_logits import PARAMS, draws, peaked
from hypothesis import given, settings

from lpr.config import SamplingParams
from lpr.model.sampling import specification
from lpr.model.sampling.selection import Selection

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import sampling_code, sampling_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def both(logits: torch.Tensor, selection: Selection, block: int = 4096) -> tuple[list[int], list[int]]:
    logits, selection = logits.to(DEVICE), selection.to(DEVICE)
    kernel = sampling_kernel.choose(logits, selection, block)[0]
    return kernel.tolist(), specification.pick(logits, selection).tolist()


@settings(max_examples=60, deadline=None)
@given(draws((1, 2, 5, 63, 64, 65, 200, 4096, 8321)))
def test_the_same_ids_as_the_specification(drawn: tuple[torch.Tensor, Selection]) -> None:
    logits, selection = drawn
    if selection.sampled:
        found, expected = both(logits, selection)
        assert found == expected


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
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


# Seeded faults.


def many_ids(params: SamplingParams) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(10)
    logits = torch.cat([peaked(generator, 8, 500) * scale for scale in (1.0, 0.3)])
    levels = torch.randint(0, 4, (24, 60), generator=generator).float()  # many ties among few tokens
    logits = torch.cat([logits, torch.nn.functional.pad(levels, (0, 440), value=-torch.inf)])
    return both(logits, Selection.build([(params, range(len(logits)))]), 512)


NARROW = SamplingParams(temperature=1.0, top_p=0.4, seed=2)
FAULTS = {
    "ties by the highest id": ("(tokens < end_token)", "(tokens > end_token)", NARROW),
    "one token too many": ("before < top_p.to(tl.float64) * whole", "before <= (top_p + 0.05) * whole", NARROW),
    "k less one": ("count >= k", "count > k", SamplingParams(temperature=1.5, top_k=3)),
    "top-p of the whole": ("counted = held & (order >= kept)", "counted = held", PARAMS[3]),
    "min-p of the sum": ("weight >= min_p.to(tl.float64)", "weight >= 2 * min_p.to(tl.float64)", PARAMS[4]),
    "no temperature": ("scores + _gumbel(key, ", "scores * temperature + _gumbel(key, ", PARAMS[0]),
    "another hash": ("x >> 11", "x >> 12", PARAMS[0]),
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter reads the changed source")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new, params = FAULTS[name]
    found, expected = many_ids(params)
    assert found == expected
    source = Path(sampling_code.__file__).read_text()
    assert source.count(old) >= 1
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(sampling_kernel, "choose_rows", mutant.choose_rows)
    found, expected = many_ids(params)
    assert found != expected
