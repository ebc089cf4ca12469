"""Real chat templates and the conversations of three APIs, beside transformers' own rendering.

LPR_CHAT_TEMPLATES names folders with *.jinja files, with a colon between them; .ci/run takes those of the package trl.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lpr.serve.errors import ApiError
from lpr.serve.text.conversation import conversation, prompt_of
from tests.fakes.templates import CONVERSATIONS, served

FOLDERS = [Path(folder) for folder in os.environ.get("LPR_CHAT_TEMPLATES", "").split(":") if folder]
TEMPLATES = sorted(path for folder in FOLDERS for path in folder.rglob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MOVED = ("developer", "developer after system", "system later", "system last", "Codex's", "functions")
"""Conversations with instructions where, or of a role that, no template is known to be trained on: lpr moves them."""
LEAST = 40
"""Templates that there are at least, in trl 1.16 without those for training."""


def reference(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """What transformers renders of the client's messages, with objects for arguments as its documentation asks for."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    found, _ = render_jinja_template([messages], chat_template=template, **variables, **SPECIAL)
    return found[0]


def test_every_text_of_every_conversation_is_shown_or_refused_by_its_place() -> None:
    if not TEMPLATES:
        if "LPR_NO_SKIPS" in os.environ:
            pytest.fail("LPR_CHAT_TEMPLATES names no templates")
        pytest.skip("LPR_CHAT_TEMPLATES names no templates")
    assert len(TEMPLATES) >= LEAST
    counts: Counter[str] = Counter()
    faults: list[str] = []
    refused: defaultdict[str, list[str]] = defaultdict(list)
    for path in TEMPLATES:
        source = path.read_text(encoding="utf-8")
        model = served(source)
        for name, (chat, words) in CONVERSATIONS.items():
            messages, variables = conversation(model.templates, chat)
            try:
                theirs = reference(source, json.loads(json.dumps(messages)), dict(variables))
            except Exception:  # it refuses, or cannot take, what we fit
                theirs = ""
            # A list, or no text, in the form of Python or JSON is nothing that a model has learnt.
            is_whole = all(word in theirs for word in words) and not any(
                mark in theirs for mark in ("'type'", '"type": "text"', "None")
            )
            try:
                ours = prompt_of(model.templates, chat, model.most_characters)
            except ApiError as failure:
                counts["refused"] += 1
                refused[path.name].append(name)
                if is_whole or not (failure.param or "").startswith("messages"):
                    faults.append(f"{path.name}, {name}: {failure.message}")
                continue
            counts["shown"] += 1
            counts["lost by transformers"] += not is_whole
            if missing := [word for word in words if word not in ours]:
                faults.append(f"{path.name}, {name}: lost {missing}")
            if is_whole and name not in MOVED and ours != theirs:
                counts["other"] += 1
                faults.append(f"{path.name}, {name}: other than transformers'\n{theirs}\n--- ours\n{ours}")
            else:
                counts["as transformers"] += is_whole
    print(f"{len(TEMPLATES)} templates, {len(CONVERSATIONS)} conversations: {dict(counts)}")
    print(*(f"refused: {name}: {', '.join(each)}" for name, each in refused.items()), sep="\n")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:20])
