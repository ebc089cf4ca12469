"""What holds for every test: its environment, trees that are verified, and what may be skipped."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

# Tiny matrices gain nothing from a second thread, and ranks that are threads or processes would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of the tests that take two spin while they wait, on cores that another test has: 20 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without bytecode each of some hundred processes that tests start compiles lpr, and each worker all tests, anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Step times that an engine measures are kept for its next start; tests start without those of earlier runs.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lpr-tests-")
# Without a GPU, Triton kernels run in Triton's interpreter. It must be chosen before anything imports triton, so torch
# cannot be asked whether there is a GPU.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import psutil
import pytest
from httpx._transports import default as httpx_transport
from hypothesis import settings
from transformers import PretrainedConfig, PreTrainedModel

import lpr.engine.step
from lpr.core.budget import Draft, DraftRequest
from lpr.core.state import SequenceState
from lpr.core.tree import TokenTree
from lpr.engine import sizing
from lpr.model.runner import TreeModel
from lpr.planner import facts
from lpr.serve import sandbox
from tests.fakes import quick_start
from tests.fakes.known_checks import check_once  # noqa: F401 (a fixture)
from tests.fakes.models import tiny_model
from tests.fakes.quick_interpreter import patch_interpreter

sys.dont_write_bytecode = False
quick_start.patch()
# Behind the workers of a full machine a sandbox would do nothing for seconds.
sandbox.NICE = 0
MEASURING = {name: getattr(sizing, name) for name in ("ENOUGH", "PATIENCE", "LONGER", "AGREE", "time_forward")}
"""How an engine measures step times at its start, elsewhere; a test that needs true ones sets these."""


def told_time(model: TreeModel, batch: int, count: int, kv: int) -> float:
    """Seconds of a forward of a tiny model, as they are on a quiet machine: measured, each run had other trees.

    Forwards that capture graphs or compile kernels run.
    """
    if model.graphs is not None or model.device.type != "cpu":
        return MEASURING["time_forward"](model, batch, count, kv)
    return 2e-3 + 4e-5 * count + 1e-7 * batch * kv


sizing.time_forward = told_time
for each in ("ENOUGH", "PATIENCE", "LONGER", "AGREE"):  # which do not agree are not kept: no test starts with another's
    setattr(sizing, each, 0.0)


CONTEXT_OF = httpx_transport.create_ssl_context


@cache
def shared_context(trust_env: bool) -> ssl.SSLContext:
    return CONTEXT_OF(trust_env=trust_env)


def context_of(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """httpx's TLS context, made once for clients that ask for nothing special.

    Each `httpx.get` made one and read all authorities for it: a quarter of the processor time of the service's tests.
    """
    return shared_context(trust_env) if verify is True and cert is None else CONTEXT_OF(verify, cert, trust_env)


httpx_transport.create_ssl_context = context_of
FACTS_OF, KNOWN = facts.facts_of, dict[tuple[type, str], facts.ModelFacts]()


def known_facts(config: PretrainedConfig, name: str) -> facts.ModelFacts:
    """The planner's facts of a model, made once: those of 70B take a second, and many tests ask for a preset's."""
    key = type(config), json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in KNOWN:
        KNOWN[key] = FACTS_OF(config, name)
    return replace(KNOWN[key], name=name)


facts.facts_of = known_facts


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    patch_interpreter()


@atexit.register
def hide_leaks_of_triton() -> None:
    """Drop what extensions write to stderr after all exit functions, of which this one is the last.

    Triton's extension reports hundreds of its own types and functions as leaked there, and has no switch for it.
    """
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if os.environ.get("LPR_NO_SKIPS") == "1":
    settings.load_profile("ci")  # the same examples in every run; a run by hand draws new ones

MAY_SKIP = (
    "torchao",
    "bitsandbytes",
    "compressed-tensors",
    "litellm",
    "GPU",
    "vLLM",
    "LPR_LLAMA_VIM",
    "transformers 5",
    "the table is of transformers",
    "only root can become another user",
    "this machine allows",  # so many open files
)
"""Parts of the reasons for which CI may skip a test: what no registry has, what this machine is not, and packages that
replace others of ours by older ones (LiteLLM does)."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With LPR_NO_SKIPS=1 (CI), a test that was skipped for want of a program or a package is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("LPR_NO_SKIPS") != "1" or reporter is None or hasattr(session.config, "workerinput"):
        return
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", []) if report.longrepr}
    missing = sorted(reason for reason in reasons if not any(part in reason for part in MAY_SKIP))
    for reason in missing:
        print(f"\nskipped in CI, where nothing may be: {reason}")
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the cases that `pytest` leaves out, and tests/slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests/slow without --slow, unless it or a part of it is asked for."""
    is_asked = config.getoption("--slow") or any("slow" in Path(each.partition("::")[0]).parts for each in config.args)
    return True if collection_path.name == "slow" and not is_asked else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases marked slow, or with --slow all others; tests/slow runs whole, as does what is asked for by name
    or has failed.

    Long tests, which have a time-out of their own, begin first: one of them would keep a worker while the others wait.
    """
    if any("::" in each for each in config.args) or config.getoption("lf"):
        return
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    slow_only, seen = config.getoption("--slow"), Counter[str]()
    chosen, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        mark, test = item.get_closest_marker("slow"), item.nodeid.partition("[")[0]
        seen[test] += 1
        is_slow = mark is not None and seen[test] > mark.kwargs.get("first", 0)
        runs = test.startswith("tests/slow/") or is_slow == slow_only
        (chosen if runs else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than the machine has cores: many tests wait for processes."""
    return (os.cpu_count() or 1) + 1


CHECKED_ONCE = (
    "benchmarks", "cli", "dist", "drop_in", "engine", "fleet", "planner", "sched", "serve",
    "model/heads/test_gpu", "model/lora", "model/low_bit", "model/sampling",
    "model/test_fp8_cache", "model/test_graphs", "model/test_pass_graphs", "model/test_watch",
    "slow/test_budget", "slow/test_draft_ranks", "slow/test_exchange", "slow/test_fuzz", "slow/test_graphs",
    "slow/test_hostile", "slow/test_logprobs", "slow/test_lookahead", "slow/test_lossless", "slow/test_modes",
    "slow/test_prediction", "slow/test_reserve", "slow/test_resume", "slow/test_tools",
)  # fmt: skip
"""Beginnings of the names, behind tests/, of tests that are not about the check at load."""
RESIDENT = [0]
"""Bytes of this process when its memory was last given back."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """After a test, memory that nobody uses goes back to the machine once it is much: a worker grew to 11 GB.

    Python's collector counts objects, and a few of them hold a K/V cache; the C library keeps what was freed.
    """
    result = yield
    resident = psutil.Process().memory_info().rss
    if resident > RESIDENT[0] + (500 << 20):
        gc.collect()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
        RESIDENT[0] = psutil.Process().memory_info().rss
    return result


@pytest.fixture(autouse=True)
def verified_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tree that any test drafts holds the specification of a token tree."""
    build = SequenceState.build

    def verified(self: SequenceState, max_depth: int, request: DraftRequest) -> Draft:
        draft = build(self, max_depth, request)
        draft.tree.verify()
        assert max(draft.tree.depths) <= max(0, max_depth)
        return draft

    monkeypatch.setattr(SequenceState, "build", verified)
    truncate = TokenTree.truncate

    def verified_cut(self: TokenTree, count: int) -> None:
        truncate(self, count)
        self.verify()
        assert len(self) <= count

    monkeypatch.setattr(TokenTree, "truncate", verified_cut)
    draft_step = lpr.engine.step.draft_step

    def verified_step(*args: Any) -> Any:
        draft = draft_step(*args)
        for index in draft.mine:
            as_specified(draft.trees[index]).verify()
        return draft

    monkeypatch.setattr(lpr.engine.step, "draft_step", verified_step)


@pytest.fixture(autouse=True)
def checks_at_load(request: pytest.FixtureRequest) -> None:
    """Where tests are not about the check at load, it is made once for each kind of model."""
    if request.node.nodeid.removeprefix("tests/").startswith(CHECKED_ONCE):
        request.getfixturevalue("check_once")


def as_specified(tree: Any) -> TokenTree:
    """A tree of either core as one of the specification, which can verify it."""
    copy = TokenTree(tree.tokens[0])
    for node in range(1, len(tree)):
        assert copy.add(tree.parents[node], tree.tokens[node], tree.sources[node]) == node, "two equal nodes"
    assert copy.depths == list(tree.depths)
    return copy


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """One tiny Llama for tests that do not change it."""
    return tiny_model()


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """As `llama`, with logits closer to each other: drafts are accepted and rejected."""
    return tiny_model(spread=0.12)
