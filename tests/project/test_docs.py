"""The documentation agrees with the code: it builds, links resolve, commands parse, names exist, blocks of code run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import sys
import warnings
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser  # noqa: TID251 - torchrun's flags, no process group

import lpr
from dev.step_picture import PICTURE, TRACE, picture, read_trace
from lpr.cli.generate import parse
from lpr.cli.jsonl import read_prompts
from lpr.cli.trace import PLACEHOLDER
from tests.fakes.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SITE = ("mkdocs", "material", "mkdocstrings")
NOT_FLAGS_OF_OURS = {
    "--gpus-per-node", "--nodes", "--array",
    "--tls-port", "--tls-cert-file", "--tls-key-file", "--tls-auth-clients",
    "--platform", "--push", "--update-aliases",
    "--speculative-config", "--additional-config", "--async-scheduling",
    "--model-path", "--speculative-algorithm", "--speculative-num-draft-tokens", "--speculative-ngram-max-trie-depth",
    "--speculative-ngram-capacity", "--speculative-ngram-external-corpus-path",
    "--slow",
}  # fmt: skip
"""Flags of sbatch, valkey-server, cibuildwheel, mike, vLLM and SGLang, which no test installs, and of our tests."""
OTHER_PATHS = {"/models", "/cache", "/dev/shm"}
"""Absolute paths of the container image, which look like routes of the service."""
FOLDERS = ("benchmarks", "configs", "dev", "docs", "launch", "lpr", "tests", ".ci")

named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code_of(text: str) -> list[str]:
    """The lines of code blocks, continued ones joined, and the code spans, of a page."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", rest)]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + spans


def blocks_of(page: Path, language: str) -> list[str]:
    """The code blocks of a page that are marked as `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands_of(text: str) -> list[tuple[str, list[str], list[str]]]:
    """The commands of a page as (module, flags of torchrun, the module's arguments)."""
    found = []
    for line in code_of(text):
        for part in line.split("&&"):
            match = re.search(r"(?:^|\s)(python|torchrun)\s(.*?)-m (\S+)(.*)", part)
            if match:
                launcher, before, module, after = match.groups()
                words = shlex.split(after.split(" #")[0])
                found.append((module, before.split() if launcher == "torchrun" else [], words))
    return found


@cache
def help_of(module: str) -> str:
    """What a module of ours, or a launcher, prints for --help."""
    text: list[str] = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        warnings.simplefilter("ignore")  # runpy warns of modules that are imported already
        patch.setattr(sys, "argv", [module, "--help"])
        patch.setattr(sys.stdout, "write", lambda part: text.append(part) or len(part))
        patch.setenv("COLUMNS", "200")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(text))


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@cache
def quoted_flags(module: str) -> set[str]:
    """Flags that a benchmark looks for itself, before its parser does."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not module.startswith("benchmarks"):
        return set()
    return set(re.findall(r'"(--[a-z][a-z-]*)" in', Path(found.origin).read_text(encoding="utf-8")))


@cache
def torchrun_flags() -> set[str]:
    names = {name for action in get_args_parser()._actions for name in action.option_strings}
    return names | {name.replace("-", "_").replace("__", "--", 1) for name in names}


def unknown_flags(text: str) -> set[str]:
    """Flags of a page's commands that the command does not take, and flags in its prose that nobody takes."""
    unknown: set[str] = set()
    everywhere = torchrun_flags() | NOT_FLAGS_OF_OURS
    for module, launched_with, words in commands_of(text):
        if module.startswith(("lpr", "benchmarks")):
            known = flags_in(help_of(module)) | quoted_flags(module)
            everywhere |= known
            unknown |= {f"{module} {flag}" for flag in flags_in(" ".join(words)) - known}
        unknown |= {f"torchrun {flag}" for flag in flags_in(" ".join(launched_with)) - torchrun_flags()}
    for module in ("lpr.generate", "lpr.plan", "lpr.serve", "lpr.corpus", "benchmarks.replay"):
        everywhere |= flags_in(help_of(module))
    commands = re.compile(r"\b(python|torchrun|pip|mkdocs|sbatch|docker|kubectl|serve run)\s")
    prose = " ".join(code for code in code_of(text) if not commands.search(code) and not code.startswith("launch/"))
    return unknown | (flags_in(prose) - everywhere)


