"""The long tests of tests/serve/api/test_adapters.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import psutil

from tests.serve.api.test_adapters import KEY, PROMPT, change, folders, ids, names, service


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


def test_other_routes_know_adapters(service: SimpleNamespace) -> None:
    name = next(each for each, parent in names(service).items() if parent)
    body = {"input_prefix": PROMPT, "input_suffix": "", "n_predict": 8, "temperature": 0, "seed": 1}
    texts = [
        service.client.post("/infill", json={**body, "model": each}, headers=KEY).json()["content"]
        for each in ("bundled", name)
    ]
    assert texts[0] != texts[1]
    assert service.client.get(f"/v1/models/{name}", headers=KEY).json()["parent"] == "bundled"
    assert service.client.post("/infill", json={**body, "model": "x"}, headers=KEY).status_code == 404
