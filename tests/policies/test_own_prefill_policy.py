"""Own prompt buffers: allocated once, nothing lent, the cache as it was."""

from __future__ import annotations

from dataclasses import replace

import policy_models as pm
import pytest

from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import MIB, Owner
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.moves import MoveKind

SPARE = {"own": "auto", "expert_cache": 2_700, "reserve_mib": 1_536}


def test_spare_memory_pays_once_and_requests_move_nothing() -> None:
    stack = pm.make_stack("iq3_s", pm.card(24_000), **SPARE)
    plan = stack.ctx.plan
    step = stack.on_start(stack.initial_state())
    assert pm.kinds(step.moves) == [MoveKind.ALLOC_BUFFERS]
    assert step.moves[0].bytes == plan.prompt.own_bytes > 0
    assert step.state.free_bytes == plan.free_after_start_bytes
    assert stack.on_start(step.state).moves == ()
    served = pm.serve(stack, step.state, pm.ask("a", 30_000, output=100))
    assert served.moves == ()
    assert owner_bytes(stack.ctx.sizes, plan, served.state)[Owner.PROMPT_BUFFERS] == plan.prompt.own_bytes
    assert len(served.state.resident_ranks()) == plan.slots


def test_without_spare_memory_the_plan_borrows_and_the_policy_is_not_there() -> None:
    stack = pm.make_stack("iq3_s", own="auto")
    assert "prefill_own" not in stack.names
    assert MoveKind.LEND in pm.kinds(pm.serve(stack, pm.ready(stack), pm.ask("a", 3_000)).moves)


def test_the_cache_is_the_same_with_and_without() -> None:
    own = pm.make_stack("iq3_s", pm.card(24_000), **SPARE).ctx.plan
    borrowing = pm.make_stack("iq3_s", pm.card(24_000), **(SPARE | {"own": "off"})).ctx.plan
    assert own.slots == borrowing.slots
    assert own.prompt.chunk_tokens >= borrowing.prompt.chunk_tokens


def test_memory_taken_since_the_decision_is_an_error() -> None:
    stack = pm.make_stack("iq3_s", pm.card(24_000), **SPARE)
    start = stack.initial_state()
    own = stack.ctx.plan.prompt.own_bytes
    with pytest.raises(DoesNotFit, match="own prompt buffers need") as error:
        stack.on_start(replace(start, free_bytes=own - 7 * MIB))
    assert error.value.shortfall_bytes == 7 * MIB
    assert stack.on_start(replace(start, free_bytes=own)).state.free_bytes == 0
