"""Ranks that draft beside ranks that verify: the simulation by hand, and what lpr.plan says of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lpr.cli.plan import main as plan_main
from lpr.planner import roles
from lpr.planner.facts import KeptState, measured_values
from lpr.planner.roles import Roles, compare, pipelined, read_agreement, roles_of, simulate
from tests.planner.test_prediction import A100, facts_named, setting


def constant(seconds):
    return lambda num_drafted: seconds


def test_a_copy_that_is_never_right_brings_nothing() -> None:
    found = simulate(constant(1.0), 0.25, 0.0, 0.0)
    assert (found.tokens_per_step, found.passes_per_step, found.seconds_per_step) == (1.0, 4.0, 1.0)


@pytest.mark.parametrize("passes", [2, 4, 7])
def test_a_copy_that_is_always_right_brings_a_token_a_pass(passes) -> None:
    found = simulate(constant(1.0), 1.0 / passes, 1.0, 0.0)
    assert found.tokens_per_second == pytest.approx(passes, rel=1e-3)


def test_passes_that_do_not_fit_into_a_step_go_on_in_the_next() -> None:
    found = simulate(constant(1.0), 0.4, 1.0, 0.0)
    assert found.passes_per_step == pytest.approx(2.5, rel=1e-3)


def test_text_alone_brings_what_it_is_measured_to_bring() -> None:
    assert simulate(constant(1.0), 2.0, 0.0, 1.5).tokens_per_step == pytest.approx(2.5, rel=0.03)


def test_a_chain_by_hand() -> None:
    """Two passes a step, no text: behind a step that ends as drafted, probability a, there is a chain of one token.

    A step with a chain ends so if the chain is right as well: of steps the share s = (1 - s) a + s a^2 has a chain.
    """
    share = 0.8
    with_chain = share / (1 + share - share**2)
    found = simulate(constant(1.0), 0.5, share, 0.0, num_steps=200_000)
    assert found.tokens_per_step == pytest.approx(1 + with_chain * share, rel=5e-3)


def test_a_chain_whose_beginning_is_wrong_does_not_stand(monkeypatch) -> None:
    """The seeded fault: what was drafted behind a wrong token counts."""
    right = simulate(constant(1.0), 0.5, 0.5, 0.0).tokens_per_step
    monkeypatch.setattr(roles, "all", lambda known: True, raising=False)
    assert simulate(constant(1.0), 0.5, 0.5, 0.0).tokens_per_step > 1.1 * right


def test_divisions_use_all_gpus_and_hold_the_model() -> None:
    facts, memory = facts_named("llama-2-7b"), A100.gpu.memory
    found = roles_of(facts, 8, memory, "int8", 2)
    assert Roles(4, 4) in found and Roles(4, 1, 4) in found and Roles(2, 2, 3) in found
    assert all(each.verify + each.draft * each.copies == 8 for each in found)
    assert all(each.verify > 1 for each in roles_of(facts, 8, 13 << 30, "int8", 2))
    assert not any(each.draft == 1 for each in roles_of(facts, 8, 7 << 30, "int8", 2))


def test_dearer_collectives_favour_fewer_ranks_that_draft() -> None:
    values = measured_values()
    agreement = read_agreement(values, "int8", 0.8)
    assert agreement.share < read_agreement(values, "int8", 0.0).share < 1
    asked = setting(temperature=0.0)
    slow = roles.Inputs(launch=80e-6)
    assert (
        pipelined(asked, Roles(4, 1), agreement, slow).passes_per_step
        > 1.2 * pipelined(asked, Roles(4, 4), agreement, slow).passes_per_step
    )
    assert compare(replace(asked, facts=replace(asked.facts, low_bit="fp8")), 8, values) == []


def test_a_pass_reads_and_writes_recurrent_states() -> None:
    asked, values = setting(temperature=0.0), measured_values()
    hybrid = replace(asked, facts=replace(asked.facts, states=(KeptState((64, 128, 128), True, 24, ()),)))
    assert {each.roles for each in compare(hybrid, 4, values)} == {each.roles for each in compare(asked, 4, values)}
    seconds = [roles._pass(each, 1, "int8", roles.Inputs()) for each in (asked, hybrid)]
    moved = 3 * 24 * 4 * 64 * 128 * 128
    assert seconds[1] - seconds[0] == pytest.approx(moved / (A100.gpu.bandwidth * roles.Inputs().bandwidth_fraction))


def test_the_plan_shows_them(capsys) -> None:
    assert plan_main(["--model", "llama-2-7b", "--gpus", "8", "--temperature", "0.8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["draft_ranks"]
    rates = [each["tokens_per_second"] for each in found if each["temperature"] == 0.8]
    assert rates == sorted(rates, reverse=True) and {each["form"] for each in found} == {"int8", "int4", "fp8"}
    assert plan_main(["--model", "llama-2-7b", "--gpus", "8"]) == 0
    assert "tp 4 + 1 x draft tp 4" in capsys.readouterr().out
