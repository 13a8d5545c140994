"""Plans as JSON: stable keys, the same for both planners, and nothing lost on the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from types import UnionType
from typing import Any

import planner_models
import pytest
from strata_cases import BIG, GIB, LAPTOP, SMALL, pack, planned, unfit

from strata_jax.errors import FormatError
from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.memory.plan import MemoryPlan, try_plan
from strata_jax.memory.request import PlanRequest
from strata_jax.memory.strata.from_memory_plan import from_memory_plan
from strata_jax.memory.strata.plan_json import from_json, to_json
from strata_jax.memory.strata.request import Card, ExpertTier, GrowSettings, StrataRequest, Version
from strata_jax.memory.strata.result import Layout, StrataPlan
from strata_jax.memory.strata.sizes import pack_sizes
from strata_jax.memory.unfit import Unfit

IQ2_XS, IQ3_XXS, IQ3_S = pack("iq2_xs"), pack("iq3_xxs"), pack("iq3_s")
STABLE: dict[str, set[str] | type | UnionType] = {
    "fits": bool,
    "shortfall_mib": float,
    "expert_cache": {"slots", "bytes", "lent_slots"},
    "prefill": {"chunk_tokens", "buffer_mib", "layout", "ring_slots"},
    "kv": {"mapped_cells", "mapped_mib", "max_cells", "max_mib"},
    "head": {"mib", "aliased"},
    "ram": {"expert_headroom_mib", "conversation_budget_mib", "resident_mib"},
    "free_after_start_mib": float | None,
    "ledger": list,
}


def check_stable(data: dict[str, Any]) -> None:
    for name, kind in STABLE.items():
        if isinstance(kind, set):
            assert kind <= set(data[name]), name
        else:
            assert isinstance(data[name], kind), name


def plans() -> list[StrataPlan]:
    grow = GrowSettings(enabled=True)
    return [
        planned(IQ2_XS, BIG, StrataRequest(grow=grow)),
        planned(IQ3_XXS, LAPTOP, replace(SMALL, head_alias=True)),
        planned(IQ3_XXS, LAPTOP, replace(SMALL, grow=grow)),
        planned(
            IQ3_S, BIG, StrataRequest(version=Version.V0_1_35, tier=ExpertTier.RESIDENT, expert_cache=3_000, own="on")
        ),
        planned(IQ3_S, replace(BIG, ram_bytes=20 * GIB), StrataRequest(tier=ExpertTier.RESIDENT, vram_elastic_mib=512)),
    ]


def xla_plan(**changes: Any) -> MemoryPlan:
    request = PlanRequest(device_budget_bytes=32 * GIB, reserve_bytes=700 * MIB, host_budget_bytes=100 * GIB)
    found = try_plan(planner_models.real(), replace(request, **changes))
    assert isinstance(found, MemoryPlan)
    return found


@pytest.mark.parametrize("idx", range(5))
def test_a_plan_survives_json(idx: int) -> None:
    plan = plans()[idx]
    data = json.loads(json.dumps(to_json(plan)))
    assert from_json(data) == plan
    assert from_json(data | {"schema_version": 1}) == plan, "as a run writes it"
    check_stable(data)


def test_the_groups_say_what_the_plan_holds() -> None:
    plan = plans()[1]
    data = to_json(plan)
    assert data["expert_cache"] == {"slots": plan.slots, "bytes": plan.cache_bytes, "lent_slots": plan.slots - 1}
    assert data["prefill"]["layout"] == "hybrid"
    assert data["prefill"]["chunk_tokens"] == 2_048
    assert data["head"] == {"mib": IQ3_XXS.head_bytes / MIB, "aliased": True}
    assert data["overcommit_mib"] == plan.peak_overcommit_bytes / MIB > 0
    grown = to_json(plans()[0])["kv"]
    assert (grown["mapped_cells"], grown["max_cells"], grown["mapped_mib"]) == (16_384, 262_144, 260.0)
    assert grown["max_mib"] == 26 * 66 * 2


def test_a_plan_that_does_not_fit_says_so_under_the_same_keys() -> None:
    found = unfit(IQ2_XS, replace(BIG, vram_bytes=6 * GIB), StrataRequest())
    data = json.loads(json.dumps(found.to_json()))
    check_stable(data)
    assert data["expert_cache"]["slots"] is data["free_after_start_mib"] is None, "nothing has been decided"
    assert data["fits"] is False
    assert data["shortfall_mib"] == found.shortfall_bytes / MIB > 0
    assert data["message"] == found.message()
    assert len(data["owners"]) == 3
    assert data["ledger"]


@pytest.mark.parametrize("data", [{}, {"request": {}}, {"card": {"name": "x"}, "request": {"version": "later"}}])
def test_other_data_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="not a plan that memory_model=strata"):
        from_json(data)


class TestOtherPlanner:
    """The planner of this project's own engine writes the same keys."""

    def test_stable_keys(self) -> None:
        data = json.loads(json.dumps(xla_plan().to_json()))
        check_stable(data)
        assert data["prefill"]["layout"] == "own"
        failed = try_plan(planner_models.real(), PlanRequest(device_budget_bytes=GIB))
        assert isinstance(failed, Unfit)
        check_stable(json.loads(json.dumps(failed.to_json())))
        assert data["free_after_start_mib"] == data["free_after_start_by_limit_mib"]["device memory"]

    def test_without_device_memory_the_hosts_counts(self) -> None:
        data = xla_plan(device_budget_bytes=None, shared_memory=True).to_json()
        assert data["free_after_start_mib"] == data["free_after_start_by_limit_mib"]["host memory"]

    def test_policies_and_the_simulator_read_it_as_a_strata_plan(self) -> None:
        geometry, made = planner_models.real(), xla_plan()
        card = Card("32 GB", 32 * GIB, ram_bytes=100 * GIB)
        plan = from_memory_plan(geometry, pack_sizes(geometry), made, card)
        assert (plan.slots, plan.prompt.chunk_tokens) == (made.expert_slots, made.chunk_tokens)
        assert plan.kv_mapped_cells == made.context_cells
        assert plan.prompt.layout is Layout.OWN
        assert plan.prompt.first_lent == plan.slots
        taken = made.ledger.total_bytes(Phase.START, Memory.DEVICE)
        reserve = made.ledger.owner_bytes(Phase.START, Memory.DEVICE)[Owner.RESERVE]
        assert plan.free_after_start_bytes == card.vram_bytes - taken + reserve
        assert from_json(to_json(plan)) == plan
