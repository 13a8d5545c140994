"""Replacement inside the round: its rule by other means, and replays of traces against independent counts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import combinations

import numpy as np
import policy_models as pm
import pytest

from strata_jax.policies.policy import AdaptSettings, PolicyParameters
from strata_jax.policies.replacement import ExpertValues, counted, first_values, ranks_in_layer, replaced
from strata_jax.policies.replay import (
    Replay,
    hottest,
    replay_adaptive,
    replay_farthest,
    replay_replacing,
    replay_static,
    window_uses,
)
from strata_jax.synthetic.routing import RoutingSkew, hit_rate, look_up_odds
from strata_jax.synthetic.routing_trace import draw_trace

LAYERS, EXPERTS, USED = 3, 24, 4


@pytest.fixture(scope="module")
def trace() -> np.ndarray:
    skew = RoutingSkew(1.0, 0.5)
    return draw_trace(
        skew, num_layers=LAYERS, num_experts=EXPERTS, num_used=USED, num_tokens=180, conversation_tokens=60, seed=3
    ).experts


def slots(each: int) -> np.ndarray:
    held = np.zeros((LAYERS, EXPERTS), np.bool_)
    held[:, :each] = True
    return held


def values() -> ExpertValues:
    return first_values(np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1)))


@pytest.mark.parametrize(("rows", "each"), [(1, 6), (3, 14), (3, 5)])
def test_decay_0_is_least_recently_used(trace: np.ndarray, rows: int, each: int) -> None:
    hits = lookups = 0
    for layer in range(LAYERS):
        recent = OrderedDict.fromkeys(reversed(range(each)))  # the first one leaves first
        for first in range(0, len(trace) - rows + 1, rows):
            asked = [int(e) for e in trace[first : first + rows, layer].ravel()]
            lookups += len(asked)
            hits += sum(e in recent for e in asked)
            new = [e for e in sorted(set(asked), key=lambda e: (-asked.count(e), e)) if e not in recent]
            free = [e for e in recent if e not in asked]
            for leaving, coming in zip(free, new):
                del recent[leaving]
                recent[coming] = None
            # among those of one window the higher number leaves first
            for e in sorted(set(asked), reverse=True):
                if e in recent:
                    recent.move_to_end(e)
    found = replay_replacing(trace, slots(each), values(), 0.0, rows)
    assert (found.hits, found.lookups) == (hits, lookups)
    assert found.copies == 0


def one_layer(uses: dict[int, int]) -> np.ndarray:
    counts = np.zeros((1, 8), np.int32)
    for expert, num in uses.items():
        counts[0, expert] = num
    return counts


def swaps(held: set[int], uses: dict[int, int], before: ExpertValues, decay: float) -> list[tuple[int, int]]:
    mask = np.isin(np.arange(8), list(held))[None]
    _, coming, leaving = replaced(mask, one_layer(uses), counted(before, one_layer(uses), decay))
    return list(zip(coming.tolist(), leaving.tolist()))


def test_the_coldest_by_profile_leaves_first_and_the_most_used_newcomer_comes_first() -> None:
    start = first_values(np.array([[0, 1, 2, 3, 4, 5, 6, 7]], np.int32))
    assert swaps({0, 1, 2}, {5: 1, 6: 2}, start, 0.5) == [(6, 2), (5, 1)]
    other = first_values(np.array([[2, 1, 0, 3, 4, 5, 6, 7]], np.int32))
    assert swaps({0, 1, 2}, {5: 1, 6: 2}, other, 0.5) == [(6, 0), (5, 1)]


def test_what_the_window_uses_is_no_victim_and_the_rest_finds_no_slot() -> None:
    start = first_values(np.arange(8, dtype=np.int32)[None])
    assert swaps({0, 1, 2}, {1: 1, 2: 1, 5: 1, 6: 1}, start, 0.5) == [(5, 0)]
    assert swaps({0, 1}, {0: 1, 1: 1, 5: 1}, start, 0.5) == []
    assert swaps(set(), {0: 1}, start, 0.5) == []


def test_a_newcomer_that_was_used_less_than_the_coldest_stays_out_and_equal_counts_go_by_age() -> None:
    start = first_values(np.arange(8, dtype=np.int32)[None])
    often = counted(counted(start, one_layer({0: 2, 1: 3}), 0.5), one_layer({1: 3}), 0.5)  # 0: 1, 1: 4.5
    assert swaps({0, 1}, {5: 1}, often, 1.0) == [(5, 0)]  # 1 against 1: the older one
    assert swaps({1}, {5: 1}, often, 1.0) == []
    assert swaps({1}, {5: 3}, often, 0.5) == [(5, 1)]  # 4.5 has become 2.25


def test_counts_decay_every_round() -> None:
    now = counted(counted(first_values(np.zeros((1, 8), np.int32)), one_layer({3: 2}), 0.5), one_layer({3: 1}), 0.25)
    assert now.count[0].tolist() == [0, 0, 0, 1.5, 0, 0, 0, 0]
    assert (now.last[0, 3], now.last[0, 0], now.clock) == (1, -1, 2)
    with pytest.raises(ValueError, match="1,073,741,824 rounds"):
        counted(replace(now, clock=2**30), one_layer({}), 0.5)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_makes_as_few_reads_as_the_best_of_all_choices(seed: int) -> None:
    """All sets of two residents after every window, for one token after the other of a layer with 5 experts."""
    rng = np.random.default_rng(seed)
    experts = np.array([[rng.choice(5, 2, replace=False)] for _ in range(9)], np.int32)
    held = np.zeros((1, 5), np.bool_)
    held[0, :2] = True
    best = {frozenset((0, 1)): 0}
    for token in experts:
        asked, after = frozenset(token[0].tolist()), {}
        for residents, reads in best.items():
            for kept in combinations(residents | asked, 2):
                cost = reads + len(asked - residents)
                after[frozenset(kept)] = min(cost, after.get(frozenset(kept), cost))
        best = after
    assert replay_farthest(experts, held).reads == min(best.values())


@pytest.mark.parametrize("rows", [1, 3])
def test_no_rule_reads_less_than_the_bound(trace: np.ndarray, rows: int) -> None:
    held = slots(9)
    bound = replay_farthest(trace, held, rows)
    others = [replay_static(trace, held, rows), replay_adaptive(trace, held, AdaptSettings(), rows)]
    others += [replay_replacing(trace, held, values(), decay, rows) for decay in (0.0, 0.9, 1.0)]
    assert all(bound.reads < other.reads + other.copies for other in others)
    assert {(r.lookups, r.distinct, r.windows) for r in [bound, *others]} == {
        (180 // rows * rows * LAYERS * USED, bound.distinct, 180 // rows)
    }
    assert bound.link_experts == bound.reads / bound.windows


def test_an_adaptive_replay_is_what_the_policy_does() -> None:
    adapt = AdaptSettings(every_rounds=2, swaps=10_000, decay=0.5, least_usage=1.0, gap=0.5, lag_rounds=1)
    stack = pm.make_stack("iq2_xs", pm.card(8_000), parameters=PolicyParameters(adapt=adapt), context_cells=32_768)
    state, sizes = pm.ready(stack), stack.ctx.sizes
    layer_of = np.asarray(sizes.rank_layer, np.int64)
    rank_of = np.argsort(layer_of, kind="stable").reshape(sizes.num_layers, sizes.num_experts)
    experts = draw_trace(
        RoutingSkew(1.0), num_layers=sizes.num_layers, num_experts=sizes.num_experts, num_used=6, num_tokens=12,
        conversation_tokens=3, seed=1,
    ).experts  # fmt: skip
    held = np.zeros(rank_of.shape, np.bool_)
    present = state.slots.occupant[state.slots.occupant >= 0]
    held.reshape(-1)[np.argsort(rank_of.ravel())[present]] = True
    found, hits, swapped = replay_adaptive(experts, held, adapt), 0, 0
    for token in experts:
        used = rank_of[np.arange(len(token))[:, None], token].ravel()
        hits += int(np.isin(used, state.slots.occupant).sum())
        step = stack.before_round(state, 0, 1, used.astype(np.int32))
        swapped += len([s for s in step.state.pending if s not in state.pending])
        state = step.state
    assert swapped > 50
    assert (found.hits, found.copies) == (hits, swapped)


def test_windows_leave_out_a_last_part(trace: np.ndarray) -> None:
    windows = list(window_uses(trace[:8], EXPERTS, 3))
    assert len(windows) == 2
    assert [int(uses.sum()) for uses in windows] == [3 * LAYERS * USED] * 2
    assert np.flatnonzero(windows[1][2]).tolist() == sorted(set(trace[3:6, 2].ravel().tolist()))


def test_fixed_choices_are_even_and_ranks_come_layer_by_layer() -> None:
    uses = np.array([[3, 9, 3, 0], [0, 0, 5, 7]], np.int64)
    assert hottest(uses, 3).tolist() == [[True, True, False, False], [False, False, False, True]]
    ranks = ranks_in_layer(np.array([6, 1, 0, 7], np.int32), 2, 4)
    assert ranks.tolist() == [[1, 0, 2, 3], [2, 3, 0, 1]]
    assert Replay().hit_rate == Replay().link_experts == 0.0


# --- drawn routing


def test_a_drawn_trace_has_the_odds_of_its_skew_and_neighbours_repeat_experts() -> None:
    shape = {"num_layers": 2, "num_experts": 512, "num_used": 10, "num_tokens": 900, "conversation_tokens": 300}
    odds = look_up_odds(RoutingSkew(), 512, 10)
    held = np.zeros((2, 512), np.bool_)
    held[:, :10] = True
    growth = []
    for persistence in (0.0, 0.5):
        experts = draw_trace(RoutingSkew(), seed=1, persistence=persistence, **shape).experts
        one, *more = (replay_static(experts, held, rows) for rows in (1, 2, 3, 4))
        assert one.hit_rate == pytest.approx(hit_rate(odds, 20, 2), abs=0.01)
        growth.append([r.link_experts / one.link_experts for r in more])
    assert growth[0] == pytest.approx([1.94, 2.83, 3.67], abs=0.05)
    assert growth[1] == pytest.approx([1.75, 2.4, 3.05], abs=0.12)  # published unions


def test_conversations_of_a_drifting_trace_differ_and_bad_numbers_are_refused() -> None:
    shape = {"num_layers": 1, "num_experts": 64, "num_used": 4, "num_tokens": 1800, "conversation_tokens": 300}
    still, drifting = (draw_trace(RoutingSkew(1.0, d), seed=0, **shape).experts for d in (0.0, 0.9))

    def shared(experts: np.ndarray) -> int:
        best = [set(np.argsort(-np.bincount(part.ravel(), minlength=64))[:8]) for part in experts.reshape(6, -1)]
        return len(set.intersection(*best))

    assert shared(still) >= 6
    assert shared(drifting) <= 3
    with pytest.raises(ValueError, match="persistence=1: must be from 0 to below 1"):
        draw_trace(RoutingSkew(), seed=0, persistence=1, **shape)
    with pytest.raises(ValueError, match="0 a conversation: at least 1"):
        draw_trace(RoutingSkew(), seed=0, **{**shape, "conversation_tokens": 0})
