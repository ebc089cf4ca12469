"""Parts about steps, which are counted: the same on every machine."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.limit import Cause
from benchmarks.report.parts import Part, Result
from benchmarks.report.plots import (
    MARKERS,
    Theme,
    bars,
    beside,
    end_labels,
    legend,
    name_rows,
    panels,
    rank_axis,
    stacked,
)
from benchmarks.result_tables import steps as tables
from benchmarks.result_tables.parts import Json, distinct, mode, sound
from benchmarks.result_tables.steps import SOURCES

PAPER_STEPS = (1.4, 1.5)
"""Fewer steps on 8 GPUs than on 1: lookahead decoding (Fu et al., ICML 2024, arXiv 2402.02057)."""
PAPER_TOKENS_PER_STEP = 2.05
"""The same paper, one GPU, MT-Bench, 7B."""
SOURCE_COLOR = {"window": 0, "recycled": 1, "trie": 2, "shared_trie": 3, "pool": 4}


def scaling(result: Result) -> list[Part]:
    """Tokens per step against ranks."""
    runs = sound(result.facts["runs"])
    lines = tables.lines_of(runs)
    temperatures, ranks = distinct(runs, "temperature"), sorted(distinct(runs, "num_ranks"))

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(len(temperatures), 3.6)
        for axes, temperature in zip(grid, temperatures, strict=True):
            shown = [(budget, found) for each, budget, found in lines if each == temperature]
            rank_axis(axes, ranks, room=1.35)
            axes.set_ylim(0, 1.12 * max(run["tokens_per_step"] for _, found in shown for run in found))
            labels = [(ranks[-1], 1.0, "plain decoding: 1", theme.soft)]
            axes.plot(ranks, [1.0] * len(ranks), "--", color=theme.soft, linewidth=1.2)
            for number, (budget, found) in enumerate(shown):
                values = [run["tokens_per_step"] for run in found]
                axes.plot([r["num_ranks"] for r in found], values, MARKERS[number] + "-", color=theme.colors[number])
                text = f"{budget} nodes per rank:\n{values[0]:.1f} to {values[-1]:.1f}"
                labels.append((found[-1]["num_ranks"], values[-1], text, theme.colors[number]))
            if temperature == 0:
                axes.plot([1], [PAPER_TOKENS_PER_STEP], "D", color=theme.colors[3])
                text = f"paper: about {PAPER_TOKENS_PER_STEP} on 1 GPU (7B, MT-Bench)"
                beside(axes, text, 1, PAPER_TOKENS_PER_STEP, theme.colors[3], distance=8)
            end_labels(axes, labels)
            axes.set_title(mode(temperature))
            axes.set_ylabel("tokens per step")
        return figure

    words = "; ".join(
        f"{mode(temperature)}, {budget} nodes per rank: {found[0]['tokens_per_step']:.1f} on {found[0]['num_ranks']}, "
        f"{found[-1]['tokens_per_step']:.1f} on {found[-1]['num_ranks']}"
        for temperature, budget, found in lines
        if budget == max(each for _, each, _ in lines)
    )
    headline = f"Tokens per step by number of ranks. {words[:1].upper()}{words[1:]}."
    return [Part("tokens_per_step", draw, tables.scaling(result.facts), headline)]


def speedup(result: Result) -> list[Part]:
    """How many times fewer steps than on one rank, with the ideal and the paper's result."""
    runs = sound(result.facts["runs"])
    ranks = sorted(distinct(runs, "num_ranks"))
    ratios = [(temperature, budget, list(found.items())) for temperature, budget, found in tables.ratios_of(runs)]
    highest = max([PAPER_STEPS[1], *(ratio for _, _, points in ratios for _, ratio in points)])

    def draw(theme: Theme) -> Figure:
        figure, (whole, near) = panels(2, 3.8)
        for axes in (whole, near):
            rank_axis(axes, ranks, room=1.5)
            axes.set_ylabel("times fewer steps than on 1 rank")
            axes.plot(ranks, ranks, "--", color=theme.soft, linewidth=1.2)
            low, high = PAPER_STEPS
            axes.fill_between([1, 8], [1, low], [1, high], color=theme.colors[3], alpha=0.25, linewidth=0)
            axes.plot([8, 8], [low, high], color=theme.colors[3], linewidth=4, solid_capstyle="butt")
        whole.set_yscale("log", base=2)
        whole.set_yticks(ranks, [f"{rank}x" for rank in ranks])
        whole.yaxis.set_minor_locator(NullLocator())
        whole.set_ylim(0.9, 1.1 * max(ranks))
        near.set_ylim(0.98, 1 + 1.12 * (highest - 1))
        near.yaxis.set_major_formatter("{x:.1f}x")
        paper = (8, sum(PAPER_STEPS) / 2, "paper: 1.4x to\n1.5x on 8 GPUs", theme.colors[3])
        labels = [paper]
        for number, (temperature, budget, points) in enumerate(ratios):
            color = theme.colors[(0, 1, 2, 4, 5)[number % 5]]
            for axes in (whole, near):
                axes.plot(*zip(*points, strict=True), MARKERS[number % len(MARKERS)] + "-", color=color)
            labels.append((*points[-1], f"{mode(temperature)},\n{budget} nodes: {points[-1][1]:.2f}x", color))
        end_labels(near, labels)
        top = near.get_ylim()[1]
        near.annotate("ideal", (top, top), (4, -10), textcoords="offset points", color=theme.soft, fontsize=8.5)
        together = (ranks[-1], highest, "lpr and the\npaper", theme.ink)
        end_labels(whole, [(ranks[-1], ranks[-1], "ideal", theme.soft), together])
        whole.set_title("against the ideal")
        near.set_title("the same, enlarged")
        return figure

    table = tables.speedup(result.facts)
    known = [
        ["ideal", "", *(f"{rank}x" for rank in ranks)],
        ["paper, 8 GPUs", "", *("1.4x to 1.5x" if rank == 8 else "" for rank in ranks)],
    ]
    table = replace(table, rows=[*table.rows, *known])
    best = max(ratios, key=lambda each: each[2][-1][1])
    headline = (
        f"{best[2][-1][0]} ranks take up to {best[2][-1][1]:.2f} times fewer steps than one ({mode(best[0])}, "
        f"{best[1]} nodes per rank); the paper reports 1.4x to 1.5x on 8."
    )
    return [Part("speedup", draw, table, headline)]


