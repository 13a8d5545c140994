"""Plans that do not fit: the numbers of the message; every value it names fits and is the largest that does."""

from __future__ import annotations

import json
from dataclasses import replace

import planner_models
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.kv_types import KV_TYPES
from strata_jax.memory.frame import make_frame
from strata_jax.memory.ledger import MIB, Ledger, Memory, Owner
from strata_jax.memory.plan import MemoryPlan, plan, try_plan
from strata_jax.memory.request import PlanRequest
from strata_jax.memory.sizes import model_sizes
from strata_jax.memory.unfit import Unfit

REAL, SMALL = planner_models.real(), planner_models.small()
GIB = 2**30
CARD = PlanRequest(device_budget_bytes=16 * GIB, reserve_bytes=700 * MIB, host_budget_bytes=100 * GIB)

TIGHT = st.builds(
    PlanRequest,
    context_cells=st.none() | st.integers(100, 4096),
    chunk_tokens=st.none() | st.integers(1, 700),
    expert_slots=st.none() | st.integers(0, 80),
    kv_type=st.sampled_from(KV_TYPES),
    spec_window=st.sampled_from((1, 4)),
    device_budget_bytes=st.integers(0, 12 * MIB),
    reserve_bytes=st.integers(0, 2 * MIB),
    host_budget_bytes=st.none() | st.integers(0, 8 * MIB),
    shared_memory=st.booleans(),
)


def unfit(request: PlanRequest) -> Unfit:
    found = try_plan(REAL, request)
    assert isinstance(found, Unfit)
    return found


def fits(request: PlanRequest) -> bool:
    return isinstance(try_plan(SMALL, request), MemoryPlan)


@settings(max_examples=60, deadline=None)
@given(request=TIGHT)
def test_every_value_named_fits_and_the_next_larger_does_not(request: PlanRequest) -> None:
    try:
        found = try_plan(SMALL, request)
    except ConfigError:  # more slots than experts once drafts are off
        assume(False)
        return
    assume(isinstance(found, Unfit))
    assert isinstance(found, Unfit)
    assert found.shortfall_bytes > 0
    if found.largest_context is not None:
        assert fits(replace(request, context_cells=found.largest_context))
        assert not fits(replace(request, context_cells=found.largest_context + 1))
    if found.largest_chunk is not None:
        assert fits(replace(request, chunk_tokens=found.largest_chunk))
        assert not fits(replace(request, chunk_tokens=found.largest_chunk + 1))
    if found.largest_slots is not None:
        assert fits(replace(request, expert_slots=found.largest_slots))
        assert not fits(replace(request, expert_slots=found.largest_slots + 1))
    for text in (*found.alternatives, *found.enough_alone()):
        assert fits(typed(request, [text])), text
    if found.together:
        assert fits(typed(request, list(found.together)))
        assert not found.enough_alone()
    json.dumps(found.to_json())


def typed(request: PlanRequest, texts: list[str]) -> PlanRequest:
    """Apply settings as a user would type them."""
    fields = {"model.max_context": "context_cells", "prefill.chunk": "chunk_tokens", "cache.slots": "expert_slots"}
    fields |= {"spec.window": "spec_window"}
    for text in texts:
        key, value = text.split("=")
        if key == "kv.type":
            request = replace(request, kv_type=value)
        elif key == "hardware.vram_reserve_mib":
            request = replace(request, reserve_bytes=int(value) * MIB)
        else:
            changes: dict = {fields[key]: int(value)}
            request = replace(request, **changes)
    return request


@settings(max_examples=40, deadline=None)
@given(request=TIGHT)
def test_the_shortfall_is_exactly_what_more_memory_must_add(request: PlanRequest) -> None:
    request = replace(
        request, expert_slots=20, context_cells=1000, chunk_tokens=64, host_budget_bytes=None, shared_memory=False
    )
    found = try_plan(SMALL, request)
    assume(isinstance(found, Unfit))
    assert isinstance(found, Unfit)
    assert request.device_budget_bytes is not None
    enough = request.device_budget_bytes + found.shortfall_bytes
    assert fits(replace(request, device_budget_bytes=enough))
    assert not fits(replace(request, device_budget_bytes=enough - 1))


@pytest.mark.parametrize(("field", "point"), [("chunk_tokens", (1001, 63, 20)), ("context_cells", (1000, 64, 20))])
def test_the_next_smaller_value_is_found_where_it_fits(field: str, point: tuple[int, int, int]) -> None:
    frame = make_frame(model_sizes(SMALL), PlanRequest(kv_type="f32", page_bytes=2048, device_budget_bytes=GIB))
    budget = Ledger(frame.entries(*point)).peak(Memory.DEVICE)[1]
    request = replace(frame.request, context_cells=1001, chunk_tokens=64, expert_slots=20, device_budget_bytes=budget)
    found = try_plan(SMALL, request)
    assert isinstance(found, Unfit)
    assert {"chunk_tokens": found.largest_chunk, "context_cells": found.largest_context}[field] in point


