"""Clients that others wrote: Node's openai, LiteLLM, llama.vim in a real Vim, and schemathesis."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_driver import served

TEXT = "return x + 1\n"


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def need(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_nodes_openai_client(tmp_path):
    modules = os.environ.get("LPR_NODE_MODULES", "")
    if not shutil.which("node") or not Path(modules, "openai").is_dir():
        pytest.skip("needs node, and $LPR_NODE_MODULES with the package openai in it (npm install openai)")
    script = tmp_path / "client.mjs"
    shutil.copy(Path(__file__).parent / "node_client.mjs", script)
    (tmp_path / "node_modules").symlink_to(modules)
    with served() as service:
        service.driver.pause = 0.01
        done = subprocess.run(["node", script, service.url], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["text"] == found["stream"] == found["chat"] == found["chatStream"] == TEXT
        assert [each[1:] for each in found["errors"]] == [[404, "model"], [400, "nonsense"], [400, "temperature"]]
        assert [each[0] for each in found["errors"]] == ["NotFoundError", "BadRequestError", "BadRequestError"]
        wait_for(lambda: not service.front.context.open)


def test_litellm():
    code = """
import json, sys, litellm
litellm.suppress_debug_info = True
url, found = sys.argv[1] + "/v1", {}
base = {"model": "text-completion-openai/fake", "api_base": url, "api_key": "none", "max_retries": 0}
found["text"] = litellm.text_completion(prompt="def f(x):", max_tokens=6, **base).choices[0].text
events = litellm.text_completion(prompt="def f(x):", max_tokens=6, stream=True, **base)
found["stream"] = "".join(event.choices[0].text or "" for event in events)
base["model"] = "openai/fake"
messages = [{"role": "user", "content": "u"}]
found["chat"] = litellm.completion(messages=messages, **base).choices[0].message.content
events = litellm.completion(messages=messages, stream=True, **base)
found["chat_stream"] = "".join(event.choices[0].delta.content or "" for event in events)
try:
    litellm.completion(messages=messages, temperature=-1, **base)
except litellm.BadRequestError as error:
    found["error"] = "temperature" in str(error)
print("FOUND" + json.dumps(found))
"""
    if subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; exit(not u.find_spec('litellm'))"]
    ).returncode:
        pytest.skip("litellm is not installed")
    with served() as service:
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            [sys.executable, "-c", code, service.url], capture_output=True, text=True, timeout=180, env=environment
        )
        assert "FOUND" in done.stdout, done.stdout + done.stderr
        found = json.loads(done.stdout.partition("FOUND")[2])
        assert found.pop("error")
        assert set(found.values()) == {TEXT}


VIM = """
set nocompatible hidden noswapfile shortmess+=atI cmdheight=4
let g:llama_config = {'endpoint_fim': '%(url)s/infill', 'auto_fim': v:false, 'show_info': 0,
      \\ 'keymap_fim_trigger': '<C-F>', 't_max_predict_ms': 5000}
set runtimepath^=%(plugin)s
runtime plugin/llama.vim
func! Trigger(timer)
  call cursor(2, 1)
  call feedkeys("A\\<C-F>", 't')
  call timer_start(3000, {-> feedkeys("\\<Tab>\\<Esc>", 't')})
  call timer_start(4000, {-> execute('wq!')})
endfunc
call timer_start(500, 'Trigger')
"""


def test_llama_vim_in_a_real_vim(tmp_path):
    plugin = os.environ.get("LPR_LLAMA_VIM", "")
    if not shutil.which("vim") or not Path(plugin, "autoload", "llama.vim").is_file():
        pytest.skip("needs vim, and $LPR_LLAMA_VIM with a checkout of github.com/ggml-org/llama.vim")
    file, script = tmp_path / "a.py", tmp_path / "vimrc"
    file.write_text("def f(x):\n    \nprint(f(2))\n")
    with served() as service:
        script.write_text(VIM % {"url": service.url, "plugin": plugin, "file": file})
        command = ["script", "-qec", f"vim -u {script} {file}", "/dev/null"]
        subprocess.run(command, timeout=60, capture_output=True, env={**os.environ, "TERM": "xterm"})
        sent = service.driver.submitted
        assert sent, "vim asked for nothing"
        text = service.front.context.served.tokens.decode(sent[0].prompt_ids)
        assert "<|fim_prefix|>def f(x):\n" in text and "<|fim_suffix|>" in text and "print(f(2))" in text
        assert "return x + 1" in file.read_text(), file.read_text()


def test_schemathesis_finds_no_5xx(tmp_path):
    if subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; exit(not u.find_spec('schemathesis'))"]
    ).returncode:
        pytest.skip("schemathesis is not installed")
    examples = os.environ.get("LPR_EXAMPLES", "40")
    with served(max_queue=1000) as service:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json", "--max-examples", examples,
            "--checks", "not_a_server_error,content_type_conformance", "--phases", "examples,coverage,fuzzing",
            "--suppress-health-check", "all", "--no-color", "--seed", "1", "--exclude-path", "/metrics",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert {"status": "ok", "running": 0, "waiting": 0}.items() <= service.client.get("/readyz").json().items()
