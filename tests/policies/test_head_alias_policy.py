"""Head alias: start, the cycle of a request, the hybrid part, the threshold beyond the original, the guard."""

from __future__ import annotations

from dataclasses import replace

import policy_models as pm
import pytest

from strata_jax.errors import DoesNotFit, StrataError
from strata_jax.memory.ledger import MIB, Owner
from strata_jax.memory.strata.result import Layout
from strata_jax.policies.head_alias import break_even_tokens, check_head_address
from strata_jax.policies.ledger_now import overcommit_bytes, owner_bytes
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import Compat, PolicyParameters
from strata_jax.policies.stack import policy_stack

LAPTOP = pm.card(8_151, taken_bytes=850 * MIB, late_bytes=303 * MIB, os="windows", pinned_share=0.0)
SETTINGS = {
    "kv_type": "q4_0", "kv_resident_cells": 32_768, "reserve_mib": 590, "draft_vocab": 40_525, "head_alias": True,
}  # fmt: skip


def laptop(parameters: PolicyParameters | None = None, **changes: object) -> pm.PolicyStack:
    return pm.make_stack("iq3_xxs", LAPTOP, parameters=parameters, **(SETTINGS | {"short_read_tokens": 0} | changes))


def hybrid(own_mib: int, parameters: PolicyParameters | None = None) -> pm.PolicyStack:
    """The laptop's plan with slots that lack `own_mib` of the buffers."""
    plan = laptop().ctx.plan
    prompt = replace(
        plan.prompt, layout=Layout.HYBRID, own_bytes=own_mib * MIB, first_lent=1, lent_slots=plan.slots - 1,
        buffer_bytes=plan.cache_bytes + own_mib * MIB - 2 * MIB,
    )  # fmt: skip
    return policy_stack(pm.sizes_of("iq3_xxs"), replace(plan, prompt=prompt), parameters=parameters)


def refusing(stack: pm.PolicyStack) -> pm.PolicyStack:
    """The same plan under a driver that pages nothing."""
    plan = stack.ctx.plan
    return policy_stack(stack.ctx.sizes, replace(plan, request=replace(plan.request, spill=False)))


def test_the_head_is_unloaded_at_start_and_the_plan_is_ready() -> None:
    stack = laptop()
    step = stack.on_start(stack.initial_state())
    assert pm.kinds(step.moves) == [MoveKind.UNLOAD_HEAD]
    assert step.moves[0].bytes == stack.ctx.plan.head_bytes == 437_043_200
    assert step.state.free_bytes == stack.ctx.plan.free_after_start_bytes
    assert owner_bytes(stack.ctx.sizes, stack.ctx.plan, step.state)[Owner.HEAD] == 0


def test_every_request_of_the_original_unloads_and_loads_even_a_tiny_one() -> None:
    stack = laptop()
    state = pm.serve(stack, pm.ready(stack), pm.ask("a", 3_000)).state
    assert state.head_loaded
    step = pm.serve(stack, state, pm.ask("a", 3_010, reused=3_000))
    assert pm.kinds(step.moves) == [
        MoveKind.UNLOAD_HEAD, MoveKind.LEND, MoveKind.RETURN, MoveKind.REFILL, MoveKind.LOAD_HEAD,
    ]  # fmt: skip


def test_hybrid_buffers_are_allocated_for_the_read_and_freed_before_the_head_comes_back() -> None:
    stack = hybrid(100)
    state = pm.serve(stack, pm.ready(stack), pm.ask("a", 3_000)).state
    step = pm.serve(stack, state, pm.ask("b", 3_000))
    assert pm.kinds(step.moves) == [
        MoveKind.UNLOAD_HEAD, MoveKind.ALLOC_BUFFERS, MoveKind.LEND,
        MoveKind.RETURN, MoveKind.REFILL, MoveKind.FREE_BUFFERS, MoveKind.LOAD_HEAD,
    ]  # fmt: skip
    own = pm.one(step.moves, MoveKind.ALLOC_BUFFERS).bytes
    lend = pm.one(step.moves, MoveKind.LEND)
    assert own + lend.bytes >= stack.ctx.plan.prompt.buffer_bytes
    assert lend.first == 1, "slot 0 stays with the cache"
    assert step.state.own_buffer_bytes == 0


