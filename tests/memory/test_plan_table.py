"""The plan as rows and as text: nothing is lost, the sums are the ledger's."""

from __future__ import annotations

import planner_models

from strata_jax.memory.ledger import MIB, PHASES, Ledger, Memory, Origin, Owner, always
from strata_jax.memory.plan import plan, try_plan
from strata_jax.memory.request import PlanRequest
from strata_jax.memory.table import ledger_rows, plan_table, plan_text
from strata_jax.memory.unfit import Unfit

GIB = 2**30
REQUEST = PlanRequest(device_budget_bytes=16 * GIB, reserve_bytes=700 * MIB, host_budget_bytes=100 * GIB)


def test_rows_of_owners_and_of_items_sum_to_the_ledger() -> None:
    made = plan(planner_models.real(), REQUEST)
    for detail in (False, True):
        rows = plan_table(made, detail=detail)
        for idx, phase in enumerate(PHASES):
            for memory in Memory:
                owners = sum(r.phase_bytes[idx] for r in rows if r.origin is not None and r.memory == memory)
                assert owners == made.ledger.total_bytes(phase, memory)


def test_the_last_rows_say_what_is_left_of_each_budget() -> None:
    made = plan(planner_models.real(), REQUEST)
    total, left = [row for row in plan_table(made) if row.memory == "device"][-2:]
    assert (total.name, left.name) == ("sum, device memory", "left")
    assert [a + b for a, b in zip(total.phase_bytes, left.phase_bytes)] == [16 * GIB] * 4


def test_an_owner_is_as_certain_as_its_least_certain_item() -> None:
    rows = {row.name: row for row in plan_table(plan(planner_models.real(), REQUEST))}
    assert rows["reserve"].origin is Origin.GIVEN
    assert rows["K/V"].origin is Origin.COMPUTED
    assert rows["prompt buffers"].origin is Origin.ESTIMATED
    given = always(Owner.TABLES, "a", 1, "", origin=Origin.GIVEN)
    guessed = always(Owner.TABLES, "b", 1, "", origin=Origin.ESTIMATED)
    assert ledger_rows(Ledger((given, guessed)), ())[0].origin is Origin.ESTIMATED


def test_text_has_a_line_per_owner_and_the_notes() -> None:
    made = plan(planner_models.real(), REQUEST)
    text = plan_text(made)
    lines = text.splitlines()
    assert " ".join(lines[0].split()) == "owner memory start MiB prefill MiB decode MiB park MiB from"
    assert any(line.startswith("expert slots") and line.endswith("computed") for line in lines)
    for note in made.notes:
        assert f"- {note}" in lines
    assert not any(line.endswith(" ") for line in lines)


def test_an_unfit_request_shows_its_ledger_and_its_message() -> None:
    found = try_plan(planner_models.real(), PlanRequest(device_budget_bytes=4 * GIB))
    assert isinstance(found, Unfit)
    text = plan_text(found)
    assert found.message() in text
    assert f"{-found.shortfall_bytes / MIB:,.2f}" in text
