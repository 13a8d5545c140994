"""Elastic cache: whole segments from the end, the floor, and the same experts back in the same slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_models as pm
import pytest

from strata_jax.memory.ledger import MIB
from strata_jax.memory.strata.cache import MIN_KEPT_SLOTS
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import PolicyParameters
from strata_jax.policies.stack import policy_stack

ELASTIC = {"vram_elastic_mib": 512}


def test_published_segments_of_the_24_gib_card() -> None:
    """h3090-elastic.plan: 7,795 slots in 15,136 MiB become 2,870 in 5,632 MiB, which are 11 segments."""
    budget = 15_136 * MIB // pm.sizes_of("iq3_s").max_blob_bytes
    stack = pm.make_stack("iq3_s", pm.card(32_000), expert_cache=budget, reserve_mib=700, **ELASTIC)
    state = pm.ready(stack)
    assert state.slots.total_bytes == pytest.approx(15_136 * MIB, rel=0.001)
    # 10,285 MiB were free afterwards at the least, so 781 MiB before
    state = replace(state, free_bytes=781 * MIB)
    step = stack.on_vram_change(state, 10_240 * MIB)
    kept = state.slots.total_bytes - sum(m.bytes for m in step.moves)
    assert kept == 11 * 512 * MIB
    assert step.state.slots.num_present == pytest.approx(2_870, rel=0.015)
    assert step.state.free_bytes >= 10_240 * MIB


def test_the_last_segments_go_first_and_no_more_than_needed() -> None:
    stack = pm.make_stack(**ELASTIC)
    state = pm.ready(stack)
    step = pm.checked(stack, stack.on_vram_change(state, state.free_bytes + 1_000 * MIB))
    moves = [m for m in step.moves if m.kind is MoveKind.GIVE_SEGMENT]
    assert [m.first for m in moves] == sorted((m.first for m in moves), reverse=True)
    assert moves[0].last == state.slots.num_slots
    assert sum(m.bytes for m in moves) >= 1_000 * MIB > sum(m.bytes for m in moves[:-1])
    assert step.state.slots.offset_bytes[step.state.slots.num_present] <= state.slots.total_bytes - sum(
        m.bytes for m in moves
    )


def test_the_floor_is_128_slots_and_a_loan_for_256_tokens() -> None:
    stack = pm.make_stack(**ELASTIC)
    step = pm.checked(stack, stack.on_vram_change(pm.ready(stack), 10**12))
    slots = step.state.slots
    loan = slots.loan_first(stack.ctx.buffer_bytes(256))
    assert loan is not None
    assert loan >= MIN_KEPT_SLOTS
    one_more = int(slots.offset_bytes[slots.num_present]) - 512 * MIB
    assert one_more < stack.ctx.buffer_bytes(256) + int(slots.offset_bytes[MIN_KEPT_SLOTS]) + 512 * MIB
    assert step.state.chunk_tokens >= 256
    facts = pm.ask("a", 5_000)
    pm.checked(stack, stack.before_read(step.state, facts, 5_000))


def test_the_loan_is_planned_again_within_its_share() -> None:
    stack = pm.make_stack(**ELASTIC)
    state = pm.ready(stack)
    step = stack.on_vram_change(state, state.free_bytes + 3_000 * MIB)
    slots = step.state.slots
    assert 256 <= step.state.chunk_tokens < state.chunk_tokens
    assert step.state.chunk_tokens % 256 == 0
    assert slots.num_present - slots.top <= 0.9 * slots.num_present
    assert slots.lendable_bytes(slots.top) >= stack.ctx.buffer_bytes(step.state.chunk_tokens)
    larger = stack.ctx.buffer_bytes(step.state.chunk_tokens + 256)
    assert slots.lendable_bytes(slots.num_present - slots.num_present * 90 // 100) < larger


def test_segments_come_back_with_the_same_experts_in_the_same_slots() -> None:
    stack = pm.make_stack(**ELASTIC)
    state = pm.ready(stack)
    wish = state.free_bytes
    away = stack.on_vram_change(state, wish + 2_000 * MIB).state
    assert len(away.resident_ranks()) < len(state.resident_ranks())
    back = pm.checked(stack, stack.on_vram_change(away, wish))
    assert pm.kinds(back.moves) == [MoveKind.TAKE_SEGMENT, MoveKind.REFILL] * away.segments_given
    assert np.array_equal(back.state.slots.occupant, state.slots.occupant)
    assert (back.state.slots.top, back.state.chunk_tokens) == (state.slots.top, state.chunk_tokens)
    assert back.state.free_bytes == state.free_bytes


def test_an_expert_that_found_another_slot_meanwhile_does_not_come_twice() -> None:
    stack = pm.make_stack("iq2_xs", **ELASTIC)
    state = pm.ready(stack)
    away = stack.on_vram_change(state, state.free_bytes + 600 * MIB).state
    gone = int(away.slots.occupant[-1])
    occupant = away.slots.occupant.copy()
    occupant[int(np.argmax(away.slots.sizes() == stack.ctx.sizes.max_blob_bytes))] = gone
    moved = replace(away, slots=replace(away.slots, occupant=occupant))
    back = pm.checked(stack, stack.on_vram_change(moved, state.free_bytes)).state
    assert int((back.slots.occupant == gone).sum()) == 1


def test_nothing_changes_while_a_prompt_is_read() -> None:
    stack = pm.make_stack(**ELASTIC)
    reading = stack.before_read(pm.ready(stack), pm.ask("a", 5_000), 5_000).state
    step = stack.on_vram_change(reading, 10**12)
    assert step.moves == ()
    assert "when it has been read" in step.notes[0]


@pytest.mark.parametrize("anywhere", [False, True])
def test_segments_that_hold_cells_stay(anywhere: bool) -> None:
    plan = replace(pm.make_stack(grow=pm.GROW).ctx.plan)
    plan = replace(plan, request=replace(plan.request, vram_elastic_mib=512))
    stack = pm.policy_stack(pm.sizes_of(), plan, parameters=PolicyParameters(grow_anywhere=anywhere))
    state = pm.checked(stack, stack.on_request(pm.ready(stack), pm.ask("a", 100_000))).state
    given = np.flatnonzero(state.slots.occupant == -2)
    step = pm.checked(stack, stack.on_vram_change(state, 10**12))
    assert step.state.slots.num_present > given.max()
    assert step.state.slots.given == len(given)


def test_without_a_loan_slots_that_come_back_are_the_caches_again() -> None:
    stack = pm.make_stack(own="on", **ELASTIC)
    state = pm.ready(stack)
    away = pm.checked(stack, stack.on_vram_change(state, state.free_bytes + 2_000 * MIB)).state
    assert away.slots.top == away.slots.num_present < state.slots.num_slots
    back = pm.checked(stack, stack.on_vram_change(away, state.free_bytes)).state
    assert (back.slots.low, back.slots.top) == (state.slots.num_slots, state.slots.num_slots)


def test_cells_are_paid_for_by_slots_that_are_there_when_segments_are_away_and_nothing_is_lent() -> None:
    plan = pm.make_stack(own="on", grow=pm.GROW).ctx.plan
    plan = replace(plan, request=replace(plan.request, vram_elastic_mib=512))
    stack = policy_stack(pm.sizes_of(), plan, parameters=PolicyParameters(grow_anywhere=True))
    state = pm.ready(stack)
    away = pm.checked(stack, stack.on_vram_change(state, state.free_bytes + 2_000 * MIB)).state
    grown = pm.checked(stack, stack.on_request(away, pm.ask("a", 60_000))).state
    assert grown.kv_mapped_cells >= 60_256
    assert grown.slots.given > 0


def test_a_loan_larger_than_its_share_keeps_what_was_kept_for_it() -> None:
    stack = pm.make_stack(chunk_tokens=100, lend_pct=1, **ELASTIC)
    state = pm.checked(stack, stack.on_vram_change(pm.ready(stack), 10**12)).state
    facts = pm.ask("a", 5_000)
    lent = pm.checked(stack, stack.before_read(state, facts, 5_000)).state
    assert lent.slots.lendable_bytes(lent.lent_from or 0) >= stack.ctx.buffer_bytes(100)


def test_in_an_arena_segments_are_its_own_and_the_loan_of_the_one_chunk_stays() -> None:
    plain = pm.make_stack(chunk_tokens=512, **ELASTIC)
    plan, chunk = plain.ctx.plan, plain.ctx.plan.prompt.chunk_tokens
    stack = policy_stack(pm.sizes_of(), plan, parameters=PolicyParameters(read_grid=(256, chunk)))
    state = stack.initial_state()
    num, loan = state.slots.num_slots, plan.prompt.lent_slots
    borders = (num - 3 * loan, num - 2 * loan + 20, num - loan, num - 50)
    cuts = tuple(state.slots.offset_bytes[list(borders)].tolist())
    slots = replace(state.slots, borders=borders, cut_bytes=cuts, low=borders[0], top=borders[0])
    state = stack.on_start(replace(state, slots=slots)).state
    step = pm.checked(stack, stack.on_vram_change(state, 10**12))
    given = [m for m in step.moves if m.kind is MoveKind.GIVE_SEGMENT]
    assert [(m.first, m.last) for m in given] == [(borders[3], num), (borders[2], borders[3]), (borders[1], borders[2])]
    assert sum(m.bytes for m in given) == slots.total_bytes - cuts[1] == step.state.free_bytes - state.free_bytes
    assert [part.state.segments_given for part in step.each() if part.moves] == [1, 2, 3]
    assert step.state.chunk_tokens == state.chunk_tokens
    lent = pm.checked(stack, stack.before_read(step.state, pm.ask("a", 5_000), 5_000)).state
    assert lent.lent_from == borders[0]
    assert lent.slots.lendable_bytes(borders[0]) >= stack.ctx.buffer_bytes(chunk)
    whole = pm.checked(stack, stack.on_vram_change(step.state, 0)).state
    assert np.array_equal(whole.slots.occupant, state.slots.occupant)
    assert stack.before_read(whole, pm.ask("a", 5_000), 5_000).state.lent_from == borders[2]


def test_what_could_not_be_freed_is_said() -> None:
    stack = pm.make_stack(**ELASTIC)
    state = pm.ready(stack)
    step = stack.on_vram_change(state, 10**12)
    short = (10**12 - step.state.free_bytes) / MIB
    assert step.notes[-1] == f"no further segment can be given: {short:,.0f} MiB less than wished are free"
    again = stack.on_vram_change(step.state, 10**12)
    assert again.notes == (f"no segment can be given: {short:,.0f} MiB less than wished are free",)
    assert again.moves == ()
