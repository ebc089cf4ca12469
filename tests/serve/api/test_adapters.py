"""Adapters of a service: named by `model`, loaded and unloaded behind a key and a flag, and kept over lost ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lpr import InputError
from lpr.model.loader import bundled_model
from lpr.serve.front import Front
from lpr.serve.options import parse
from tests.fakes.adapters import ATTENTION, merged, write_adapter
from tests.fakes.models import stock_greedy
from tests.fakes.serving import SMALL, serving

KEY = {"Authorization": "Bearer secret"}
PROMPT = "def fib(n):\n    "


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], dict[str, list[int]]]:
    """Adapters of the bundled model, and the ids of models into which they are merged."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(bundled_model())(PROMPT)["input_ids"]
    found, expected = {}, {"bundled": stock_greedy(model, prompt, 16)}
    for seed, name in enumerate(("sql", "late")):
        found[name] = write_adapter(tmp_path_factory.mktemp(name), model, [*ATTENTION, "down_proj"], seed, 0.08)
        expected[name] = stock_greedy(merged(model, found[name]), prompt, 16)
    return found, expected


@pytest.fixture(scope="module")
def service(folders: Any) -> Iterator[SimpleNamespace]:
    flags = ("--lora-modules", f"sql={folders[0]['sql']}", "--api-key", "secret", "--allow-runtime-lora-updating")
    with serving(None, *SMALL, *flags) as found:
        yield found


def ids(service: SimpleNamespace, model: str | None) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "return_token_ids": True, "model": model}
    answer = service.client.post("/v1/completions", json=body, headers=KEY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "bundled")
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def change(service: SimpleNamespace, what: str, headers: dict[str, str] = KEY, **body: Any) -> Any:
    return service.client.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)


def names(service: SimpleNamespace) -> dict[str, str | None]:
    listed = service.client.get("/v1/models", headers=KEY).json()["data"]
    return {each["id"]: each["parent"] for each in listed}


def test_flags() -> None:
    with pytest.raises(InputError, match="--allow-runtime-lora-updating needs --api-key"):
        Front(parse(["--allow-runtime-lora-updating", "--port", "0"]), [])
    with pytest.raises(InputError, match="--lora-modules bundled: this is a name of the model itself"):
        parse(["--lora-modules", "bundled=/x"])
    with pytest.raises(InputError, match="give NAME=FOLDER"):
        parse(["--lora-modules", "a"])
    assert parse(["--lora-modules", "a=/x", "b=/y"]).engine.lora_modules == ("a=/x", "b=/y")
