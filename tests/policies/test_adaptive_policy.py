"""Adaptive slots: counters, the swap rule, its order and limit, the lag of landing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_models as pm
import pytest

from strata_jax.policies.adaptive import choose_swaps, land
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import AdaptSettings, PolicyParameters
from strata_jax.policies.state import EMPTY, MemoryState

EVERY_ROUND = AdaptSettings(every_rounds=1, decay=1.0)
CARD = pm.card(8_000)


def stack_of(adapt: AdaptSettings = EVERY_ROUND) -> pm.PolicyStack:
    return pm.make_stack("iq2_xs", CARD, parameters=PolicyParameters(adapt=adapt), context_cells=32_768)


def used(stack: pm.PolicyStack, state: MemoryState, counts: dict[int, float]) -> MemoryState:
    usage = np.zeros(len(stack.ctx.rank_bytes), np.float32)
    for rank, count in counts.items():
        usage[rank] = count
    return replace(state, usage=usage)


def absent_of(stack: pm.PolicyStack, state: MemoryState, layer: int, count: int = 1) -> list[int]:
    ranks = np.flatnonzero(stack.ctx.sizes.rank_layer == layer)
    return [int(r) for r in ranks if r >= state.slots.num_slots][:count]


def test_the_coldest_of_the_layer_leaves_for_the_hottest_absent() -> None:
    stack = stack_of()
    state = pm.ready(stack)
    (hot,) = absent_of(stack, state, 7)
    (pair,) = choose_swaps(stack.ctx, used(stack, state, {hot: 2.0}), EVERY_ROUND)
    layer = stack.ctx.sizes.rank_layer[: state.slots.num_slots]
    assert pair == (2.0, int(np.flatnonzero(layer == 7).max()), hot)


@pytest.mark.parametrize(
    ("candidate", "residents", "swaps"), [(2.0, 0.5, 1), (2.0, 0.51, 0), (1.99, 0.0, 0), (5.0, 3.5, 1), (5.0, 3.6, 0)]
)
def test_a_candidate_needs_2_uses_and_1_5_more_than_its_victim(candidate: float, residents: float, swaps: int) -> None:
    stack = stack_of()
    state = pm.ready(stack)
    (hot,) = absent_of(stack, state, 7)
    counts = {int(r): residents for r in np.flatnonzero(stack.ctx.sizes.rank_layer[: state.slots.num_slots] == 7)}
    assert len(choose_swaps(stack.ctx, used(stack, state, counts | {hot: candidate}), EVERY_ROUND)) == swaps


def test_pairs_are_sorted_by_gain_and_cut_at_the_limit() -> None:
    stack = stack_of()
    state = pm.ready(stack)
    counts = {rank: 2.0 + i for i, layer in enumerate(range(48)) for rank in absent_of(stack, state, layer, 4)}
    pairs = choose_swaps(stack.ctx, used(stack, state, counts), replace(EVERY_ROUND, swaps=96))
    assert len(counts) == 192
    assert len(pairs) == 96
    gains = [gain for gain, _, _ in pairs]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= max(sorted(counts.values())[:96])
    assert len({slot for _, slot, _ in pairs}) == 96


def test_slots_keep_their_layer_and_the_victim_leaves_at_once() -> None:
    stack = stack_of()
    state = pm.ready(stack)
    (hot,) = absent_of(stack, state, 11)
    step = pm.checked(stack, stack.before_round(state, 100, 4, np.array([hot] * 3, np.int32)))
    assert pm.kinds(step.moves) == [MoveKind.EVICT]
    (swap,) = step.state.pending
    assert step.state.slots.occupant[swap.slot] == EMPTY
    assert (swap.incoming, swap.due) == (hot, 2)
    rank_layer = stack.ctx.sizes.rank_layer
    assert rank_layer[swap.outgoing] == rank_layer[hot] == 11
    landed = pm.checked(stack, stack.before_round(step.state, 104, 4, np.array([], np.int32)))
    assert pm.kinds(landed.moves) == [MoveKind.SWAP_EXPERT]
    assert landed.state.slots.occupant[swap.slot] == hot
    assert landed.state.pending == ()


def test_a_copy_does_not_land_before_its_lag() -> None:
    stack = stack_of(replace(EVERY_ROUND, lag_rounds=3))
    state = pm.ready(stack)
    (hot,) = absent_of(stack, state, 11)
    state = stack.before_round(state, 100, 4, np.array([hot] * 3, np.int32)).state
    nothing = np.array([], np.int32)
    rounds = []
    while state.pending:
        rounds.append(state.rounds)
        state = stack.before_round(state, 100, 4, nothing).state
    assert rounds == [1, 2, 3]


def test_counters_decay_every_four_rounds_only() -> None:
    stack = pm.make_stack("iq2_xs", CARD, context_cells=32_768)
    state = pm.ready(stack)
    seen = []
    for _ in range(4):
        state = stack.before_round(state, 100, 4, np.array([0], np.int32)).state
        assert state.usage is not None
        seen.append(round(float(state.usage[0]), 3))
    assert seen == [1.0, 2.0, 3.0, 2.8]


def test_what_is_on_its_way_lands_before_tables_change() -> None:
    stack = pm.make_stack("iq2_xs", parameters=PolicyParameters(adapt=EVERY_ROUND), grow=pm.GROW)
    state = pm.ready(stack)
    (hot,) = absent_of(stack, state, 3)
    state = stack.before_round(state, 100, 4, np.array([hot] * 3, np.int32)).state
    facts = pm.ask("a", 30_000)
    assert pm.kinds(stack.on_request(state, facts).moves)[0] is MoveKind.SWAP_EXPERT
    assert pm.kinds(stack.before_read(state, facts, 30_000).moves)[0] is MoveKind.SWAP_EXPERT
    assert hot in stack.before_read(state, facts, 300).state.slots.occupant


def test_equal_input_gives_equal_swaps_and_landing_all_is_idempotent() -> None:
    stack = stack_of()
    state = pm.ready(stack)
    rng = np.random.default_rng(2)
    usage = rng.integers(0, 8, len(stack.ctx.rank_bytes)).astype(np.float32)
    one, two = (choose_swaps(stack.ctx, replace(state, usage=usage.copy()), EVERY_ROUND) for _ in range(2))
    assert one == two
    assert land(stack.ctx, state, due=None).state is state


def test_switched_off_by_its_settings() -> None:
    for off in (AdaptSettings(swaps=0), AdaptSettings(every_rounds=0)):
        assert "adaptive" not in stack_of(off).names
