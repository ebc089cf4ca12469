"""lpr's trees inside SGLang, with a worker like SGLang's, and compared with SGLang's own sources where they are."""

from __future__ import annotations

import ast
import inspect
import os
import random
import sys
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lpr.native
import lpr.sglang.trees
from lpr.sglang import NAME, register
from lpr.sglang.trees import Trees
from lpr.sglang.worker import Corpus, worker_class
from tests.fakes.native_pair import PURE, native_core

WIDTH, VOCABULARY = 8, 50


class TheirWorker:
    """What of SGLang's NGRAMWorker the subclass relies on."""

    def __init__(self, server_args: Any = None, **_: Any) -> None:
        module = sys.modules["sglang.srt.speculative.ngram_worker"]
        self.ngram_corpus = module.NgramCorpus(capacity=1000, max_trie_depth=18)
        self.draft_token_num = WIDTH
        self.enable_overlap = bool(server_args)


class TheirAlgorithms(Enum):
    """SGLang's SpeculativeAlgorithm."""

    EAGLE = auto()
    NGRAM = auto()

    def is_ngram(self) -> bool:
        return self is TheirAlgorithms.NGRAM

    def is_eagle(self) -> bool:
        return self is TheirAlgorithms.EAGLE

    def has_draft_kv(self) -> bool:
        return not self.is_ngram()

    def create_worker(self, server_args: Any) -> type:
        return TheirWorker

    @classmethod
    def register(cls, name: str, *, supports_overlap: bool, spec_class: type) -> Any:
        def keep(factory: Any) -> Any:
            REGISTERED[name] = spec_class(factory)
            return factory

        return keep


class TheirCustomAlgorithm:
    """SGLang's CustomSpecAlgo."""

    def __init__(self, factory: Any) -> None:
        self.create_worker = factory

    def is_ngram(self) -> bool:
        return False


