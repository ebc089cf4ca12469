"""Clients that others wrote: Node's openai, LiteLLM, llama.vim in a real Vim, and schemathesis."""

import os
import subprocess
import sys

import pytest

from tests.fakes import other_clients as clients
from tests.fakes.fake_driver import facts, served, wait_for

TEXT = "return x + 1\n"


def test_nodes_openai_client():
    if clients.node_modules() is None:
        pytest.skip("needs node, and $LPR_NODE_MODULES with the package openai in it (npm install openai)")
    with served() as service:
        service.driver.pause = 0.01
        found = clients.ask_with_node(service.url)
        assert found["text"] == found["stream"] == found["chat"] == found["chatStream"] == TEXT
        assert [each[1:] for each in found["errors"]] == [[404, "model"], [400, "nonsense"], [400, "temperature"]]
        assert [each[0] for each in found["errors"]] == ["NotFoundError", "BadRequestError", "BadRequestError"]
        wait_for(lambda: not service.front.context.open)


def test_nodes_openai_client_calls_tools():
    if clients.node_modules() is None:
        pytest.skip("needs node, and $LPR_NODE_MODULES with the package openai in it (npm install openai)")
    with served(facts(chat_templates={"default": "{{ tools }}{{ messages }}<tool_call>"}, max_length=4096)) as service:
        service.driver.text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        found = clients.ask_with_node(service.url, "auto")
        call = ["weather", '{"city": "Rome"}']
        assert found["calls"] == ["tool_calls", [call], [call]]


def test_litellm():
    if not clients.has("litellm"):
        pytest.skip("litellm is not installed")
    with served() as service:
        found = clients.ask_with_litellm(service.url)
        assert found.pop("error")
        assert set(found.values()) == {TEXT}


def test_llama_vim_in_a_real_vim():
    if clients.vim_plugin() is None:
        pytest.skip("needs vim, and $LPR_LLAMA_VIM with a checkout of github.com/ggml-org/llama.vim")
    with served() as service:
        found = clients.fill_with_vim(service.url, "def f(x):\n    \nprint(f(2))\n")
        sent = service.driver.submitted
        assert sent, "vim asked for nothing"
        text = service.front.context.served.tokens.decode(sent[0].prompt_ids)
        assert "<|fim_prefix|>def f(x):\n" in text and "<|fim_suffix|>" in text and "print(f(2))" in text
        assert "return x + 1" in found, found


@pytest.mark.timeout(900)
def test_schemathesis_finds_no_5xx(tmp_path):
    if not clients.has("schemathesis"):
        pytest.skip("schemathesis is not installed")
    examples = os.environ.get("LPR_EXAMPLES", "2")
    with served(facts(chat_templates={"default": "{{ tools }}{{ messages }}<tool_call>"}), max_queue=1000) as service:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json", "--max-examples", examples,
            "--checks", "not_a_server_error,content_type_conformance", "--phases", "examples,coverage,fuzzing",
            "--suppress-health-check", "all", "--no-color", "--seed", "1", "--exclude-path", "/metrics",
            "--exclude-path", "/beta/completions",  # another name of /v1/completions
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert {"status": "ok", "running": 0, "waiting": 0}.items() <= service.client.get("/readyz").json().items()
