"""The window of a prompt that its output is likely to rewrite, which serves as prediction where the client names none.

Next-edit models repeat a region of their prompt between marks of their own: Zeta 1, 2.0 and 2.1 (Zed), Sweep's. A chat
about code mostly rewrites its last fenced block: whole files, or parts of it in search-and-replace edits. A window that
is not rewritten costs next to nothing (dev/LOG.md), and no text depends on it.
"""

from __future__ import annotations

from typing import NamedTuple

FENCE = "```"
LEAST = 32
"""Characters of a window; shorter ones are left to the other draft sources."""
_CURSORS = ("<|user_cursor|>", "<|user_cursor_is_here|>", "<|cursor|>")


class _Marks(NamedTuple):
    """What stands around a window, and at the end of its prompt."""

    begin: str
    end: str
    last: str
    repeats_begin: bool = False
    """True if the output begins with the mark, too."""
    ends_line: bool = False
    """True if the rest of the line belongs to the mark."""


_MARKS = (
    _Marks("<<<<<<< CURRENT\n", "=======\n", "<[fim-middle]>"),
    _Marks("<|marker_1|>", "<[fim-middle]>", "<[fim-middle]>", repeats_begin=True),
    _Marks("<|editable_region_start|>", "<|editable_region_end|>", "### Response:", repeats_begin=True),
    _Marks("<|file_sep|>current/", "<|file_sep|>updated/", "", ends_line=True),
)


def window_of(prompt: str) -> str:
    """The window that the output of `prompt` is likely to rewrite; "" if there is none. Takes linear time."""
    window = next((found for marks in _MARKS if (found := _between(prompt, marks)) is not None), None)
    if window is None:
        window = _last_block(prompt)
    for cursor in _CURSORS:
        window = window.replace(cursor, "")
    return window if len(window) >= LEAST else ""


def _between(prompt: str, marks: _Marks) -> str | None:
    """The text between the last of some marks; None without them."""
    end = prompt.rfind(marks.end)
    begin = prompt.rfind(marks.begin, 0, max(0, end))
    if begin < 0 or not prompt.rstrip().endswith(marks.last):
        return None
    if not marks.repeats_begin:
        begin = prompt.find("\n", begin) + 1 if marks.ends_line else begin + len(marks.begin)
    return prompt[begin:end]


def _last_block(prompt: str) -> str:
    """The last fenced block that is closed; "" without one."""
    if prompt.count(FENCE) % 2:  # the output begins in a block
        prompt = prompt[: prompt.rfind(FENCE)]
    end = prompt.rfind(FENCE)
    begin = prompt.find("\n", max(0, prompt.rfind(FENCE, 0, max(0, end)))) + 1
    return prompt[begin:end] if end >= 0 and 0 < begin < end else ""
