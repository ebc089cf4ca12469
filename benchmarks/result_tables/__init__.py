"""Results as tables of text: what a benchmark shows on stderr and what the report shows beside its pictures.

`tables_of(result)` is all that others need: the tables of a known benchmark, or every value of an unknown one.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.result_tables.parts import Json, Table, distinct, every_value
from benchmarks.result_tables.predicted import check, predictions
from benchmarks.result_tables.steps import (
    data_sets,
    depths,
    ends,
    limits,
    peers,
    replay,
    replayed_peers,
    scaling,
    sources,
    speedup,
)
from benchmarks.result_tables.times import collective, decode, fleet, host, races, sizes, step_costs, step_parts, traps
from benchmarks.result_tables.under_load import homes, loads, served, shared_drafts, simulated_loads, soak


def tables_of(facts: Json) -> list[Table]:
    """The tables of a result."""
    make = TABLES.get(str(facts.get("benchmark", "")))
    return make(facts) if make is not None else every_value(facts)


TABLES: dict[str, Callable[[Json], list[Table]]] = {
    "homes": lambda facts: [homes(facts)],
    "strong_scaling": lambda facts: [scaling(facts), speedup(facts)],
    "ablation": lambda facts: [sources(facts), depths(facts), *([limits(facts)] if limits(facts).rows else [])],
    "data_sets": lambda facts: [
        data_sets(facts),
        data_sets(facts, is_straight=True),
        *([replayed_peers(facts)] if facts.get("peers") else []),
    ],
    "replay": lambda facts: [replay(facts), *([ends(facts)] if ends(facts).rows else [])],
    "decode": lambda facts: [decode(facts)],
    "adaptive": lambda facts: [races(facts), traps(facts)],
    "sizes": lambda facts: [sizes(facts)],
    "host": lambda facts: [host(facts)],
    "step": lambda facts: [step_costs(facts), collective(facts), step_parts(facts)],
    "serve": lambda facts: [loads(facts)],
    "serve_simulated": lambda facts: [served(each, facts) for each in distinct(facts["runs"], "temperature")],
    "plan_service": lambda facts: [simulated_loads(facts)],
    "soak": soak,
    "shared_drafts": shared_drafts,
    "fleet": lambda facts: [fleet(facts)],
    "peers": lambda facts: [peers(facts)],
    "simulate": lambda facts: [check(facts), *(predictions(gpu, facts) for gpu in distinct(facts["models"], "gpu"))],
}