def test_a_smaller_read_needs_no_own_part() -> None:
    stack = hybrid(100)
    step = stack.before_read(pm.ready(stack), pm.ask("a", 100), 100)
    assert MoveKind.ALLOC_BUFFERS not in pm.kinds(step.moves)


@pytest.mark.parametrize(("threshold", "fresh", "stays"), [(0, 1, False), (513, 512, True), (513, 513, False)])
def test_below_the_threshold_a_loaded_head_stays(threshold: int, fresh: int, stays: bool) -> None:
    stack = laptop(PolicyParameters(alias_min_fresh_tokens=threshold))
    state = pm.serve(stack, pm.ready(stack), pm.ask("a", 3_000)).state
    step = pm.serve(stack, state, pm.ask("a", 3_000 + fresh, reused=3_000))
    assert (MoveKind.UNLOAD_HEAD not in pm.kinds(step.moves)) is stays
    assert MoveKind.LEND in pm.kinds(step.moves)
    assert step.state.head_loaded


def test_the_head_goes_whatever_the_threshold_when_slots_alone_do_not_hold_the_read() -> None:
    stack = hybrid(100, PolicyParameters(alias_min_fresh_tokens=10_000))
    state = pm.serve(stack, pm.ready(stack), pm.ask("a", 3_000)).state
    assert MoveKind.UNLOAD_HEAD in pm.kinds(stack.before_read(state, pm.ask("b", 4_000), 4_000).moves)
    assert MoveKind.UNLOAD_HEAD not in pm.kinds(stack.before_read(state, pm.ask("b", 200), 200).moves)


def test_an_unloaded_head_is_loaded_by_the_first_window() -> None:
    stack = laptop(short_read_tokens=64)
    step = stack.before_round(pm.ready(stack), 20, 4)
    assert pm.kinds(step.moves) == [MoveKind.LOAD_HEAD]
    assert stack.before_round(step.state, 24, 4).moves == ()


def test_on_windows_decoding_may_leave_nothing_free_elsewhere_it_is_refused() -> None:
    stack = laptop()
    step = stack.before_round(pm.ready(stack), 20, 4)
    assert step.state.free_bytes < 0
    assert overcommit_bytes(step.state) == stack.ctx.plan.head_bytes - stack.ctx.plan.free_after_start_bytes
    assert step.notes == ("0 MiB of device memory are free while decoding",)
    pm.checked(stack, step)
    strict = refusing(stack)
    with pytest.raises(DoesNotFit, match=r"the head needs 416\.8 MiB to decode") as error:
        strict.before_round(pm.ready(strict), 20, 4)
    assert error.value.shortfall_bytes == -step.state.free_bytes


def test_own_part_that_does_not_fit_is_refused() -> None:
    stack = refusing(hybrid(2_000))
    with pytest.raises(DoesNotFit, match=r"own part of the prompt buffers needs"):
        stack.before_read(pm.ready(stack), pm.ask("a", 4_000), 4_000)


def test_a_head_at_another_address_stops_the_original_only() -> None:
    check_head_address(Compat.UPSTREAM, 4_096, 4_096)
    check_head_address(Compat.NATIVE, 4_096, 8_192)
    with pytest.raises(StrataError, match="0x1000 and has been loaded at 0x2000"):
        check_head_address(Compat.UPSTREAM, 4_096, 8_192)


def test_reads_keep_the_head_as_long_as_slots_hold_their_buffers() -> None:
    ctx = laptop().ctx
    prompt = replace(ctx.plan.prompt, chunk_tokens=2_048, lent_bytes=ctx.buffer_bytes(512))
    ctx = replace(ctx, plan=replace(ctx.plan, prompt=prompt))
    least = break_even_tokens(ctx, cycle_ms=34.0)
    assert least == 513
    assert ctx.buffer_bytes(512) <= prompt.lent_bytes < ctx.buffer_bytes(least + 255)


def test_a_cycle_that_costs_nothing_is_always_taken_and_one_that_gains_nothing_never() -> None:
    ctx = laptop().ctx
    assert break_even_tokens(ctx, cycle_ms=0.0) == 0
    held = replace(ctx.plan.prompt, lent_bytes=ctx.plan.prompt.buffer_bytes)
    ctx = replace(ctx, plan=replace(ctx.plan, prompt=held))
    assert break_even_tokens(ctx, cycle_ms=34.0) > ctx.plan.request.context_cells
