"""Random requests, windows, segments and faults in any order: invariants hold, moves account for every byte.

A fault is an executor that fails somewhere in a step, or a hook that fails inside: the state before it must be as it
was, and the next operation goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import policy_models as pm
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import MIB
from strata_jax.policies.adaptive import land
from strata_jax.policies.conversation_budget import match_prefix, recheck
from strata_jax.policies.invariants import check_state
from strata_jax.policies.policy import AdaptSettings, PolicyParameters, Prices
from strata_jax.policies.stack import policy_stack
from strata_jax.policies.state import MemoryState, RequestFacts, Step

CONTEXT = 65_536
NAMES = ("a", "b", "c")


class InjectedFault(Exception):
    """What a failing executor or a failing price raises."""


@dataclass
class Faults:
    """Prices that fail at the n-th call from now."""

    left: int | None = None

    def step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise InjectedFault

    def wrap(self, prices: Prices) -> Prices:
        def buffer_bytes(tokens: int) -> int:
            self.step()
            return prices.buffer_bytes(tokens)

        def kv_chunks(cells: int, chunk_bytes: int) -> int:
            self.step()
            return prices.kv_chunks(cells, chunk_bytes)

        def image_bytes(tokens: int, checkpoints: int) -> int:
            self.step()
            return prices.image_bytes(tokens, checkpoints)

        return Prices(buffer_bytes, kv_chunks, image_bytes, prices.checkpoint_bytes)


def build(names: tuple[str, ...], anywhere: bool, faults: Faults) -> pm.PolicyStack:
    given: dict[str, object] = {"context_cells": CONTEXT, "reserve_mib": 900, "checkpoints": 3}
    if "alias" in names:
        given["head_alias"] = True
    if "grow" in names:
        given["grow"] = replace(pm.GROW, init_cells=8_192, step_cells=4_096)
    if "park" in names:
        given |= {"conversation_mib": 1_500, "conversation_slots": 2}
    if "own" in names:
        given |= {"own": "auto", "expert_cache": 1_000}
    plan = pm.make_stack("iq2_xs", pm.card(11_000, os="windows"), **given).ctx.plan
    if "elastic" in names:
        plan = replace(plan, request=replace(plan.request, vram_elastic_mib=256))
    parameters = PolicyParameters(
        grow_anywhere=anywhere, alias_min_fresh_tokens=600, adapt=AdaptSettings(every_rounds=2, swaps=20)
    )
    plain = policy_stack(pm.sizes_of(), plan, parameters=parameters)
    return policy_stack(pm.sizes_of(), plan, parameters=parameters, prices=faults.wrap(plain.ctx.prices))


class Memory(RuleBasedStateMachine):
    """One engine: requests come, are read in segments, decode, are cancelled; others want memory."""

    names: tuple[str, ...] = ()
    anywhere = False

    @initialize()
    def start(self) -> None:
        self.faults = Faults()
        self.stack = build(self.names, self.anywhere, self.faults)
        self.state = self.stack.initial_state(ram_available_bytes=8_000 * MIB)
        self.ledger = pm.MoveLedger(self.stack, self.state)
        self.facts: RequestFacts | None = None
        self.position = 0
        self.lengths = dict.fromkeys(NAMES, 0)
        self.publish(self.stack.on_start(self.state))

    def publish(self, step: Step) -> None:
        self.ledger.apply(step.moves)
        self.state = step.state

    def attempt(self, hook, fault: int | None) -> bool:  # type: ignore[no-untyped-def]
        """Carry a hook out unless it fails, or its executor does; whatever fails leaves the memory alone."""
        before, marks = self.state, pm.fingerprint(self.state)
        self.faults.left = fault
        try:
            step = hook(self.state)
        except (DoesNotFit, InjectedFault):
            done = False
        else:
            done = fault is None or fault >= len(step.moves)  # else its executor fails at that move
            if done:
                self.publish(step)
        self.faults.left = None
        assert pm.fingerprint(before) == marks, "a hook changed the state it was given"
        return done

    FAULT = st.one_of(st.none(), st.none(), st.integers(0, 8))

    @precondition(lambda self: self.facts is None)
    @rule(name=st.sampled_from(NAMES), fresh=st.integers(1, 30_000), fault=FAULT)
    def request(self, name: str, fresh: int, fault: int | None) -> None:
        shared = self.lengths[name]
        prompt = min(shared + fresh, CONTEXT - 2_000)
        reused = match_prefix(self.state, name, shared, prompt).tokens
        live = self.state.live
        facts = pm.ask(
            name, prompt, reused=reused, output=500, switches=live is not None and live.name != name,
            boundaries=(prompt // 2, prompt - 1),
        )  # fmt: skip
        if self.attempt(lambda s: self.stack.on_request(s, facts), fault):
            assert self.state.kv_mapped_cells >= min(prompt + 256, CONTEXT) or "grow" not in self.names
            self.facts, self.position = facts, prompt

    @precondition(lambda self: self.facts is not None)
    @rule(fresh=st.integers(1, 20_000), fault=FAULT)
    def read(self, fresh: int, fault: int | None) -> None:
        facts = self.facts
        assert facts is not None
        self.attempt(lambda s: self.stack.before_read(s, facts, fresh), fault)

    @precondition(lambda self: self.facts is not None)
    @rule(count=st.integers(1, 6), seed=st.integers(0, 1_000), fault=FAULT)
    def decode(self, count: int, seed: int, fault: int | None) -> None:
        facts = self.facts
        assert facts is not None
        if not self.attempt(lambda s: self.stack.after_read(s, facts), fault):
            return
        rng = np.random.default_rng(seed)
        for _ in range(count):
            used = rng.choice(24_576, 400).astype(np.int32)
            used = np.concatenate([used, np.repeat(used[:30], 4)])
            self.position = min(self.position + 150, CONTEXT - 8)
            if not self.attempt(lambda s, u=used: self.stack.before_round(s, self.position, 4, u), None):
                return
            assert self.state.head_loaded
            assert not self.state.reading

    @precondition(lambda self: self.facts is not None)
    @rule()
    def finish(self) -> None:
        facts = self.facts
        assert facts is not None
        if not self.attempt(lambda s: self.stack.after_read(s, facts), None):
            return
        self.attempt(lambda s: self.stack.after_request(s, facts, self.position), None)
        self.lengths[facts.conversation] = self.position
        self.facts = None

    @rule(wish_mib=st.integers(0, 6_000), fault=FAULT)
    def others_want_memory(self, wish_mib: int, fault: int | None) -> None:
        self.attempt(lambda s: self.stack.on_vram_change(s, wish_mib * MIB), fault)

    @rule(ram_mib=st.one_of(st.none(), st.integers(0, 9_000)))
    def ram_changes(self, ram_mib: int | None) -> None:
        self.state = replace(self.state, ram_available_bytes=None if ram_mib is None else ram_mib * MIB)
        self.attempt(lambda s: recheck(self.stack.ctx, s), None)

    @rule()
    def wait_for_copies(self) -> None:
        self.attempt(lambda s: land(self.stack.ctx, s, due=None), None)
        assert self.state.pending == ()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "stack"):
            check_state(self.stack.ctx.sizes, self.stack.ctx.plan, self.state)
            self.ledger.check(self.state)


def machine_of(names: tuple[str, ...], anywhere: bool) -> type[Memory]:
    return type("Machine", (Memory,), {"names": names, "anywhere": anywhere})


@pytest.mark.parametrize("anywhere", [False, True], ids=["under_the_loan", "anywhere"])
@pytest.mark.parametrize(
    "names",
    [
        (),
        ("grow", "park"),
        ("alias", "park"),
        ("elastic",),
        ("own", "grow", "park"),
        ("grow", "alias", "elastic", "park"),
    ],
    ids=lambda names: "+".join(names) or "baseline",
)
def test_random_operations_keep_every_invariant(names: tuple[str, ...], anywhere: bool) -> None:
    test = machine_of(names, anywhere).TestCase
    test.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    test("runTest").runTest()


def test_nothing_leaks_over_1000_operations() -> None:
    faults = Faults()
    stack = build(("grow", "park", "elastic"), False, faults)
    state: MemoryState = stack.on_start(stack.initial_state(ram_available_bytes=8_000 * MIB)).state
    rng = np.random.default_rng(1)
    live = None
    for i in range(250):
        name = str(rng.choice(NAMES))
        facts = pm.ask(name, int(rng.integers(100, 60_000)), switches=live not in (None, name))
        state = pm.serve(stack, state, facts).state
        if i % 10 == 0:
            state = stack.on_vram_change(state, int(rng.integers(0, 4_000)) * MIB).state
        live = name
    state = stack.on_vram_change(state, 0).state
    state = stack.on_request(state, pm.ask("small", 10, switches=True)).state
    check_state(stack.ctx.sizes, stack.ctx.plan, state)
    assert state.slots.given == 0
    assert state.spare_chunks == 0
    assert state.slots.end is None