def test_P17_fixed_slots_that_do_not_fit_stop_and_are_named() -> None:
    found = unfit(replace(CARD, expert_slots=9000))
    assert found.given == ("cache.slots=9000",)
    text = found.message()
    assert "Fixed by you: cache.slots=9000" in text
    assert f"{found.shortfall_bytes / MIB:,.1f} MiB" in text
    assert found.owners[0][0] is Owner.EXPERT_SLOTS
    assert f"cache.slots={found.largest_slots}" in text
    with pytest.raises(DoesNotFit) as caught:
        plan(REAL, replace(CARD, expert_slots=9000))
    assert caught.value.shortfall_bytes == found.shortfall_bytes
    assert str(caught.value) == text


def test_P10_weights_above_the_budget_name_who_takes_the_memory_largest_first() -> None:
    found = unfit(replace(CARD, device_budget_bytes=4 * GIB, expert_slots=1024, context_cells=32_768))
    sizes = [num_bytes for _, num_bytes in found.owners]
    assert sizes == sorted(sizes, reverse=True)
    assert [owner for owner, _ in found.owners][:2] == [Owner.DENSE, Owner.EXPERT_SLOTS]
    text = found.message()
    order = [text.index(str(owner)) for owner, _ in found.owners]
    assert order == sorted(order)
    assert found.enough_alone() == ()
    assert found.together == ()
    assert "the least that this model needs is" in text
    assert "hardware.vram_mib" in text
    assert "model.path" in text
    least = replace(CARD, device_budget_bytes=found.smallest_bytes, context_cells=8, chunk_tokens=1, expert_slots=0)
    assert isinstance(try_plan(REAL, least), MemoryPlan)


def test_settings_that_only_help_together_are_named_together() -> None:
    frame = make_frame(model_sizes(REAL), replace(CARD, device_budget_bytes=100 * GIB))
    small = frame.entries(4096, 8, 0)
    budget = sum(e.peak_bytes for e in small if e.memory is Memory.DEVICE)
    request = replace(CARD, device_budget_bytes=budget, context_cells=262_144, chunk_tokens=512, expert_slots=5000)
    found = unfit(request)
    assert found.enough_alone() == ()
    assert {text.split("=")[0] for text in found.together} == {"cache.slots", "prefill.chunk", "model.max_context"}
    assert "Enough together (checked): cache.slots=0 prefill.chunk=8 model.max_context=" in found.message()
    assert isinstance(try_plan(REAL, typed(request, list(found.together))), MemoryPlan)


def test_a_smaller_kv_type_is_offered_where_it_is_enough() -> None:
    frame = make_frame(model_sizes(REAL), replace(CARD, kv_type="int8"))
    need = sum(e.peak_bytes for e in frame.entries(262_144, 512, 1000) if e.memory is Memory.DEVICE)
    request = replace(CARD, kv_type="f16", context_cells=262_144, chunk_tokens=512, expert_slots=1000)
    found = unfit(replace(request, device_budget_bytes=need))
    assert "kv.type=int8" in found.alternatives


def test_a_bank_above_the_ram_is_about_host_memory() -> None:
    found = unfit(replace(CARD, host_budget_bytes=32 * GIB))
    assert found.shortfall.limit.name == "host memory"
    assert found.owners[0][0] is Owner.BANK
    assert found.shortfall_bytes == found.owners[0][1] - 32 * GIB
    assert "hardware.ram_mib" in found.message()


def test_a_context_that_the_workload_needs_is_not_offered_for_reduction() -> None:
    request = replace(CARD, expert_slots=5000, workload_cells=200_000)
    found = unfit(replace(request, device_budget_bytes=8 * GIB))
    assert found.largest_context is None


def test_a_smaller_reserve_is_offered_in_whole_mib_where_it_is_enough() -> None:
    made = plan(REAL, CARD)
    tight = replace(CARD, expert_slots=made.expert_slots + 40, context_cells=262_144, chunk_tokens=512)
    found = unfit(tight)
    (offer,) = [text for text in found.alternatives if text.startswith("hardware.vram_reserve_mib")]
    mib = int(offer.split("=")[1])
    assert isinstance(try_plan(REAL, replace(tight, reserve_bytes=mib * MIB)), MemoryPlan)
    assert isinstance(try_plan(REAL, replace(tight, reserve_bytes=(mib + 1) * MIB)), Unfit)
