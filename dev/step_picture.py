"""Draw a step of the documentation's trace as the picture that README and docs show.

    python -m dev.step_picture        write docs/images/step.svg from docs/trace.html

The trace is a real run; docs/tutorial.md names the command that makes it.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
TRACE, PICTURE = DOCS / "trace.html", DOCS / "images" / "step.svg"
STEP = 14
"""Its accepted path leads through two sources and two ranks."""
COLUMN, ROW, WIDTH, HEIGHT = 132, 30, 100, 22
LEFT, TOP = 24, 96
STYLE = """
  .panel { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
  .title, .note { font-family: system-ui, sans-serif } .title { font-size: 17px; font-weight: 600 }
  .note { fill: #57606a; font-size: 12px }
  .edge { fill: none; stroke: #8c959f; stroke-width: 1.2 } .taken { stroke: #1a7f37; stroke-width: 4 }
  rect.node { stroke: #57606a; stroke-width: 1 } rect.accepted { stroke: #1a7f37; stroke-width: 3 }
  rect.other { stroke-dasharray: 5 3 }
  .root { fill: #eaeef2 } .window { fill: #ffd8b5 } .recycled { fill: #c2e0ff } .trie { fill: #e2d3fb }
  .bonus { fill: #b7efc5 }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .note { fill: #9da7b3 }
    .edge { stroke: #656c76 } .taken, rect.accepted { stroke: #3fb950 } rect.node { stroke: #9198a1 }
    rect.accepted { stroke: #3fb950 }
    .root { fill: #2a313c } .window { fill: #6b3a12 } .recycled { fill: #14406e } .trie { fill: #4a2f7d }
    .bonus { fill: #14532a }
  }
"""


def read_trace(path: Path = TRACE) -> dict[str, Any]:
    """The data that a trace page shows."""
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"{path} is not a trace page")
    data: dict[str, Any] = json.loads(found[1])
    return data


def shown(text: str) -> str:
    """A token with visible white space."""
    if len(text) > 3 and not text.strip(" "):
        return f"{len(text)} spaces"
    return text.replace(" ", "\u00b7").replace("\n", "\\n").replace("<|endoftext|>", "end of text")


def rows_of(parents: list[int], path: list[int]) -> list[float]:
    """The row of each node: one per leaf, the accepted path on top, a parent in the row of its first child."""
    rows = [0.0] * len(parents)
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    used = 0

    def place(node: int) -> None:
        nonlocal used
        below = sorted(children[node], key=lambda child: (child not in path, child))
        rows[node] = used
        for index, child in enumerate(below):
            used += index > 0
            place(child)

    place(0)
    return rows


def picture(data: dict[str, Any]) -> str:
    """The step as SVG text, with its own background for light and dark pages."""
    step, names = data["requests"][0]["steps"][STEP - 1], data["tokens"]
    parents, path = step["parents"], step["path"]
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        depths[node] = depths[parent] + 1
    rows = rows_of(parents, path)
    places = [(LEFT + COLUMN * depth, TOP + ROW * row) for depth, row in zip(depths, rows, strict=True)]
    end = (LEFT + COLUMN * len(path), TOP + ROW * rows[path[-1]])
    width, height = int(end[0] + WIDTH + LEFT), int(TOP + ROW * (max(rows) + 1) + 40)
    emitted = "".join(names[str(token)] for token in step["emitted"])
    title = f"One step: {len(parents)} nodes in one forward of {data['ranks']} ranks, {len(path)} tokens out"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="32">{escape(title)}</text>',
        *legend(),
    ]
    for node, parent in list(enumerate(parents))[1:]:
        lines.append(edge(places[parent], places[node], node in path))
    lines.append(edge(places[path[-1]], end, True))
    for node, place in enumerate(places):
        kinds = [data["sources"][step["sources"][node]]]
        kinds += ["accepted"] * (node in path) + ["other"] * (step["owners"][node] > 0)
        lines.append(box(place, shown(names[str(step["tokens"][node])]), kinds))
    lines.append(box(end, shown(names[str(step["next"][path[-1]])]), ["bonus", "accepted"]))
    lines.append(
        f'<text class="note" x="{LEFT}" y="{height - 18}">Committed by this step: '
        f'<tspan font-family="monospace">{escape(shown(emitted))}</tspan>; every other node is dropped.</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


def legend() -> list[str]:
    """The legend of fills and borders."""
    parts, x = [], LEFT
    for kind, text in (
        ("root", "last committed token"), ("window", "Jacobi window"), ("trie", "trie"), ("recycled", "recycled"),
        ("bonus", "bonus token"), ("accepted panel", "accepted"), ("other panel", "owned by rank 1"),
    ):  # fmt: skip
        parts.append(f'<rect class="node {kind}" x="{x}" y="52" width="26" height="16" rx="4"/>')
        parts.append(f'<text class="note" x="{x + 33}" y="65">{text}</text>')
        x += 33 + 6 * len(text) + 16
    return parts


def edge(start: tuple[float, float], end: tuple[float, float], taken: bool) -> str:
    """The line from a parent to its child."""
    x, y, to, down = start[0] + WIDTH, start[1] + HEIGHT / 2, end[0], end[1] + HEIGHT / 2
    middle = (x + to) / 2
    kind = "edge taken" if taken else "edge"
    return f'<path class="{kind}" d="M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {down:g} {to:g} {down:g}"/>'


def box(place: tuple[float, float], text: str, kinds: list[str]) -> str:
    """A node: its token, filled by its source."""
    x, y = place
    rect = f'<rect class="node {" ".join(kinds)}" x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
    return f'{rect}<text x="{x + WIDTH / 2:g}" y="{y + 15.5:g}" text-anchor="middle">{escape(text)}</text>'


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(read_trace()), encoding="utf-8")


if __name__ == "__main__":
    main()
