"""Exact attention as a Triton kernel, in Triton's interpreter: bits that do not depend on the tree, and its reference.

Without a GPU these tests say that the kernel's construction is right. The interpreter's products are NumPy's, whose
BLAS adds in another order by the place of a row on some processors, which a GPU's tensor cores do not; so they are
made without BLAS here. On a machine with a GPU the tests run the compiled kernel.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from lpr.model.tree_mask import Paths, TreeMask, build_mask, find_paths
from tests.fakes import attention_reference
from tests.fakes.pretend_kernels import products_by_row

if not find_spec("triton"):
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import exact_kernel

__all__ = ["products_by_row"]
# Triton's interpreter in NumPy 2, on every kernel.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("products_by_row"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "chunk": {"chunk": 48},
    "softcap": {"softcap": 20.0},
}


class World:
    """Keys, values and queries of tokens at positions: the same wherever a tree puts them."""

    def __init__(self, heads: tuple[int, int], dtype: torch.dtype, dim: int = 16) -> None:
        self.heads, self.dim, self.dtype = heads, dim, dtype

    def states(self, token: int, position: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * position + token)
        counts = (self.heads[0], self.heads[1], self.heads[1])
        return [torch.randn(count, self.dim, generator=generator).to(self.dtype) for count in counts]

    def attend(
        self,
        text: int,
        trees: list[tuple[list[int], list[int]]],
        padding: int = 0,
        spare: int = 5,
        specification: bool = False,
        page_size: int = 0,
        **rules: Any,
    ) -> torch.Tensor:
        """[B, Hq, T, D] of trees (tokens, parents) below a text of `text` tokens."""
        length = max(len(tokens) for tokens, _ in trees) + padding
        batch, rows = len(trees), text + length + spare
        query = torch.zeros(batch, self.heads[0], length, self.dim, dtype=self.dtype)
        key, value = (torch.full((batch, self.heads[1], rows, self.dim), torch.nan, dtype=self.dtype) for _ in range(2))
        positions = torch.zeros(batch, length, dtype=torch.int64)
        for row, (tokens, parents) in enumerate(trees):
            for at in range(text):
                _, key[row, :, at], value[row, :, at] = self.states(0, at)
            depths: list[int] = []
            for entry, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
                place = length - len(tokens) + entry
                positions[row, place] = text + depths[-1]
                states = self.states(token, text + depths[-1])
                query[row, :, place], key[row, :, text + entry], value[row, :, text + entry] = states
        parents_of = [np.array(parents, np.int32) for _, parents in trees]
        mask = build_mask(parents_of, [text] * batch, positions.to(DEVICE), DEVICE)
        parts = [each.to(DEVICE) for each in (query, key, value)]
        if page_size:
            key, value, rules["pages"] = attention_reference.in_pages(*parts[1:], page_size, seed=text)
            parts[1:] = key, value
        if specification:
            return attention_reference.exact_tree_attention(*parts, mask, **rules)
        return exact_kernel.tree_attention(*parts, mask, find_paths(mask), **rules)


def random_tree(count: int, seed: int, chain: int = 1) -> tuple[list[int], list[int]]:
    generator = random.Random(seed)
    parents = list(range(-1, chain - 1)) + [generator.randrange(max(0, at - 6), at) for at in range(chain, count)]
    return [generator.randrange(50) for _ in range(count)], parents


def path_of(tree: tuple[list[int], list[int]], entry: int) -> list[int]:
    path = []
    while entry >= 0:
        path.insert(0, tree[0][entry])
        entry = tree[1][entry]
    return path


def plainly(world: World, text: int, tokens: list[int], **rules: Any) -> torch.Tensor:
    """[Hq, D] of the last of `tokens` below the text, as a chain of which the others lie in the cache."""
    return world.attend(text, [(tokens, list(range(-1, len(tokens) - 1)))], **rules)[0, :, -1]


CASES = [(rule, torch.float32) for rule in RULES] + [("plain", torch.bfloat16), ("window", torch.float16)]


@pytest.mark.parametrize("rule, dtype", CASES, ids=str)
@pytest.mark.slow(first=2)
def test_an_entry_has_the_same_bits_in_every_tree(rule: str, dtype: torch.dtype) -> None:
    world, rules, text = World((3, 1), dtype), RULES[rule], 125
    tree = random_tree(10, seed=1)
    deepest = max(range(10), key=lambda entry: len(path_of(tree, entry)))
    assert len(path_of(tree, deepest)) > 3, "it has keys in three blocks"
    usual = world.attend(text, [tree], **rules)
    for entry in (0, deepest):
        alone = plainly(world, text, path_of(tree, entry), **rules)
        assert torch.equal(usual[0, :, entry], alone), "in a tree or in a chain"
    padded = world.attend(text, [random_tree(3, seed=2), tree], padding=3, spare=600, **rules)
    assert torch.equal(padded[1, :, -10:], usual[0]), "any batch, bucket and size of the cache"


def test_more_than_one_split_of_keys() -> None:
    world, tree = World((2, 1), torch.float32), random_tree(5, seed=3, chain=3)
    found = world.attend(510, [tree])
    assert torch.equal(found[0, :, 4], plainly(world, 510, path_of(tree, 4)))
    assert torch.equal(found, world.attend(510, [tree], spare=700)), "splits that nobody needs add nothing"
    torch.testing.assert_close(found, world.attend(510, [tree], specification=True), atol=2e-6, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_sums_are_those_of_the_reference(rule: str) -> None:
    """Only to the last bits: exp2 stands for exp, and NumPy's products have an order of their own within a block."""
    world, tree = World((4, 2), torch.float32), random_tree(6, seed=4)
    sinks = torch.linspace(-1, 1, 4, device=DEVICE)
    found = world.attend(100, [tree], sinks=sinks, **RULES[rule])
    expected = world.attend(100, [tree], sinks=sinks, specification=True, **RULES[rule])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def mask_of(parents: list[int], num_cached: int) -> TreeMask:
    positions = torch.zeros(1, len(parents), dtype=torch.int64)
    return build_mask([np.array(parents, np.int32)], [num_cached], positions, torch.device("cpu"))


def test_paths_and_what_is_shared() -> None:
    paths = find_paths(mask_of([-1, 0, 1, 1, 3], 10))
    assert paths.entries[0, 4, :4].tolist() == [0, 1, 3, 4]
    assert paths.num_shared.tolist() == [12], "entry 3 lies in row 13 and stands at position 12"
    assert find_paths(mask_of([-1, 0, 1], 10)).num_shared.item() > 1000, "a chain lies as it stands"


def order_of_cache_rows(patch: pytest.MonkeyPatch) -> None:
    usual = find_paths

    def mutant(mask: TreeMask) -> Paths:
        found = usual(mask)
        shared = torch.full_like(found.num_shared, 2**30)
        return Paths(found.entries, shared)

    patch.setitem(globals(), "find_paths", mutant)


def tiles_that_vary(patch: pytest.MonkeyPatch) -> None:
    def mutant(*args: Any, **options: Any) -> torch.Tensor:
        patch.setattr(exact_kernel, "SPLIT", 1 if args[0].shape[2] > 8 else 8)
        return usual(*args, **options)

    usual = exact_kernel.tree_attention
    patch.setattr(exact_kernel, "tree_attention", mutant)


@pytest.mark.parametrize("fault", [order_of_cache_rows, tiles_that_vary])
def test_faults_are_noticed(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_an_entry_has_the_same_bits_in_every_tree("plain", torch.float32)
