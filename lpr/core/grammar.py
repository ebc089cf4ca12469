"""Matchers of llguidance with the same limits wherever a grammar is compiled: what one process accepts, all do.

Ranks must agree, so these limits count work and not time.
"""

from __future__ import annotations

from typing import Any

ROW_ITEMS, STEP_ITEMS = 500, 10_000
"""Parser items of one byte and of one mask, for grammars that may be ambiguous: their time grows with the square.

`r: r r | /[a-z]+/` takes 0.6 s a mask with llguidance's own limits, 2,000 and 50,000, and 14 ms with these. Grammars of
JSON schemas are not ambiguous: they may have wide choices, which cost little, and keep llguidance's limits.
"""


def matcher(tokenizer: Any, grammar: str) -> Any:
    """A matcher of `grammar`, in llguidance's JSON form, with llguidance's `tokenizer`; its errors are in itself."""
    import llguidance

    limits = None
    if '"lark_grammar"' in grammar:
        limits = llguidance.LLParserLimits(max_items_in_row=ROW_ITEMS, step_max_items=STEP_ITEMS)
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
