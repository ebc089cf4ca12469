"""Adapters of a service: named by `model`, loaded and unloaded behind a key and a flag, and kept over lost ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
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


def test_adapters_are_named_loaded_unloaded_and_kept(service: SimpleNamespace, folders: Any) -> None:
    paths, expected = folders
    assert names(service) == {"bundled": None, "sql": "bundled"}
    assert [ids(service, name) for name in (None, "sql", None)] == [
        expected[name] for name in ("bundled", "sql", "bundled")
    ]
    late = {"lora_name": "late", "lora_path": str(paths["late"])}
    unknown = service.client.post("/v1/completions", json={"prompt": "a", "model": "late"}, headers=KEY)
    assert unknown.status_code == 404 and "bundled, sql is" in unknown.json()["error"]["message"]
    assert change(service, "load", headers={}, **late).status_code == 401
    loaded = change(service, "load", **late)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    assert names(service) == {"bundled": None, "sql": "bundled", "late": "bundled"}
    assert ids(service, "late") == expected["late"]
    for body, words in (
        (late, "'late' is loaded already; load_inplace replaces it"),
        ({**late, "lora_name": "bundled"}, "'bundled' is a name of the model itself"),
        ({**late, "lora_name": "x", "lora_path": "/nowhere"}, "cannot read the adapter /nowhere/adapter_config.json"),
        ({"lora_name": "x"}, "lora_path"),
    ):
        failed = change(service, "load", **body)
        assert failed.status_code == 400 and words in failed.json()["error"]["message"]
    assert change(service, "load", **{**late, "lora_path": str(paths["sql"]), "load_inplace": True}).status_code == 200
    assert ids(service, "late") == expected["sql"]
    assert change(service, "unload", lora_name="sql").text == "Success: LoRA adapter 'sql' removed successfully."
    assert change(service, "unload", lora_name="sql").status_code == 404
    assert names(service) == {"bundled": None, "late": "bundled"}
    # The front knows what was loaded and unloaded since the start, and new ranks are told.
    started = psutil.Process(service.process.pid).children(recursive=True)
    [rank] = [each for each in started if "lpr.serve.ranks.rank" in each.cmdline()][:1]
    rank.kill()
    end = time.monotonic() + 120
    while service.client.get("/readyz").status_code == 200 and time.monotonic() < end:
        time.sleep(0.05)
    while service.client.get("/readyz").status_code != 200:
        assert time.monotonic() < end, service.log()
        time.sleep(0.2)
    assert ids(service, "late") == expected["sql"] and ids(service, None) == expected["bundled"]
    assert names(service) == {"bundled": None, "late": "bundled"}
    unknown = service.client.post("/v1/completions", json={"prompt": "a", "model": "sql"}, headers=KEY)
    assert unknown.status_code == 404


def test_other_routes_know_adapters(service: SimpleNamespace, folders: Any) -> None:
    name = next(each for each, parent in names(service).items() if parent)
    body = {"input_prefix": PROMPT, "input_suffix": "", "n_predict": 8, "temperature": 0, "seed": 1}
    texts = [
        service.client.post("/infill", json={**body, "model": each}, headers=KEY).json()["content"]
        for each in ("bundled", name)
    ]
    assert texts[0] != texts[1]
    assert service.client.get(f"/v1/models/{name}", headers=KEY).json()["parent"] == "bundled"
    assert service.client.post("/infill", json={**body, "model": "x"}, headers=KEY).status_code == 404


def test_flags() -> None:
    with pytest.raises(InputError, match="--allow-runtime-lora-updating needs --api-key"):
        Front(parse(["--allow-runtime-lora-updating", "--port", "0"]), [])
    with pytest.raises(InputError, match="--lora-modules bundled: this is a name of the model itself"):
        parse(["--lora-modules", "bundled=/x"])
    with pytest.raises(InputError, match="give NAME=FOLDER"):
        parse(["--lora-modules", "a"])
    assert parse(["--lora-modules", "a=/x", "b=/y"]).engine.lora_modules == ("a=/x", "b=/y")