def missing_names(text: str) -> set[str]:
    """Modules, attributes and files that a page's code names and that are not there."""
    missing = {module for module, _, _ in commands_of(text) if importlib.util.find_spec(module) is None}
    for code in code_of(text):
        for name in re.findall(r"(?<![\w/.-])(?:lpr|benchmarks|dev)(?:\.[A-Za-z]\w*)+", code):
            if not exists(name) and f'"{name}"' not in source_of("lpr"):  # the type of an event
                missing.add(name)
        for name in re.findall(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*", code):
            if not (ROOT / name.rstrip(".")).exists():
                missing.add(name)
        is_model = code in ("config.json", "adapter_config.json")
        if re.fullmatch(r"\w+\.json", code) and not is_model and not (ROOT / "benchmarks" / "results" / code).exists():
            missing.add(code)
        missing |= {name for name in re.findall(r"\b(?:lpr|vllm):[a-z_]+", code) if not is_metric(name)}
        if route := re.fullmatch(r"(?:GET |POST |DELETE )?(/[a-z][\w./]*)", code):
            missing |= {route[1]} - routes() - OTHER_PATHS
        missing |= unknown_members(code)
    return missing


@cache
def source_of(*folders: str) -> str:
    return "\n".join(path.read_text("utf-8") for each in folders for path in sorted((ROOT / each).rglob("*.py")))


def is_metric(name: str) -> bool:
    """True if the service exports the metric. Counters get their `_total` from the client library."""
    return re.search(rf'"{name.removesuffix("_total")}(?:_total)?"', source_of("lpr")) is not None


@cache
def routes() -> set[str]:
    """The service's paths, with ID for a request's id."""
    found = re.findall(r'@\w+\.(?:get|post|delete)\("([^"]+)"', source_of("lpr/serve/api"))
    return {re.sub(r"\{.*?\}", "ID", path) for path in found}


def unknown_members(code: str) -> set[str]:
    """Members of lpr's classes, and keywords of its settings, that code names and that do not exist."""
    unknown = {
        f"engine.{name}" for name in re.findall(r"(?<![\w/.])engine\.([a-z]\w*)\b(?!\.)", code) if not in_engine(name)
    }
    for cls, arguments in re.findall(r"\b(SamplingParams|DecodeConfig|EngineOptions)\(([^()]*)\)", code):
        known = {field.name for field in dataclasses.fields(getattr(lpr, cls))}
        unknown |= {f"{cls}({name}=)" for name in set(re.findall(r"(\w+)=", arguments)) - known}
    if member := re.fullmatch(r"([A-Z]\w+)\.(\w+)(?:\(.*\))?", code):
        cls, name = member.groups()
        bodies = re.findall(rf"^class {cls}\b.*?(?=^\S)", source_of("lpr") + "\nend", re.DOTALL | re.MULTILINE)
        in_body = re.compile(rf"\b(?:def {name}\b|{name}\b *[:=])")
        if not hasattr(getattr(lpr, cls, None), name) and not any(in_body.search(body) for body in bodies):
            unknown.add(code)
    return unknown


def in_engine(name: str) -> bool:
    return hasattr(lpr.Engine, name) or f"self.{name} " in inspect.getsource(lpr.Engine)


def exists(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is None:
                continue
            value: Any = importlib.import_module(module)
            for part in parts[end:]:
                if not hasattr(value, part):
                    return False
                value = getattr(value, part)
            return True
    return False


def broken_links(page: Path, text: str) -> set[str]:
    links = re.findall(r"\]\(([^)\s]+)\)|\bsrc=\"([^\"]+)\"", text)
    targets = {(first or second).split("#")[0] for first, second in links}
    return {each for each in targets if each and "://" not in each and not (page.parent / each).exists()}


@named
def test_links(page: Path) -> None:
    assert not broken_links(page, page.read_text(encoding="utf-8"))


@named
def test_flags(page: Path) -> None:
    assert not unknown_flags(page.read_text(encoding="utf-8"))


@named
def test_names(page: Path) -> None:
    assert not missing_names(page.read_text(encoding="utf-8"))


@named
def test_commands_parse(page: Path) -> None:
    """Values too: lpr.generate's own parser takes each of its commands."""
    for module, _, words in commands_of(page.read_text(encoding="utf-8")):
        if module == "lpr.generate" and "--help" not in words:
            parse(words, quiet=True)


def test_faults_are_found(tmp_path: Path) -> None:
    """The checks above see what they are there for."""
    page = tmp_path / "page.md"
    wrong = "Use `--no-such` with [this](gone.md).\n"
    wrong += "```\ntorchrun --nproc=2 -m lpr.generate --tp 2 \\\n    --widow-size 3\n```\n"
    wrong += (
        "`python -m benchmarks.gone`, `lpr.Engin`, `lpr/core/gone.py`, `gone.json`, `lpr.config.DecodeConfig.gone`, "
    )
    wrong += "`lpr:gone_total`, `/v1/gone`, `engine.gone()`, `SamplingParams(top_k=1, gone=2)`, `TokenTree.gone`"
    assert broken_links(page, wrong) == {"gone.md"}
    right = wrong.replace("`python -m benchmarks.gone`, ", "")
    assert unknown_flags(right) == {"--no-such", "torchrun --nproc", "lpr.generate --widow-size"}
    assert missing_names(wrong) == {
        *("benchmarks.gone", "lpr.Engin", "lpr/core/gone.py", "gone.json", "lpr.config.DecodeConfig.gone"),
        *("lpr:gone_total", "/v1/gone", "engine.gone", "SamplingParams(gone=)", "TokenTree.gone"),
    }


NEEDY = ("serving.md", "adapters.md")
"""Their blocks need services, and adapters: tests/fleet/test_resume.py, tests/slow/test_docs.py."""
PROGRAMS = [page for page in PAGES if blocks_of(page, "python") and page.name not in NEEDY]
"""Pages whose blocks print something."""


def test_lines_of_prompts_are_read(tmp_path: Path) -> None:
    """With every field that the page's line has."""
    (line,) = blocks_of(DOCS / "command.md", "json")
    (tmp_path / "in.jsonl").write_text(line, encoding="utf-8")
    (read,) = read_prompts(tmp_path / "in.jsonl")
    assert read.error is None and set(read.sampling) == set(json.loads(line)) - {"prompt"}


def test_rules_that_are_cited_stand_there() -> None:
    rules = set(re.findall(r"^### (R\d):", (DOCS / "rules.md").read_text(encoding="utf-8"), re.MULTILINE))
    cited = {rule for path in (ROOT / "lpr").rglob("*.py") for rule in re.findall(r"\bR\d\b", path.read_text("utf-8"))}
    assert cited and cited <= rules


def test_rooms_are_shown() -> None:
    """Every package of lpr is in the picture, in the page that explains it, and in the layout table."""
    rooms = {path.parent.name for path in (ROOT / "lpr").glob("*/__init__.py")}
    assert {"core", "engine", "model"} <= rooms
    for path in (DOCS / "images" / "architecture.svg", DOCS / "internals.md", ROOT / "CONTRIBUTING.md"):
        text = path.read_text(encoding="utf-8")
        assert not [room for room in rooms if f"{room}/" not in text], path.name


def test_the_trace_is_a_page_of_today() -> None:
    template = (files("lpr") / "assets" / "trace.html").read_text(encoding="utf-8")
    before, after = template.split(PLACEHOLDER)
    page = TRACE.read_text(encoding="utf-8")
    assert page.startswith(before) and page.endswith(after), "make it anew: docs/tutorial.md has the command"


def test_the_picture_is_of_the_trace() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(read_trace()), "run python -m dev.step_picture"