def ablation(result: Result) -> list[Part]:
    """Tokens per step by draft source and node budget."""
    runs = sound(result.facts["runs"])
    temperatures, budgets = distinct(runs, "temperature"), sorted(distinct(runs, "budget"))
    cells = {(run["temperature"], run["kind"], run["budget"]): run["tokens_per_step"] for run in runs}
    kinds = [kind for kind in ("both", "trie", "window") if kind in distinct(runs, "kind")]
    words = {"both": "both", "trie": "trie only", "window": "window only"}

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(len(temperatures), 3.2)
        for axes, temperature in zip(grid, temperatures, strict=True):
            labels = [(budgets[-1], 1.0, "plain decoding: 1", theme.soft)]
            axes.plot(budgets, [1.0] * len(budgets), "--", color=theme.soft, linewidth=1.2)
            highest = 1.0
            for number, kind in enumerate(kinds):
                points = [(b, cells[temperature, kind, b]) for b in budgets if (temperature, kind, b) in cells]
                if not points:
                    continue
                color = theme.colors[number]
                axes.plot(*zip(*points, strict=True), MARKERS[number] + "-", color=color)
                labels.append((*points[-1], f"{words[kind]}: {points[-1][1]:.1f}", color))
                highest = max(highest, points[-1][1])
            rank_axis(axes, budgets, "node budget of a step", room=1.3)
            axes.set_ylim(0, 1.12 * highest)
            end_labels(axes, labels)
            axes.set_title(mode(temperature))
            axes.set_ylabel("tokens per step")
        return figure

    top = [max((cells[key], key) for key in cells if key[0] == temperature) for temperature in temperatures]
    found = "; ".join(f"{mode(key[0])}: {value:.1f} ({words[key[1]]}, {key[2]} nodes)" for value, key in top)
    headline = f"Most tokens per step on one rank: {found}."
    beside_limit = tables.limits(result.facts)
    more = [Part("limits", None, beside_limit)] if beside_limit.rows else []
    return [Part("sources", draw, tables.sources(result.facts), headline), *more]


