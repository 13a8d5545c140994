"""Baseline lending: how many slots, from where, and that the same experts come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import policy_models as pm
import pytest

from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import Owner
from strata_jax.policies.ledger_now import owner_bytes
from strata_jax.policies.moves import MoveKind


@pytest.mark.parametrize(
    ("fresh", "tokens"),
    [(65, 256), (256, 256), (257, 512), (1_000, 1_024), (8_191, 8_192), (8_193, 8_192), (90_000, 8_192)],
)
def test_buffers_are_laid_out_for_the_read_on_the_256_grid(fresh: int, tokens: int) -> None:
    stack = pm.make_stack()
    state = pm.ready(stack)
    assert state.chunk_tokens == 8_192
    lend = pm.one(stack.before_read(state, pm.ask("a", fresh), fresh).moves, MoveKind.LEND)
    assert pm.detail(lend, "chunk_tokens") == tokens
    need = pm.detail(lend, "buffer_bytes")
    offsets = state.slots.offset_bytes
    assert offsets[-1] - offsets[lend.first] >= need > offsets[-1] - offsets[lend.first + 1], "smallest k for the need"
    assert lend.bytes == offsets[-1] - offsets[lend.first]


def test_a_full_read_borrows_what_the_plan_says() -> None:
    stack = pm.make_stack("iq3_s")
    state = stack.before_read(pm.ready(stack), pm.ask("a", 30_000), 30_000).state
    prompt = stack.ctx.plan.prompt
    assert state.lent_from == prompt.first_lent
    assert state.slots.num_slots - prompt.first_lent == prompt.lent_slots
    assert state.slots.lendable_bytes(prompt.first_lent) == prompt.lent_bytes


def test_lent_experts_are_not_resident_and_come_back_to_their_slots() -> None:
    stack = pm.make_stack("iq3_s")
    state = pm.ready(stack)
    rng = np.random.default_rng(0)
    table = replace(state.slots, occupant=rng.permutation(state.slots.occupant[state.slots.sizes() > 0]))
    table.occupant[rng.integers(0, table.num_slots, 50)] = -1
    state = replace(state, slots=table)
    before = table.occupant.copy()
    reading = stack.before_read(state, pm.ask("a", 30_000), 30_000)
    first = reading.state.lent_from
    assert first is not None
    assert np.array_equal(reading.state.resident_ranks(), before[:first][before[:first] >= 0])
    after = stack.after_read(reading.state, pm.ask("a", 30_000))
    assert pm.kinds(after.moves) == [MoveKind.RETURN, MoveKind.REFILL]
    assert np.array_equal(after.state.slots.occupant, before)
    refill = pm.one(after.moves, MoveKind.REFILL)
    lent = before[first:][before[first:] >= 0]
    assert (refill.count, refill.bytes) == (len(lent), stack.ctx.rank_bytes[lent].sum())
    assert not after.state.reading


def test_a_later_larger_segment_borrows_more_and_a_smaller_one_nothing() -> None:
    stack = pm.make_stack()
    facts = pm.ask("a", 5_000)
    small = stack.before_read(pm.ready(stack), facts, 300)
    large = stack.before_read(small.state, facts, 4_000)
    assert pm.one(large.moves, MoveKind.LEND).last == small.state.lent_from
    total = sum(pm.one(s.moves, MoveKind.LEND).bytes for s in (small, large))
    assert total == large.state.slots.lendable_bytes(large.state.lent_from or 0)
    assert stack.before_read(large.state, facts, 300).moves == ()


def test_prompt_buffers_own_what_is_lent() -> None:
    stack = pm.make_stack()
    state = pm.ready(stack)
    reading = pm.checked(stack, stack.before_read(state, pm.ask("a", 9_000), 9_000)).state
    idle, busy = (owner_bytes(stack.ctx.sizes, stack.ctx.plan, s) for s in (state, reading))
    lent = stack.ctx.plan.prompt.lent_bytes
    assert busy[Owner.PROMPT_BUFFERS] == lent
    assert idle[Owner.EXPERT_SLOTS] - busy[Owner.EXPERT_SLOTS] == lent


def test_a_read_that_no_longer_fits_is_refused_with_the_shortfall() -> None:
    stack = pm.make_stack()
    state = pm.ready(stack)
    cut = replace(state, slots=replace(state.slots, top=state.slots.top + 100))
    with pytest.raises(DoesNotFit, match=r"a read of 8,192 tokens needs .* MiB of prompt buffers") as error:
        stack.before_read(cut, pm.ask("a", 9_000), 9_000)
    assert error.value.shortfall_bytes > 0


def test_uniform_slots_lend_by_the_largest_blob() -> None:
    stack = pm.make_stack("iq3_s", cache_per_layer=True)
    state = pm.ready(stack)
    held = state.slots.occupant[state.slots.occupant >= 0]
    per_layer = np.bincount(stack.ctx.sizes.rank_layer[held], minlength=48)
    assert len(set(per_layer.tolist())) == 1
    lend = pm.one(stack.before_read(state, pm.ask("a", 300), 300).moves, MoveKind.LEND)
    assert lend.count == -(-pm.detail(lend, "buffer_bytes") // stack.ctx.sizes.max_blob_bytes)


def test_the_smallest_loan_is_exact_to_the_byte() -> None:
    slots = pm.ready(pm.make_stack("iq3_s")).slots
    tail = slots.lendable_bytes(slots.num_slots - 10)
    assert slots.loan_first(tail) == slots.num_slots - 10
    assert slots.loan_first(tail + 1) == slots.num_slots - 11
    assert slots.loan_first(slots.total_bytes) == 0
    assert slots.loan_first(slots.total_bytes + 1) is None
