"""`kv.resident_cells` in the plan: what it costs where, which windows are large enough, and what it contradicts."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import planner_models
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata_jax.errors import ConfigError
from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.memory.plan import MemoryPlan, plan, try_plan
from strata_jax.memory.request import MovingMemory, PlanRequest
from strata_jax.memory.unfit import Unfit

SMALL = planner_models.small("F32")
BASE = PlanRequest(context_cells=2048, chunk_tokens=64, kv_type="f32", page_bytes=5120, expert_slots=20)


def windowed(cells: int, request: PlanRequest = BASE, **moving: object) -> PlanRequest:
    return replace(request, moving=replace(request.moving, resident_cells=cells, **moving))


def kv_bytes(made: MemoryPlan, memory: Memory) -> int:
    return made.ledger.owner_bytes(Phase.DECODE, memory).get(Owner.KV, 0)


@pytest.mark.parametrize("cells", [80, 100, 512, 2000])
def test_the_device_holds_the_window_and_host_memory_every_cell(cells: int) -> None:
    whole, made = plan(SMALL, BASE), plan(SMALL, windowed(cells))
    groups = -(-cells // made.cells_per_page)
    assert made.mapped_cells == groups * made.cells_per_page >= cells
    assert kv_bytes(made, Memory.DEVICE) == made.num_kv_layers * groups * made.page_bytes
    assert kv_bytes(made, Memory.HOST) == made.num_kv_layers * made.kv_pages_per_layer * made.page_bytes
    assert kv_bytes(whole, Memory.DEVICE) == kv_bytes(made, Memory.HOST)
    assert whole.arena_bytes - made.arena_bytes == kv_bytes(whole, Memory.DEVICE) - kv_bytes(made, Memory.DEVICE)
    start = made.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    assert made.arena_bytes == start[Owner.EXPERT_SLOTS] + start[Owner.KV]
    assert made.keeps_cells_in_host
    assert made.arena.has_window
    data = made.to_json()
    assert data["kv"]["mapped_mib"] * MIB == kv_bytes(made, Memory.DEVICE)
    assert data["kv"]["max_mib"] * MIB == kv_bytes(whole, Memory.DEVICE)
    assert f"kv.resident_cells={cells:,}: the last {made.mapped_cells:,} of 2,048 cells" in " ".join(made.notes)
    assert MemoryPlan.from_json(json.loads(json.dumps(data))) == made
    assert plan(SMALL, made.as_request()) == made


@pytest.mark.parametrize("cells", [2041, 2048, 10_000])
def test_a_window_as_long_as_the_context_changes_nothing(cells: int) -> None:
    whole, made = plan(SMALL, BASE), plan(SMALL, windowed(cells))
    assert made.ledger == whole.ledger
    assert replace(made.arena, has_window=False) == whole.arena
    assert not made.keeps_cells_in_host
    assert f"kv.resident_cells={cells:,}: the context has 2,048 cells, all of them are on the device" in made.notes


@pytest.mark.parametrize(
    ("chunk", "window", "cells"), [(64, 4, 64), (64, 4, 1), (8, 4, 8), (2, 8, 1), (500, 1, 500), (2048, 4, 1024)]
)
def test_a_window_that_is_too_small_is_refused_with_what_would_work(chunk: int, window: int, cells: int) -> None:
    request = windowed(cells, replace(BASE, chunk_tokens=chunk, spec_window=window))
    with pytest.raises(ConfigError, match=rf"kv\.resident_cells={cells} and ") as caught:
        plan(SMALL, request)
    message = str(caught.value)
    least = int(re.findall(r"Set kv\.resident_cells=(\d+)", message)[0])
    made = plan(SMALL, windowed(least, request))
    assert made.keeps_cells_in_host == (least > 0)
    if least:
        below = replace(made.request, moving=MovingMemory(resident_cells=least - made.cells_per_page))
        with pytest.raises(ConfigError):
            plan(SMALL, below)
    smaller = re.findall(r"prefill\.chunk=(\d+) or less", message)
    if smaller:
        plan(SMALL, replace(request, chunk_tokens=int(smaller[0])))
        with pytest.raises(ConfigError):
            plan(SMALL, replace(request, chunk_tokens=int(smaller[0]) + 1))
    else:
        assert "spec.window" in message


def test_auto_takes_no_larger_chunk_than_the_window_holds() -> None:
    free = plan(SMALL, replace(BASE, chunk_tokens=None))
    made = plan(SMALL, windowed(100, replace(BASE, chunk_tokens=None)))
    assert made.chunk_tokens == 64 < free.chunk_tokens
    assert "prefill.chunk=64: the largest that kv.resident_cells=100 holds beside a page" in made.notes


def test_a_budget_that_fits_only_with_the_window_names_it() -> None:
    needs = plan(SMALL, windowed(80)).ledger
    device = max(needs.total_bytes(phase, Memory.DEVICE) for phase in Phase)
    tight = replace(BASE, device_budget_bytes=device)
    assert isinstance(try_plan(SMALL, windowed(80, tight)), MemoryPlan)
    unfit = try_plan(SMALL, tight)
    assert isinstance(unfit, Unfit)
    offered = [text for text in unfit.alternatives if text.startswith("kv.resident_cells=")]
    assert len(offered) == 1
    plan(SMALL, windowed(int(offered[0].partition("=")[2]), tight))


def test_host_memory_is_asked_for_the_cells_too() -> None:
    made = plan(SMALL, windowed(80))
    host = max(made.ledger.total_bytes(phase, Memory.HOST) for phase in Phase)
    budgets = {"device_budget_bytes": 100 * MIB, "host_budget_bytes": host}
    plan(SMALL, windowed(80, replace(BASE, **budgets)))
    unfit = try_plan(SMALL, windowed(80, replace(BASE, **(budgets | {"host_budget_bytes": host - 1}))))
    assert isinstance(unfit, Unfit)
    assert unfit.shortfall.limit.name == "host memory"


def test_growth_and_a_window_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"kv\.resident_cells=80 and policy\.kv_grow\.enabled=true"):
        plan(SMALL, windowed(80, grow_init_cells=16))
    with pytest.raises(ConfigError, match=r"kv\.resident_cells=-1: must be at least 0"):
        plan(SMALL, windowed(-1))


@settings(max_examples=100, deadline=None)
@given(
    cells=st.integers(1, 3000), chunk=st.none() | st.integers(8, 512), context=st.integers(16, 3000),
    slots=st.none() | st.integers(0, 64), page=st.sampled_from((2048, 5120)), lend=st.booleans(),
    alias=st.booleans(), budget=st.none() | st.integers(5 * MIB, 20 * MIB),
)  # fmt: skip
def test_plans_with_a_window_keep_their_accounts(
    cells: int, chunk: int | None, context: int, slots: int | None, page: int, lend: bool, alias: bool,
    budget: int | None,
) -> None:  # fmt: skip
    request = replace(
        BASE, context_cells=context, chunk_tokens=chunk, expert_slots=slots, page_bytes=page,
        device_budget_bytes=budget,
        moving=MovingMemory(lend=lend, head_alias=alias, own="off", resident_cells=cells),
    )  # fmt: skip
    try:
        made = try_plan(SMALL, request)
    except ConfigError as error:
        assert "kv.resident_cells" in str(error)  # noqa: PT017
        return
    assume(isinstance(made, MemoryPlan))
    assert isinstance(made, MemoryPlan)
    start = made.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    assert made.arena_bytes == start[Owner.EXPERT_SLOTS] + start[Owner.KV]
    assert plan(SMALL, made.as_request()) == made
    if made.keeps_cells_in_host:
        assert made.mapped_cells >= made.chunk_tokens + made.cells_per_page