def depths(result: Result) -> list[Part]:
    """What each source drafted and what of it was accepted, by depth, for the largest budget of all sources."""
    runs = tables.largest_of_both(result.facts)
    chosen = [(run["temperature"], run["num_steps"], run["by_depth"]) for run in runs]
    deepest = sorted({each["up_to_depth"] for _, _, counts in chosen for each in counts})
    names = [name for name in SOURCES if any(each["source"] == name for _, _, counts in chosen for each in counts)]
    groups = [tables.depth_group(last) for last in deepest]

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(2 * len(chosen), 3.0, columns=len(chosen))
        for column, (temperature, num_steps, counts) in enumerate(chosen):
            accepted, rate = grid[column], grid[column + len(chosen)]
            bottoms = [0.0] * len(deepest)
            for name in names:
                found = {each["up_to_depth"]: each for each in counts if each["source"] == name}
                color = theme.colors[SOURCE_COLOR[name]]
                heights = [found[d]["accepted"] / num_steps if d in found else 0.0 for d in deepest]
                hatch = "////" if SOURCE_COLOR[name] % 2 else ""
                accepted.bar(
                    groups, heights, bottom=bottoms, color=color, label=SOURCES[name], hatch=hatch,
                    edgecolor=theme.page, width=0.78,
                )  # fmt: skip
                bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
                rates = [tables.share(found.get(d)) for d in deepest]
                marker = MARKERS[SOURCE_COLOR[name]]
                rate.plot(groups, rates, marker + "-", color=color, label=SOURCES[name], clip_on=False)
            accepted.set_title(f"{mode(temperature)}: accepted per step")
            accepted.set_ylabel("accepted nodes per step")
            rate.set_title(f"{mode(temperature)}: share accepted")
            rate.set_ylabel("accepted of 100 drafted nodes")
            rate.set_ylim(0)
            for axes in (accepted, rate):
                axes.set_xlim(-0.6, len(groups) - 0.4)
                axes.set_xlabel("depth in the tree (1: next token)")
                axes.grid(False, axis="x")
                axes.tick_params(axis="x", labelsize=8, length=0, pad=6)
        for axes in grid[:: len(chosen)]:
            axes.legend(frameon=False, fontsize=8.5, loc="best", handlelength=1.6)
        return figure

    found = "; ".join(f"{mode(temperature)}: {_largest(counts)}" for temperature, _, counts in chosen)
    headline = f"Most accepted nodes come from: {found}."
    return [Part("acceptance", draw, tables.depths(result.facts), headline)]


def _largest(counts: list[Json]) -> str:
    """The source with the most accepted nodes, in words."""
    accepted = {name: sum(each["accepted"] for each in counts if each["source"] == name) for name in SOURCES}
    name, most = max(accepted.items(), key=lambda item: item[1])
    total = max(1, sum(accepted.values()))
    return f"{SOURCES[name]}, {100 * most / total:.0f} %"