REGISTERED: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in the places of SGLang's."""
    spec = SimpleNamespace(
        speculative_num_draft_tokens=WIDTH, speculative_ngram_max_trie_depth=18, speculative_ngram_capacity=10_000
    )
    names = {
        "sglang.srt.runtime_context": {"get_spec": lambda: spec},
        "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": TheirWorker, "NgramCorpus": dict},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": TheirAlgorithms},
        "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": TheirCustomAlgorithm, "get_spec": REGISTERED.get},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative", *names):
        module = ModuleType(name)
        vars(module).update(names.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    package = sys.modules["sglang.srt.speculative"]
    monkeypatch.setattr(package, "ngram_worker", sys.modules["sglang.srt.speculative.ngram_worker"], raising=False)
    yield
    REGISTERED.clear()


def model(text: Sequence[int]) -> int:
    """The next token of a text, a function of it: mostly what followed the same token before."""
    random_ = random.Random(hash(tuple(text[-3:])))
    places = [at for at in range(len(text) - 1) if text[at] == text[-1]]
    return text[places[-1] + 1] if places and random_.random() < 0.8 else random_.randrange(VOCABULARY)


class Server:
    """Batches as SGLang's scheduler makes them; with `overlap` a step's tokens reach `output_ids` one step later."""

    def __init__(self, overlap: bool) -> None:
        self.worker = worker_class()(overlap)
        self.overlap = overlap
        self.running: list[Any] = []
        self.steps = self.emitted = 0

    def add(self, name: str, prompt: list[int], limit: int) -> None:
        self.running.append(
            SimpleNamespace(
                rid=name, origin_input_ids_unpadded=prompt, output_ids=[], late=[model(prompt)], limit=limit
            )
        )
        if not self.overlap:
            self.flush(self.running[-1])

    def flush(self, request: Any) -> None:
        request.output_ids += request.late
        request.late = []

    def step(self) -> None:
        rows = self.running
        late = torch.zeros(len(rows), WIDTH, dtype=torch.int32)
        for row, request in enumerate(rows):
            late[row, : len(request.late)] = torch.tensor(request.late, dtype=torch.int32)
        lengths = torch.tensor([len(request.late) for request in rows], dtype=torch.int32)
        info = SimpleNamespace(accept_tokens=late.flatten(), accept_lens=lengths)
        batch = SimpleNamespace(reqs=rows, spec_info=info, grammar_needs_sync=lambda: False)
        tokens, mask = self.worker._prepare_draft_tokens(batch)
        assert tokens.dtype == mask.dtype == np.int64
        self.worker._update_ngram_corpus(batch)
        tokens, mask = tokens.reshape(len(rows), WIDTH), mask.reshape(len(rows), WIDTH, WIDTH)
        for request, drafted, tree in zip(rows, tokens.tolist(), mask, strict=True):
            text = [*request.origin_input_ids_unpadded, *request.output_ids, *request.late]
            assert drafted[0] == text[-1], "the root is the last token"
            emitted = verify(text, drafted, tree)
            self.flush(request)
            request.late = emitted
            if not self.overlap:
                self.flush(request)
            self.steps, self.emitted = self.steps + 1, self.emitted + len(emitted)
        left = {each.rid for each in rows if len(each.output_ids) >= each.limit}
        self.running = [each for each in rows if each.rid not in left]
        self.worker.ngram_corpus.erase_match_state(sorted(left))


def verify(text: list[int], drafted: list[int], mask: np.ndarray) -> list[int]:
    """The tokens that a step emits, by the parents that SGLang reads off the mask."""
    parents = [-1]
    for node in range(1, len(drafted)):
        above = [other for other in range(node) if mask[node, other]]
        assert mask[node, node] == 1 and not mask[node, node + 1 :].any()
        assert above and (mask[node, : above[-1] + 1] == mask[above[-1], : above[-1] + 1]).all(), (
            "ancestors of ancestors"
        )
        parents.append(above[-1])
    at, emitted = 0, [model(text)]
    while True:
        children = [node for node in range(1, len(drafted)) if parents[node] == at and drafted[node] == emitted[-1]]
        if not children:
            return emitted
        at = children[0]
        emitted.append(model([*text, *emitted]))


def day(overlap: bool, seed: int = 0) -> tuple[Server, list[list[int]]]:
    """Requests that come and go; returns the server and each one's text."""
    random_, server = random.Random(seed), Server(overlap)
    requests = []
    for number in range(12):
        prompt = [random_.randrange(VOCABULARY) for _ in range(random_.randrange(1, 30))]
        server.add(f"r{number}", prompt, random_.randrange(5, 80))
        requests.append(server.running[-1])
        for _ in range(random_.randrange(6)):
            if server.running:
                server.step()
    while server.running:
        server.step()
    return server, [[*each.origin_input_ids_unpadded, *each.output_ids] for each in requests]


@pytest.mark.parametrize("overlap", [False, True])
def test_texts_are_those_of_plain_decoding_in_fewer_steps(overlap: bool) -> None:
    server, texts = day(overlap)
    for text in texts:
        assert all(model(text[:at]) == text[at] for at in range(30, len(text)))  # prompts are shorter
    assert server.emitted / server.steps > 1.6


def test_a_mutant_that_forgets_the_last_rounds_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Trees.draft

    def late(self: Trees, names: Any, prompts: Any, outputs: Any) -> Any:
        return draft(self, names, prompts, [each[:-1] for each in outputs])

    monkeypatch.setattr(Trees, "draft", late)
    with pytest.raises(AssertionError, match="the root is the last token"):
        day(overlap=True)


def test_both_cores_draft_the_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    if not lpr.native.is_native:
        pytest.skip("the extension was not built")
    records = []
    for core in (PURE, native_core()):
        for name in ("Chains", "ChainState", "SuffixIndex"):
            monkeypatch.setattr(lpr.sglang.trees, name, getattr(core, name))
        server, texts = day(overlap=False)
        records.append((server.steps, texts))
    assert records[0] == records[1]


@pytest.mark.parametrize("source", ["ended", "corpus", "none"])
def test_requests_draft_from_those_that_ended_and_from_a_corpus(source: str) -> None:
    trees, text = Trees(WIDTH, 18, 10_000), list(range(20, 40))
    if source == "ended":
        trees.draft(["a"], [[1]], [text])
        trees.end(["a"])
    elif source == "corpus":
        Corpus(trees).load_external_corpus_named("c", [text])
    tokens, _ = trees.draft(["b"], [[5]], [[20, 21, 22]])
    assert tokens[0] == 22 and ({23, 24, 25} <= {*tokens.tolist()}) == (source != "none")


def test_an_id_that_another_request_has_by_now_is_no_error() -> None:
    trees = Trees(WIDTH, 18, 10_000)
    trees.draft(["a"], [[1, 2, 3]], [[4, 5]])
    tokens, _ = trees.draft(["a"], [[9]], [[]])
    assert tokens[0] == 9


def test_a_corpus_is_listed_and_not_removed() -> None:
    corpus = Corpus(Trees(WIDTH, 18, 10_000))
    corpus.commit_external_corpus_load("c", corpus.load_external_corpus_named("c", [[1, 2], [3]]))
    assert corpus.list_external_corpora() == {"c": 3}
    with pytest.raises(ValueError, match="forget corpus 'c' alone"):
        corpus.remove_external_corpus("c")
    corpus.reset()
    assert corpus.list_external_corpora() == {}


def test_the_algorithm_answers_as_ngram_does() -> None:
    register()
    register()  # once in each process
    algorithm = REGISTERED[NAME]
    assert algorithm.is_ngram() and not algorithm.is_eagle() and not algorithm.has_draft_kv()
    assert issubclass(algorithm.create_worker(None), TheirWorker)


SOURCES = Path(os.environ.get("LPR_PEER_SOURCES", "/nonexistent")) / "sglang" / "srt"
needs_sources = pytest.mark.skipif(
    not SOURCES.is_dir(),
    reason="LPR_PEER_SOURCES names no folder with SGLang's sources (pip install --no-deps --target)",
)


def class_of(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((SOURCES / path).read_text())
    return next(each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name)


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in of.body if isinstance(each, ast.FunctionDef)}


@needs_sources
def test_sglangs_worker_has_what_the_subclass_replaces() -> None:
    worker = methods(class_of("speculative/ngram_worker.py", "NGRAMWorker"))
    for name in ("_prepare_draft_tokens", "_update_ngram_corpus"):
        assert [each.arg for each in worker[name].args.args] == ["self", "batch"]
    drafting = ast.unparse(worker["_prepare_draft_tokens"])
    for part in (
        "batch.spec_info.accept_tokens", "batch.spec_info.accept_lens", "req.rid", "req.origin_input_ids_unpadded",
        "req.output_ids", "self.enable_overlap and (not batch.grammar_needs_sync())",
        "i * stride + self.prev_accept_lens", "return (req_drafts, mask)",
    ):  # fmt: skip
        assert part in drafting, part
    # All that the worker asks of its corpus is answered.
    whole = ast.unparse(class_of("speculative/ngram_worker.py", "NGRAMWorker"))
    asked = {
        name
        for name in methods(class_of("speculative/cpp_ngram/ngram_corpus.py", "NgramCorpus"))
        if f"self.ngram_corpus.{name}(" in whole
    }
    replaced = {"batch_get", "batch_put", "synchronize"}  # called by the methods above alone
    assert asked - replaced <= {name for name, _ in inspect.getmembers(Corpus, inspect.isfunction)}
    assert "self.ngram_corpus = NgramCorpus(" in whole and "get_spec().speculative_ngram_capacity" in whole


@needs_sources
def test_sglangs_registry_takes_the_algorithm() -> None:
    registry = methods(class_of("speculative/spec_info.py", "SpeculativeAlgorithm"))["register"]
    assert {"supports_overlap", "spec_class"} <= {each.arg for each in registry.args.kwonlyargs}
    text = (SOURCES / "speculative" / "spec_registry.py").read_text()
    assert "def get_spec(name" in text and "class CustomSpecAlgo" in text
    assert '"sglang.srt.plugins"' in (SOURCES / "plugins" / "__init__.py").read_text()
