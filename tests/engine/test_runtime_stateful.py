"""A small number of the operations of which `bench/soak.py` does more than a thousand: see `policy_machine`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from strata_jax.policies.moves import MoveKind
from tests.engine.policy_machine import CONFIGURATIONS, FAULT_POINTS, Agents, Ask, Machine, Point, Tally
from tests.engine.policy_runs import SMALL, Engines, tokens
from tests.oracle.models import ModelStore

RUNS = {"all": 5, "under the loan": 4}  # windows of cells and segments that come and go are left to the long run


@pytest.fixture(scope="module")
def engines(models: ModelStore) -> Engines:
    return Engines(models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL), spec_window=2)


@pytest.mark.parametrize("name", RUNS)
def test_random_operations_change_no_bit_and_leave_nothing_behind(engines: Engines, name: str) -> None:
    tally = Tally()
    policies = tuple(policy for policy in CONFIGURATIONS[name] if policy != "vram_elastic")
    machine = type("Operations", (Machine,), {"engines": engines, "policies": policies, "tally": tally})
    how = settings(
        max_examples=RUNS[name], stateful_step_count=12, deadline=None, derandomize=True, database=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=how)
    assert set(tally.points) <= set(FAULT_POINTS)
    assert tally.compared >= 2 * RUNS[name]
    assert (tally.differences, tally.arrays_left, tally.bytes_left) == (0, 0, 0)
    assert sum(tally.faults.values()) > 3
    assert len(tally.moves) > 10


@dataclass(frozen=True)
class Found:
    """Requests of which one meets a fault, as the first long runs had them.

    Attributes:
        asks: conversations and their fresh tokens. at: the one that meets the fault, and that cancels its prompt.
        fault: how many times, where. has_ram: whether anything is parked.
    """

    asks: str
    at: int
    fault: tuple[int, Point]
    has_ram: bool = True
    cancel_at: int | None = None
    configuration: str = "all"


FOUND = {
    "a refill that has copied and not published": Found("a44 b100 b30", 1, (1, (MoveKind.REFILL, "copied"))),
    "slots emptied for cells that were not mapped, then a trim": Found(
        "a180 b20 a20", 0, (2, (MoveKind.MAP_CELLS, "prepared"))
    ),
    "a conversation neither parked nor replaced, its cells trimmed": Found(
        "a250 b20 a20", 1, (1, (MoveKind.REFILL, "prepared")), has_ram=False
    ),
    "a trim that has moved pages over the cells it was to give up": Found(
        "a150 b230 a20 b44 a20 b20", 4, (1, (MoveKind.TRIM_CELLS, "prepared")), has_ram=False
    ),
    "a cancelled prompt that could not return its loan, then growth into it": Found(
        "a100 b300 a20", 0, (1, (MoveKind.RETURN, "prepared")), cancel_at=2, configuration="under the loan"
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_long_runs_have_found_stays_mended(engines: Engines, name: str) -> None:
    found = FOUND[name]
    policies = tuple(policy for policy in CONFIGURATIONS[found.configuration] if policy != "vram_elastic")
    agents = Agents(engines, policies, Tally())
    agents.available = agents.available if found.has_ram else None
    for idx, text in enumerate(found.asks.split()):
        who, fresh = text[0], tokens(int(text[1:]), idx + 1)
        faults = ((*found.fault, False),) if idx == found.at else ()
        cancel_at = found.cancel_at if idx == found.at else None
        output = 64 if len(fresh) > 100 else 16
        agents.serve(Ask(who, (who, 8), fresh, output, cancel_at=cancel_at, faults=faults))
        agents.check()
    assert agents.tally.requests["injected"] == 1
    agents.leave()


def test_a_parked_conversation_that_continues_a_longer_one_finds_cells_for_it(engines: Engines) -> None:
    agents = Agents(engines, tuple(policy for policy in CONFIGURATIONS["all"] if policy != "vram_elastic"), Tally())
    for who, of, count in (("c", "c", 30), ("a", "a", 250), ("b", "b", 20), ("c", "a", 20)):
        agents.serve(Ask(who, (of, 8), tokens(count, 1), 8))
        agents.check()
    assert agents.tally.reused["parked"] == 1
    agents.leave()
