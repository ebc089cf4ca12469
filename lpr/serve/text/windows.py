"""The window of a prompt that its output is likely to rewrite: the default prediction if the client gives none.

Next-edit models repeat a region of their prompt between special marks: Zeta 1, 2.0 and 2.1 (Zed), Sweep's. Edits of
agents (whole files, search and replace) start with a line that also precedes the code in the prompt, so the suffix
index finds them: a fenced block as prediction gained nothing (dev/LOG.md).
"""

from typing import NamedTuple

_CURSORS = ("<|user_cursor|>", "<|user_cursor_is_here|>", "<|cursor|>")


class _Marks(NamedTuple):
    """The marks around a window, and at the end of its prompt."""

    begin: str
    end: str
    last: str
    repeats_begin: bool = False  # True if the output begins with the mark, too
    ends_line: bool = False  # True if the rest of the line belongs to the mark


_MARKS = (
    _Marks("<<<<<<< CURRENT\n", "=======\n", "<[fim-middle]>"),
    _Marks("<|marker_1|>", "<[fim-middle]>", "<[fim-middle]>", repeats_begin=True),
    _Marks("<|editable_region_start|>", "<|editable_region_end|>", "### Response:", repeats_begin=True),
    _Marks("<|file_sep|>current/", "<|file_sep|>updated/", "", ends_line=True),
)


def window_of(prompt: str) -> str:
    """The window that the output of `prompt` is likely to rewrite; "" if there is none. Takes linear time."""
    window = next((found for marks in _MARKS if (found := _between(prompt, marks)) is not None), "")
    for cursor in _CURSORS:
        window = window.replace(cursor, "")
    return window


def _between(prompt: str, marks: _Marks) -> str | None:
    """The text between the last of some marks; None without them."""
    end = prompt.rfind(marks.end)
    begin = prompt.rfind(marks.begin, 0, max(0, end))
    if begin < 0 or not prompt.rstrip().endswith(marks.last):
        return None
    if not marks.repeats_begin:
        begin = prompt.find("\n", begin) + 1 if marks.ends_line else begin + len(marks.begin)
    return prompt[begin:end]