def data_sets(result: Result) -> list[Part]:
    """Tokens per step on recorded texts of several data sets, by nodes."""
    runs = sound(result.facts["runs"])
    temperatures, budgets, names = (distinct(runs, key) for key in ("temperature", "budget", "data"))
    cells = {(run["data"], run["temperature"], run["budget"]): run["tokens_per_step"] for run in runs}

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(len(temperatures), 3.2)
        for axes, temperature in zip(grid, temperatures, strict=True):
            labels, highest = [], 1.0
            for number, name in enumerate(names):
                points = [(b, cells[name, temperature, b]) for b in sorted(budgets) if (name, temperature, b) in cells]
                if not points:
                    continue
                color = theme.colors[number % len(theme.colors)]
                axes.plot(*zip(*points, strict=True), MARKERS[number % len(MARKERS)] + "-", color=color)
                labels.append((*points[-1], f"{name}: {points[-1][1]:.1f}", color))
                highest = max(highest, points[-1][1])
            rank_axis(axes, sorted(budgets), "drafted nodes of a step", room=2.4)
            axes.set_ylim(0, 1.12 * highest)
            end_labels(axes, labels)
            axes.set_title(mode(temperature))
            axes.set_ylabel("tokens per step")
        return figure

    middle = sorted(budgets)[len(budgets) // 2]
    found = "; ".join(
        f"{name}, {mode(temperature)}: {cells[name, temperature, middle]:.1f}"
        for name in names for temperature in temperatures if (name, temperature, middle) in cells
    )  # fmt: skip
    headline = f"Tokens per step on a model's recorded texts with {middle} nodes. {found}."
    straight = tables.data_sets(result.facts, is_straight=True)
    return [
        Part("data_sets", draw, tables.data_sets(result.facts), headline),
        Part("data_sets_straight", None, straight),
        *([Part("data_sets_peers", None, tables.replayed_peers(result.facts))] if result.facts.get("peers") else []),
    ]


def replay(result: Result) -> list[Part]:
    """Drafting on recorded completions: tokens per step, and how long a draft takes."""
    known = tables.replay_runs(result.facts)
    runs = [run for run, _ in known]
    labels = [f"{run['traces'].removesuffix('.jsonl')},\n{setting}, {run['budget']} nodes" for run, setting in known]
    counts = [setting in ("cold", "warm") for _, setting in known]

    def draw(theme: Theme) -> Figure:
        figure, (left, right) = panels(2, 1.0 + 0.38 * len(runs))
        palette = {"cold": theme.colors[0], "warm": theme.colors[1]}
        values = [run["tokens_per_step"] * count for run, count in zip(runs, counts, strict=True)]
        limits = {at: run["limit_tokens_per_step"] for at, run in enumerate(runs) if "limit_tokens_per_step" in run}
        texts = [f"{value:.2f}" if value else "only times drafting" for value in values]
        colors = [palette.get(setting, theme.soft) for _, setting in known]
        bars(left, labels, values, colors, ["" if at in limits else text for at, text in enumerate(texts)])
        left.axvline(1, color=theme.soft, linestyle="--", linewidth=1.2)
        if limits:
            left.plot(list(limits.values()), list(limits), "d", color=theme.colors[4], label="limit: longest phrases")
            for at, limit in limits.items():
                beside(left, f"{texts[at]} of {limit:.2f}", max(limit, values[at]), at)
            left.set_xlim(0, 1.5 * max(*values, *limits.values()))
            legend(left, 1)
        left.set_xlabel("tokens per step (plain decoding: 1)")
        medians = [run["draft_ms_per_step"] for run in runs]
        slow = [run["draft_ms_p99"] for run in runs]
        places = range(len(runs))
        right.hlines(places, medians, slow, color=theme.line, linewidth=3)
        right.plot(medians, places, "o", color=theme.colors[2], label="median")
        right.plot(slow, places, "D", color=theme.colors[3], label="99th percentile")
        name_rows(right, [""] * len(runs))
        right.set_xlim(0, 1.15 * max(slow))
        right.set_xlabel("time to draft a tree, milliseconds")
        legend(right, 2)
        return figure

    found = "; ".join(
        f"{label.replace(chr(10), ' ')}: {run['tokens_per_step']:.1f}"
        for label, run, count in zip(labels, runs, counts, strict=True)
        if count
    )
    headline = f"Tokens per step on recorded completions, from the trie alone. {found}."
    return [Part("replay", draw, tables.replay(result.facts), headline), *_ends(result)]


def _ends(result: Result) -> list[Part]:
    """Where the steps of a replay end, where it was counted."""
    known = [(run, setting) for run, setting in tables.replay_runs(result.facts) if run.get("ends")]
    if not known:
        return []
    labels = [f"{run['traces'].removesuffix('.jsonl')},\n{setting}, {run['budget']} nodes" for run, setting in known]
    causes = [cause for cause in Cause if any(each["cause"] == cause for run, _ in known for each in run["ends"])]

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(2, 1.6 + 0.42 * len(known), sharex=True)
        for axes, at in zip(grid, ("root", "deeper"), strict=True):
            shares = [
                {each["cause"]: 100 * each["share"] for each in run["ends"] if each["at"] == at} for run, _ in known
            ]
            parts = [
                (cause, [found.get(cause, 0.0) for found in shares], theme.colors[number])
                for number, cause in enumerate(causes)
            ]
            stacked(axes, labels if at == "root" else [""] * len(known), parts)
            axes.set_title("at the root: nothing accepted" if at == "root" else "deeper in the tree")
            axes.set_xlabel("of 100 steps")
        handles, names = grid[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
        return figure

    most = []
    for label, (run, _) in zip(labels, known, strict=True):
        worst = max(run["ends"], key=lambda each: each["steps"])
        place = "at the root" if worst["at"] == "root" else "deeper in the tree"
        most.append(f"{label.replace(chr(10), ' ')}: {place}, {worst['cause']} ({100 * worst['share']:.0f} %)")
    headline = f"Where steps end, and why the token that came was not drafted. Most often, {'; '.join(most)}."
    return [Part("ends", draw, tables.ends(result.facts), headline)]
