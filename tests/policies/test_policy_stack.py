"""Composition: the order, every pair of policies, conservation seen by an independent ledger, and speed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import policy_models as pm
import pytest

from strata_jax.memory.ledger import MIB
from strata_jax.policies.invariants import BrokenInvariant, check_state
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import Compat, PolicyParameters
from strata_jax.policies.stack import ORDER, policy_stack

POLICIES = {
    "prefill_own": {"own": "auto", "expert_cache": 2_000},
    "conversation_budget": {"conversation_mib": 4_000, "conversation_budget": True},
    "head_alias": {"head_alias": True},
    "kv_grow": {"grow": pm.GROW},
    "vram_elastic": {"vram_elastic_mib": 512},
    "short_reads": {"short_read_tokens": 64},
}
EXPECTED_MOVES = {
    "conversation_budget": MoveKind.PARK,
    "head_alias": MoveKind.UNLOAD_HEAD,
    "kv_grow": MoveKind.MAP_CELLS,
    "vram_elastic": MoveKind.GIVE_SEGMENT,
}
PAIRS = [*combinations(POLICIES, 2), tuple(POLICIES)]


def composed(names: tuple[str, ...], *, anywhere: bool = False) -> pm.PolicyStack:
    settings: dict[str, object] = {"short_read_tokens": 0, "reserve_mib": 1_000}
    for name in names:
        settings |= POLICIES[name]
    elastic = int(settings.pop("vram_elastic_mib", 0))  # type: ignore[call-overload]
    plan = pm.make_stack("iq3_s", pm.card(24_000, os="windows"), **settings).ctx.plan
    plan = replace(plan, request=replace(plan.request, vram_elastic_mib=elastic))
    parameters = PolicyParameters(grow_anywhere=anywhere, alias_min_fresh_tokens=300)
    return policy_stack(pm.sizes_of("iq3_s"), plan, parameters=parameters)


@pytest.mark.parametrize("anywhere", [False, True])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_every_pair_serves_conserves_and_does_its_moves(names: tuple[str, ...], anywhere: bool) -> None:
    stack = composed(names, anywhere=anywhere)
    state = stack.initial_state()
    check_state(stack.ctx.sizes, stack.ctx.plan, state)
    ledger = pm.MoveLedger(stack, state)
    seen: set[MoveKind] = set()

    def done(step: pm.Step) -> pm.Step:
        ledger.apply(step.moves)
        ledger.check(pm.checked(stack, step).state)
        seen.update(pm.kinds(step.moves))
        return step

    state = done(stack.on_start(state)).state
    order = [
        ("main", 60_000, 0),
        ("sub", 3_000, 0),
        ("main", 60_200, 60_000),
        ("main", 60_240, 60_230),
        ("sub", 3_400, 0),
    ]
    live = None
    for name, prompt, reused in order:
        facts = pm.ask(name, prompt, reused=reused, output=300, switches=live not in (None, name))
        for hook in (
            lambda s, f=facts: stack.on_request(s, f),
            lambda s, f=facts: stack.before_read(s, f, f.fresh_tokens),
            lambda s, f=facts: stack.after_read(s, f),
            lambda s, f=facts: stack.before_round(s, f.prompt_tokens + 296, 4),
            lambda s, f=facts: stack.after_request(s, f, f.prompt_tokens + 300),
        ):
            state = done(hook(state)).state
        live = name
        assert state.head_loaded
        assert not state.reading
    wish = state.free_bytes + 1_500 * MIB
    state = done(stack.on_vram_change(state, wish)).state
    done(stack.on_vram_change(state, state.free_bytes - 900 * MIB))
    for name in names:
        if name in EXPECTED_MOVES:
            assert EXPECTED_MOVES[name] in seen, f"{name} did nothing"
    assert set(names) - {"prefill_own"} <= set(stack.names)
    if "prefill_own" in stack.names:
        assert not {MoveKind.LEND, MoveKind.REFILL} & seen - {MoveKind.REFILL}
        assert MoveKind.ALLOC_BUFFERS in seen


def test_policies_are_in_the_documented_order() -> None:
    for names in PAIRS:
        order = [policy.name for policy in ORDER]
        stack = composed(names)
        assert list(stack.names) == [name for name in order if name in stack.names]


def test_a_request_parks_then_trims_then_grows_then_restores_then_grows() -> None:
    stack = pm.make_stack("iq3_s", pm.card(24_000), conversation_mib=8_000, grow=pm.GROW)
    state = pm.serve(stack, pm.ready(stack), pm.ask("main", 60_000)).state
    state = pm.serve(stack, state, pm.ask("sub", 3_000, switches=True)).state
    state = stack.on_request(state, pm.ask("third", 40_000, switches=True)).state
    state = stack.after_request(state, pm.ask("third", 40_000), 40_000).state
    step = stack.on_request(state, pm.ask("main", 90_000, reused=60_000, switches=True))
    order = [m.kind for m in step.moves if m.kind not in (MoveKind.EVICT, MoveKind.MOVE_EXPERT, MoveKind.REFILL)]
    assert order == [MoveKind.PARK, MoveKind.MAP_CELLS, MoveKind.RESTORE, MoveKind.MAP_CELLS]
    small = stack.on_request(state, pm.ask("tiny", 100, switches=True))
    assert [k for k in pm.kinds(small.moves) if k is not MoveKind.REFILL] == [MoveKind.PARK, MoveKind.TRIM_CELLS]


def test_owners_sum_to_the_card_in_the_plan_and_afterwards() -> None:
    stack = composed(("kv_grow", "conversation_budget"))
    state = pm.ready(stack)
    for now in (state, pm.serve(stack, state, pm.ask("a", 60_000)).state):
        assert sum(owner_bytes(stack.ctx.sizes, stack.ctx.plan, now).values()) == stack.ctx.plan.card.vram_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"free_bytes": 0}, "of a card of"),
        ({"spare_chunks": 3}, "of a card of"),
        ({"own_buffer_bytes": 5}, "of a card of"),
        ({"lent_from": 0}, "lent from 0"),
        ({"kv_mapped_cells": 10**9}, "cells are mapped"),
    ],
)
def test_a_broken_state_is_found(change: dict[str, int], said: str) -> None:
    stack = pm.make_stack()
    with pytest.raises(BrokenInvariant, match=said):
        check_state(stack.ctx.sizes, stack.ctx.plan, replace(pm.ready(stack), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slot", "occupant", "said"),
    [(0, 1, "two slots"), (0, -2, "K/V's|another number"), (0, -3, "no meaning"), (0, 24_576, "rank 24576")],
)
def test_a_broken_slot_is_found(slot: int, occupant: int, said: str) -> None:
    stack = pm.make_stack()
    state = pm.ready(stack)
    table = state.slots.occupant.copy()
    table[slot] = occupant
    with pytest.raises(BrokenInvariant, match=said):
        check_state(stack.ctx.sizes, stack.ctx.plan, replace(state, slots=replace(state.slots, occupant=table)))


def test_an_expert_larger_than_its_slot_is_found() -> None:
    stack = pm.make_stack()
    state = pm.ready(stack)
    sizes = state.slots.sizes()
    large, small = int(np.argmax(sizes)), int(np.argmin(sizes))
    table = state.slots.occupant.copy()
    table[[large, small]] = table[[small, large]]
    with pytest.raises(BrokenInvariant, match="larger than its slot"):
        check_state(stack.ctx.sizes, stack.ctx.plan, replace(state, slots=replace(state.slots, occupant=table)))


def test_an_agent_loop_of_2649_requests_keeps_its_invariants() -> None:
    stack = pm.make_stack("iq3_s", pm.card(24_000), conversation_mib=8_000, grow=pm.GROW)
    rng = random.Random(0)
    state, live, length = pm.ready(stack), "worker", {"worker": 0, "reviewer": 0, "retrospective": 0}
    grown = 0
    for i in range(2_649):
        name = live if rng.random() < 0.7 else rng.choice(list(length))
        fresh = rng.choice([30, 300, 1_500, 5_000])
        reused = length[name] if length[name] < 140_000 else 0
        facts = replace(pm.ask(name, reused + fresh, reused=reused, output=300, switches=name != live), name=str(i))
        before = state.kv_mapped_cells
        state = stack.on_request(state, facts).state
        state = stack.before_read(state, facts, fresh).state
        state = stack.after_read(state, facts).state
        for window in range(100):
            state = stack.before_round(state, facts.prompt_tokens + 3 * window, 4).state
        state = stack.after_request(state, facts, facts.prompt_tokens + 300).state
        grown += state.kv_mapped_cells > before
        length[name], live = facts.prompt_tokens + 300, name
    assert grown > 50
    check_state(stack.ctx.sizes, stack.ctx.plan, state)


@pytest.mark.parametrize(
    ("vram_mib", "compat", "allowed", "anywhere"),
    [
        (24_000, Compat.NATIVE, True, False),  # enough lies under the loan
        (9_500, Compat.NATIVE, True, True),
        (9_500, Compat.NATIVE, False, False),
        (9_500, Compat.UPSTREAM, True, False),
    ],
)
def test_slots_pay_anywhere_only_when_those_under_the_loan_are_too_few(
    vram_mib: int, compat: Compat, allowed: bool, anywhere: bool
) -> None:
    plan = pm.make_stack(on=pm.card(vram_mib), grow=pm.GROW).ctx.plan
    plan = replace(plan, request=replace(plan.request, grow=replace(plan.request.grow, anywhere=allowed)))
    assert policy_stack(pm.sizes_of(), plan, compat=compat).ctx.grows_anywhere is anywhere


def test_growth_leaves_the_bytes_of_an_unloaded_head_alone() -> None:
    stack = composed(("head_alias", "kv_grow"))
    ready = pm.ready(stack)
    assert not ready.head_loaded
    assert stack.ctx.spendable_bytes(ready) == max(0, ready.free_bytes - stack.ctx.plan.head_bytes)
    loaded = stack.before_round(ready, 10, 4).state
    assert stack.ctx.spendable_bytes(loaded) == max(0, loaded.free_bytes) == stack.ctx.spendable_bytes(ready)
