"""Elastic K/V: the published growths and trims, what pays, what moves, what happens when nothing can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_models as pm
import pytest

from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import MIB, Owner
from strata_jax.memory.strata.request import GrowSettings
from strata_jax.policies import kv_grow
from strata_jax.policies.invariants import check_state
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import PolicyParameters
from strata_jax.policies.residency import heat
from strata_jax.policies.state import GIVEN, MemoryState

BIG = pm.card(32_607, taken_bytes=1_500 * MIB)
ANYWHERE = PolicyParameters(grow_anywhere=True)


def grown(stack: pm.PolicyStack, state: MemoryState, cells: int) -> pm.Step:
    return pm.checked(stack, kv_grow.ensure(stack.ctx, state, cells))


def near_floor(reserve_mib: int) -> pm.PolicyStack:
    """A stack whose floor is 100 slots below the loan."""
    top = pm.make_stack(grow=pm.GROW, reserve_mib=reserve_mib).ctx.plan.prompt.first_lent
    under = PolicyParameters(grow_anywhere=False)
    return pm.make_stack(parameters=under, grow=replace(pm.GROW, floor_slots=top - 100), reserve_mib=reserve_mib)


@pytest.mark.parametrize(
    ("quant", "init", "cells", "published"),
    [
        ("iq2_xs", 16_384, 32_768, 151),  # grow-v32-grow32k
        ("iq2_xs", 16_384, 32_768, 145),  # grow-v38-grow.event
        ("iq2_xs", 4_096, 32_768, 266),  # grow-par-given
        ("iq3_s", 16_384, 65_536, 330),  # grow-t-grow-64k.event
        ("iq3_s", 16_384, 106_496, 601),  # grow-t-conv-100k
    ],
)
def test_growth_takes_the_published_number_of_slots(quant: str, init: int, cells: int, published: int) -> None:
    stack = pm.make_stack(quant, BIG, reserve_mib=1_500, grow=replace(pm.GROW, init_cells=init))
    step = grown(stack, pm.ready(stack), cells)
    assert step.state.kv_mapped_cells == cells
    assert step.state.slots.given == pytest.approx(published, rel=0.05)
    evicted = pm.one(step.moves, MoveKind.EVICT)
    assert pm.detail(evicted, "given_slots") == step.state.slots.given
    assert pm.detail(evicted, "unmapped_bytes") >= pm.one(step.moves, MoveKind.MAP_CELLS).bytes


def test_published_served_run_grows_by_4096_cells_and_trims_to_4096() -> None:
    stack = pm.make_stack(
        "iq2_xs", BIG, reserve_mib=1_500, conversation_mib=8_192, grow=replace(pm.GROW, step_cells=4_096)
    )
    state = pm.serve(stack, pm.ready(stack), pm.ask("chat", 40, output=100)).state
    facts = pm.ask("long", 17_800, output=4_000, switches=True)
    at_request = stack.on_request(state, facts).state
    assert (state.kv_mapped_cells, at_request.kv_mapped_cells) == (16_384, 20_480)
    state = pm.serve(stack, state, facts).state
    assert state.kv_mapped_cells == 24_576
    state = pm.serve(stack, state, pm.ask("document", 31_700, output=49, switches=True)).state
    assert state.kv_mapped_cells == 32_768
    step = pm.serve(stack, state, pm.ask("chat 2", 40, output=100, switches=True))
    assert step.state.kv_mapped_cells == 4_096
    refilled = [m for m in step.moves if m.kind is MoveKind.REFILL and "parked" in m.cause]
    assert refilled[0].count == pytest.approx(159, rel=0.05)
    state = pm.serve(stack, step.state, pm.ask("chat 3", 40, output=100, switches=True)).state
    step = stack.on_request(state, pm.ask("document", 31_780, reused=31_749, switches=True))
    order = [k for k in pm.kinds(step.moves) if k in (MoveKind.MAP_CELLS, MoveKind.RESTORE)]
    assert order == [MoveKind.MAP_CELLS, MoveKind.RESTORE]
    assert pm.detail(pm.one(step.moves, MoveKind.RESTORE), "tokens") == 31_749


def test_conversations_of_the_tester_get_all_slots_back_when_a_subagent_takes_over() -> None:
    stack = pm.make_stack("iq3_s", BIG, conversation_mib=2_816, conversation_slots=2, grow=pm.GROW)
    start = state = pm.ready(stack)
    for tokens in (60_000, 100_000):
        state = pm.serve(stack, state, pm.ask(f"main {tokens}", tokens, switches=state.live is not None)).state
        assert state.kv_mapped_cells == {60_000: 65_536, 100_000: 106_496}[tokens]
        given = state.slots.given
        state = pm.serve(stack, state, pm.ask(f"sub {tokens}", 15_000, switches=True)).state
        assert state.kv_mapped_cells == 16_384
        assert (given, state.slots.given) == (given, 0)
        assert state.slots.low == state.slots.top == start.slots.top
    back = pm.serve(stack, state, pm.ask("main 100000", 100_100, reused=100_000, switches=True))
    assert MoveKind.RESTORE in pm.kinds(back.moves)


@pytest.mark.parametrize(
    ("prompt", "position", "mapped"),
    [(16_128, 0, 16_384), (16_129, 0, 24_576), (100, 16_316, 16_384), (100, 16_317, 24_576)],
)
def test_growth_margins_are_256_at_a_request_and_64_in_decoding(prompt: int, position: int, mapped: int) -> None:
    stack = pm.make_stack(grow=pm.GROW)
    state = stack.on_request(pm.ready(stack), pm.ask("a", prompt)).state
    assert stack.before_round(state, position, 4).state.kv_mapped_cells == mapped


def test_growth_is_in_steps_and_ends_at_the_window() -> None:
    stack = pm.make_stack(grow=pm.GROW, context_cells=60_000)
    state = pm.ready(stack)
    assert grown(stack, state, 16_385).state.kv_mapped_cells == 24_576
    assert grown(stack, state, 60_100).state.kv_mapped_cells == 60_000
    assert grown(stack, state, 16_384).state is state


def test_slots_just_under_the_loan_pay_and_whole_chunks_leave() -> None:
    stack = pm.make_stack("iq3_s", grow=pm.GROW)
    before = pm.ready(stack)
    after = grown(stack, before, 40_000).state
    slots, g = after.slots, after.chunk_bytes
    assert np.array_equal(np.flatnonzero(slots.occupant == GIVEN), np.arange(slots.low, before.slots.top))
    first, last = -(-int(slots.offset_bytes[slots.low]) // g), int(slots.offset_bytes[slots.top]) // g
    assert (slots.unmapped_from, slots.unmapped_chunks) == (first, last - first)
    one_less = -(-int(slots.offset_bytes[slots.low + 1]) // g)
    assert last - one_less < stack.ctx.kv_chunks(40_960) - stack.ctx.kv_chunks(16_384), "a slot more than needed"


def test_hot_experts_move_into_the_coldest_slots_of_the_loan_that_are_large_enough() -> None:
    stack = pm.make_stack("iq3_s", grow=pm.GROW)
    rng = np.random.default_rng(3)
    before = pm.ready(stack)
    usage = rng.integers(0, 4, len(stack.ctx.rank_bytes)).astype(np.float32)
    usage[before.slots.top : before.slots.num_slots] += 1
    before = replace(before, usage=usage)
    step = grown(stack, before, 65_536)
    after = step.state
    low, top = after.slots.low, after.slots.top
    expected = before.slots.occupant.copy()
    slot_bytes = before.slots.sizes()
    for slot in range(top - 1, low - 1, -1):  # the published loop, slot by slot, with a full search each time
        rank = expected[slot]
        region = np.arange(top, len(expected))
        region = region[slot_bytes[region] >= stack.ctx.rank_bytes[rank]]
        keys = heat(expected[region], usage)
        cold = int(region[np.argmin(keys)])
        if heat(expected[[slot]], usage)[0] > keys.min():
            expected[cold] = rank
        expected[slot] = GIVEN
    assert np.array_equal(after.slots.occupant, expected)
    lost = np.setdiff1d(before.slots.occupant, expected)
    moved = next(part for part in step.each() if part.moves and part.moves[0].kind is MoveKind.MOVE_EXPERT)
    check_state(stack.ctx.sizes, stack.ctx.plan, moved.state)  # also between the two moves
    assert np.array_equal(moved.state.slots.occupant[top:], expected[top:])
    assert np.array_equal(moved.state.slots.occupant[:low], before.slots.occupant[:low])
    evict, move = pm.one(step.moves, MoveKind.EVICT), pm.one(step.moves, MoveKind.MOVE_EXPERT)
    assert (evict.count, evict.bytes) == (len(lost), stack.ctx.rank_bytes[lost].sum())
    assert move.count == len(np.intersect1d(before.slots.occupant[low:top], expected[top:]))
    assert 0 < int((expected[top:] != before.slots.occupant[top:]).sum()) < top - low


def test_key_is_usage_before_rank() -> None:
    usage = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    assert heat(np.array([0, 1, 2, 3], np.int32), usage).tolist() == [0.0, 3 * 2**20 - 1, 3 * 2**20 - 2, 2**20 - 3]


def test_at_the_floor_new_device_memory_pays() -> None:
    stack = near_floor(3_000)
    before = pm.ready(stack)
    step = grown(stack, before, 131_072)
    move = pm.one(step.moves, MoveKind.MAP_CELLS)
    assert step.state.slots.low == before.slots.top - 100
    assert pm.detail(move, "new_bytes") == before.free_bytes - step.state.free_bytes > 0


def test_failed_growth_says_the_shortfall_and_changes_nothing() -> None:
    stack = near_floor(700)
    state = pm.ready(stack)
    print_before = pm.fingerprint(state)
    with pytest.raises(DoesNotFit, match=r"cannot map 262,144 cells: [\d,]+ MiB are missing") as error:
        kv_grow.ensure(stack.ctx, state, 262_144)
    short = error.value.shortfall_bytes
    assert short > 0
    assert pm.fingerprint(state) == print_before
    enough = replace(state, free_bytes=state.free_bytes + short)
    assert kv_grow.ensure(stack.ctx, enough, 262_144).state.free_bytes == 0
    with pytest.raises(DoesNotFit):
        kv_grow.ensure(stack.ctx, replace(enough, free_bytes=enough.free_bytes - 1), 262_144)


@pytest.mark.parametrize(("cells", "trims"), [(16_384, True), (16_640, False), (16_128, True)])
def test_trim_waits_for_two_steps(cells: int, trims: bool) -> None:
    stack = pm.make_stack(grow=pm.GROW)
    state = grown(stack, pm.ready(stack), 32_768).state
    assert (kv_grow.trim(stack.ctx, state, cells).state is not state) is trims


def test_trim_maps_back_one_run_from_below_and_refills_the_hottest_that_fit() -> None:
    stack = pm.make_stack("iq3_s", grow=pm.GROW)
    big = grown(stack, pm.ready(stack), 106_496).state
    step = pm.checked(stack, kv_grow.trim(stack.ctx, big, 60_000))
    small, g = step.state, big.chunk_bytes
    assert big.slots.low < small.slots.low < small.slots.top
    end = small.slots.unmapped_from * g
    assert small.slots.offset_bytes[small.slots.low] <= end < small.slots.offset_bytes[small.slots.low + 1]
    back = small.slots.occupant[big.slots.low : small.slots.low]
    absent_before = np.setdiff1d(np.arange(len(stack.ctx.rank_bytes)), big.slots.occupant)
    absent_after = np.setdiff1d(absent_before, back)
    roomy = back[small.slots.sizes()[big.slots.low : small.slots.low] == stack.ctx.sizes.max_blob_bytes]
    assert pm.spread(back) <= pm.spread(absent_before)
    assert roomy.max() < absent_after.min() or len(roomy) == 0, "a colder expert came back than one that stayed out"


def test_chunks_that_trimming_leaves_over_are_freed_and_growth_starts_again_from_slots() -> None:
    stack = pm.make_stack(grow=pm.GROW)
    start = pm.ready(stack)
    state = grown(stack, start, 32_768).state
    step = pm.checked(stack, kv_grow.trim(stack.ctx, state, 100))
    left = (stack.ctx.kv_chunks(16_384) - stack.ctx.kv_chunks(8_192)) * state.chunk_bytes
    assert step.state.kv_mapped_cells == 8_192
    assert step.state.free_bytes == start.free_bytes + left
    assert (step.state.slots.given, step.state.spare_chunks) == (0, 0)
    again = grown(stack, step.state, 16_384)
    assert pm.detail(pm.one(again.moves, MoveKind.MAP_CELLS), "new_bytes") == 0


def test_keep_restorable_leaves_what_a_parked_conversation_needs() -> None:
    given = {"conversation_mib": 8_192, "grow": pm.GROW}
    for keep, mapped in ((False, 8_192), (True, 65_536)):
        stack = pm.make_stack(parameters=PolicyParameters(keep_restorable=keep), **given)
        state = pm.serve(stack, pm.ready(stack), pm.ask("main", 60_000)).state
        assert pm.serve(stack, state, pm.ask("sub", 3_000, switches=True)).state.kv_mapped_cells == mapped


def test_a_start_that_can_never_grow_maps_the_whole_window_or_stops() -> None:
    stack = pm.make_stack(grow=pm.GROW)
    start = stack.initial_state()
    lent = replace(start.slots, low=100, top=100)
    policy = kv_grow.KvGrow()
    needed = (stack.ctx.kv_chunks(262_144) - stack.ctx.kv_chunks(16_384)) * start.chunk_bytes
    step = policy.on_start(stack.ctx, replace(start, slots=lent, free_bytes=needed))
    assert (step.state.kv_mapped_cells, step.state.free_bytes) == (262_144, 0)
    assert "mapped up front" in step.notes[0]
    with pytest.raises(DoesNotFit, match=r"100 slots under the loan, the floor is 128") as error:
        policy.on_start(stack.ctx, replace(start, slots=lent, free_bytes=needed - 5 * MIB))
    assert error.value.shortfall_bytes == 5 * MIB


def test_anywhere_the_coldest_slots_pay_without_a_copy() -> None:
    stack = pm.make_stack("iq3_s", parameters=ANYWHERE, grow=pm.GROW)
    rng = np.random.default_rng(5)
    usage = rng.permutation(len(stack.ctx.rank_bytes)).astype(np.float32)
    before = replace(pm.ready(stack), usage=usage)
    step = grown(stack, before, 65_536)
    assert MoveKind.MOVE_EXPERT not in pm.kinds(step.moves)
    given = np.flatnonzero(step.state.slots.occupant == GIVEN)
    gone = before.slots.occupant[given]
    stay = step.state.slots.occupant[step.state.slots.occupant >= 0]
    assert usage[gone].max() < usage[stay].min()
    assert given.min() < before.slots.top < given.max(), "slots on both sides of the loan's edge"
    assert step.state.slots.lendable_bytes(step.state.slots.top) >= stack.ctx.plan.prompt.buffer_bytes
    back = pm.checked(stack, kv_grow.trim(stack.ctx, step.state, 100)).state
    assert back.slots.given == 0
    assert back.slots.top == before.slots.top


def test_anywhere_the_chunk_shrinks_when_the_loan_has_no_other_slots() -> None:
    stack = pm.make_stack("iq2_xs", pm.card(9_500), parameters=ANYWHERE, grow=pm.GROW, context_cells=131_072)
    before = pm.ready(stack)
    step = grown(stack, before, 131_072)
    assert step.state.chunk_tokens < before.chunk_tokens
    assert step.state.chunk_tokens % 256 == 0
    facts = pm.ask("a", 30_000)
    lent = pm.checked(stack, stack.before_read(step.state, facts, 30_000)).state
    assert lent.slots.lendable_bytes(lent.lent_from or 0) >= stack.ctx.buffer_bytes(step.state.chunk_tokens)
    back = pm.checked(stack, kv_grow.trim(stack.ctx, step.state, 100)).state
    assert back.chunk_tokens == before.chunk_tokens


def test_growth_moves_bytes_from_slots_to_kv_and_nothing_else() -> None:
    stack = pm.make_stack(grow=pm.GROW)
    before = pm.ready(stack)
    after = grown(stack, before, 65_536).state
    old, new = (owner_bytes(stack.ctx.sizes, stack.ctx.plan, s) for s in (before, after))
    changed = {owner: new[owner] - old[owner] for owner in new if new[owner] != old[owner]}
    assert changed == {Owner.EXPERT_SLOTS: -changed[Owner.KV], Owner.KV: changed[Owner.KV]}
    assert changed[Owner.KV] >= 624 * MIB


def test_growth_settings_reach_the_policy() -> None:
    settings = GrowSettings(enabled=True, init_cells=4_096, step_cells=2_048, hysteresis_steps=1)
    stack = pm.make_stack(grow=settings)
    state = grown(stack, pm.ready(stack), 6_145).state
    assert state.kv_mapped_cells == 8_192
    assert kv_grow.trim(stack.ctx, state, 6_144).state.kv_mapped_cells == 6_144
