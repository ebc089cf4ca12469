"""How many tokens a step of vLLM's server emits, from its own counters."""

from __future__ import annotations

import re
from typing import Any

import httpx

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "generated": "vllm:generation_tokens_total",
}
Counts = dict[str, float]


def counts_of(url: str) -> Counts:
    """The counters of the server at `url`; without speculation, or of another server, they are 0 or missing."""
    text = httpx.get(url + "/metrics", timeout=30).text
    found = Counts()
    for name, counter in COUNTERS.items():
        values = re.findall(rf"^{counter}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if values:
            found[name] = sum(map(float, values))
    return found


def acceptance(before: Counts, after: Counts) -> dict[str, Any]:
    """The figures of what was generated between two readings; none where nothing was drafted.

    `acceptance_length` is vLLM's: of steps that have a draft only, so a drafter that seldom drafts is flattered.
    `tokens_per_step` counts all steps of a sequence: each emits one token besides the accepted ones.
    """
    new = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if not new.get("drafts") or new["generated"] <= new["accepted"]:
        return {}
    return {
        "acceptance_length": round(1 + new["accepted"] / new["drafts"], 3),
        "tokens_per_step": round(new["generated"] / (new["generated"] - new["accepted"]), 3),
        "accepted_part": round(new["accepted"] / new["drafted"], 3),
    }
