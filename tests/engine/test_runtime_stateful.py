"""A small number of the operations of which `bench/soak.py` does more than a thousand: see `policy_machine`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.policy_machine import CONFIGURATIONS, FAULT_POINTS, Machine, Tally
from tests.engine.policy_runs import SMALL, Engines
from tests.oracle.models import ModelStore

RUNS = {"all": 6, "under the loan": 4}  # windows of cells and segments that come and go are left to the long run


@pytest.fixture(scope="module")
def engines(models: ModelStore) -> Engines:
    return Engines(models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL))


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
