"""Clients that others wrote, each asked to complete, stream and chat, and what it got."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LITELLM = """
import json, sys, litellm
litellm.suppress_debug_info = True
url, found = sys.argv[1] + "/v1", {}
base = {"model": "text-completion-openai/fake", "api_base": url, "api_key": "none", "max_retries": 0,
        "max_tokens": 6, "temperature": 0}
found["text"] = litellm.text_completion(prompt="def f(x):", **base).choices[0].text
events = litellm.text_completion(prompt="def f(x):", stream=True, **base)
found["stream"] = "".join(event.choices[0].text or "" for event in events)
base["model"] = "openai/fake"
messages = [{"role": "user", "content": "u"}]
found["chat"] = litellm.completion(messages=messages, **base).choices[0].message.content
events = litellm.completion(messages=messages, stream=True, **base)
found["chat_stream"] = "".join(event.choices[0].delta.content or "" for event in events)
try:
    litellm.completion(messages=messages, **{**base, "temperature": -1})
except litellm.BadRequestError as error:
    found["error"] = "temperature" in str(error)
print("FOUND" + json.dumps(found))
"""
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


def has(package: str) -> bool:
    """Is a package installed? Asked by another process, as some set environment variables when they are found."""
    code = f"import importlib.util as u; exit(not u.find_spec({package!r}))"
    return subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def node_modules() -> Path | None:
    """The folder with Node's package openai, if there is one."""
    modules = Path(os.environ.get("LPR_NODE_MODULES", ""))
    return modules if shutil.which("node") and (modules / "openai").is_dir() else None


def vim_plugin() -> Path | None:
    """A checkout of llama.vim, if there is one and Vim to run it."""
    plugin = Path(os.environ.get("LPR_LLAMA_VIM", ""))
    return plugin if shutil.which("vim") and (plugin / "autoload" / "llama.vim").is_file() else None


def ask_with_node(url: str, *more: str) -> dict[str, Any]:
    """What the official Node client gets; with a word for `tool_choice`, calls of tools too."""
    modules = node_modules()
    assert modules is not None
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "client.mjs"
        shutil.copy(Path(__file__).parent / "node_client.mjs", script)
        (Path(folder) / "node_modules").symlink_to(modules)
        done = subprocess.run(["node", script, url, *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def ask_with_litellm(url: str) -> dict[str, Any]:
    """What LiteLLM gets."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, "-c", LITELLM, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert "FOUND" in done.stdout, done.stdout + done.stderr
    return dict(json.loads(done.stdout.partition("FOUND")[2]))


def fill_with_vim(url: str, text: str) -> str:
    """`text` after llama.vim has been asked at the end of its second line, and its suggestion was taken with Tab."""
    with tempfile.TemporaryDirectory() as folder:
        file, script = Path(folder) / "a.py", Path(folder) / "vimrc"
        file.write_text(text)
        script.write_text(VIM % {"url": url, "plugin": vim_plugin()})
        command = ["script", "-qec", f"vim -u {script} {file}", "/dev/null"]
        subprocess.run(command, timeout=300, capture_output=True, env={**os.environ, "TERM": "xterm"})
        return file.read_text()
