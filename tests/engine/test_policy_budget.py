"""A budget that fits only with a policy: the planner refuses it without, and the engine keeps to it with the policy.

A CPU has no allocator to cap, so what is compared with the budget is the bytes of the engine's device arrays while a
prompt is read and, on top, the temporaries that the plan counts for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.runtime import Runtime
from strata_jax.engine.session import ChunkRecord, Session
from strata_jax.errors import DoesNotFit
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.ledger import PHASES, Memory, Owner, Phase
from strata_jax.memory.plan import MemoryPlan, plan, try_plan
from strata_jax.memory.request import PlanRequest
from tests.engine.policy_runs import REQUEST, SMALL, planned, settings_of, tokens
from tests.oracle.models import ModelStore

PROMPT = tokens(90, 4)
# without drafts there are fewer programs to compile
WITHOUT = PlanRequest(**(REQUEST | {"spec_window": 1}), expert_slots=28)


@pytest.fixture(scope="module")
def path(models: ModelStore) -> Path:
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL)


def least_budget(geometry: Geometry, request: PlanRequest) -> int:
    """The smallest budget that a request's plan fits into."""
    low, high = 0, 2**30
    while high - low > 1:
        middle = (low + high) // 2
        fits = isinstance(try_plan(geometry, replace(request, device_budget_bytes=middle)), MemoryPlan)
        low, high = (low, middle) if fits else (middle, high)
    return high


def peak_bytes(path: Path, made: MemoryPlan, policies: Sequence[str]) -> int:
    """The most that arrays and planned temporaries take while a prompt is read."""
    file = open_gguf(path)
    engine = Engine.load(file, Geometry.from_gguf(file), made)
    temporaries = made.ledger.owner_bytes(Phase.PREFILL, Memory.DEVICE)[Owner.PROMPT_BUFFERS]
    known: dict[int, weakref.ref[jax.Array]] = {}
    found: list[int] = []

    def look(record: ChunkRecord | None = None) -> None:
        """Add up the arrays that the engine has had and that are still there."""
        state = engine.owner.state if isinstance(engine.owner, Session) else ()
        for x in jax.tree.leaves((engine.weights, engine.tables, engine.arrays, state)):
            known[id(x)] = weakref.ref(x)
        there = [x for ref in known.values() if (x := ref()) is not None and not x.is_deleted()]
        found.append(sum(x.nbytes for x in there) + temporaries * (record is not None))

    look()
    runtime = Runtime.start(engine, settings_of(policies), check=True)
    runtime.finish(runtime.read(PROMPT, conversation="a", on_chunk=look))
    assert len(found) > 6
    return max(found)


@pytest.fixture(scope="module")
def peak_without(path: Path) -> int:
    """The most that the engine takes where nothing moves."""
    return peak_bytes(path, plan(Geometry.from_gguf(open_gguf(path)), WITHOUT), ())


@pytest.mark.parametrize(
    "policies",
    [("borrow",), ("head_alias",), ("kv_grow",)],
    ids="+".join,
)
def test_the_engine_keeps_to_a_budget_that_is_refused_without_the_policy(
    path: Path, peak_without: int, policies: tuple[str, ...]
) -> None:
    geometry = Geometry.from_gguf(open_gguf(path))
    on = replace(WITHOUT, moving=planned(path, policies).request.moving)
    budget = least_budget(geometry, on)
    made = plan(geometry, replace(on, device_budget_bytes=budget))
    planned_bytes = max(made.ledger.total_bytes(phase, Memory.DEVICE) for phase in PHASES)
    assert planned_bytes <= budget
    with pytest.raises(DoesNotFit):
        plan(geometry, replace(WITHOUT, device_budget_bytes=budget))
    assert peak_bytes(path, made, policies) <= budget
    assert peak_without > budget
