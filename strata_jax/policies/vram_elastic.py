"""Elastic cache: whole segments at the end of the expert cache go back to the driver and return (planning notes 6.4).

Segments are given until the wished memory is free, the last ones first, never below the slots that a loan for 256
tokens and the kept slots need. Where they begin (`SlotTable.cut_bytes`) is the memory model's: every `segment_mib` in
the original, the segments of the arena in this project's engine, whose loan must hold the one chunk that programs are
compiled for. Afterwards the loan is planned again for the slots that are left. Memory that becomes free again takes the
segments back and refills the same experts into the same slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strata_jax.memory.ledger import MIB
from strata_jax.memory.strata.borrow import lend_pct
from strata_jax.memory.strata.cache import MIN_KEPT_SLOTS
from strata_jax.policies.adaptive import land
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import Policy, PolicyContext, refit_chunk
from strata_jax.policies.residency import hottest_that_fit
from strata_jax.policies.state import EMPTY, GIVEN, MemoryState, Step, with_slots


class VramElastic(Policy):
    """Give and take cache segments as other programs need memory."""

    name = "vram_elastic"

    def on_vram_change(self, ctx: PolicyContext, state: MemoryState, reserve_bytes: int) -> Step:
        """Make `reserve_bytes` free with as few segments as that takes, or take segments back above it."""
        if state.reading:
            return Step(state, notes=("a prompt holds lent slots: segments change when it has been read",))
        step = land(ctx, state, due=None)
        while ctx.spendable_bytes(step.state) < reserve_bytes and can_give(ctx, step.state):
            step = step.then(_give(step.state))
        while (
            step.state.segments_given
            and ctx.spendable_bytes(step.state) - _last_given_bytes(step.state) >= reserve_bytes
        ):
            step = step.then(_take(ctx, step.state))
        short = reserve_bytes - ctx.spendable_bytes(step.state)
        fewer = f"{_amount(short)} less than wished are free" if short > 0 else ""
        if step.state.segments_given == state.segments_given:
            return Step(state, notes=(f"no segment can be given: {fewer}",) if fewer else ())
        after = relend(ctx, step.state)
        note = (
            f"expert cache {after.slots.num_present:,} of {after.slots.num_slots:,} slots, prompt chunk"
            f" {after.chunk_tokens:,} tokens"
        )
        notes = (note, f"no further segment can be given: {fewer}") if fewer else (note,)
        return step.then(Step(after, notes=notes))


def can_give(ctx: PolicyContext, state: MemoryState) -> bool:
    """Whether one more segment can go: enough slots stay, and none of them is the K/V's."""
    slots = state.slots
    kept = slots.kept_bytes(state.segments_given + 1)
    if kept <= 0:
        return False
    present = slots.slots_within(kept)
    if np.any(slots.occupant[present : slots.num_present] == GIVEN) or present < slots.low < slots.top:
        return False
    least_loan = max(0, ctx.buffer_bytes(ctx.least_chunk_tokens) - ctx.guest_bytes)
    if slots.borders:  # what lies before the first of them always stays
        return not ctx.plan.prompt.lent_slots or replace(slots, end=present).loan_first(least_loan) is not None
    base = slots.top if slots.low < slots.top else MIN_KEPT_SLOTS
    if not ctx.plan.prompt.lent_slots:
        return present >= max(1, base if slots.low < slots.top else 1)
    loan = replace(slots, end=present).loan_first(least_loan)
    kept_floor = min(base, max(1, ctx.plan.prompt.first_lent))
    return loan is not None and loan >= (slots.top if slots.low < slots.top else kept_floor)


def relend(ctx: PolicyContext, state: MemoryState) -> MemoryState:
    """Plan the loan again: the largest chunk of the 256-token grid that fits in the lendable share of the slots.

    At least 128 slots stay, and 90 % of the slots may be lent (85 % when experts are not pinned; planning notes 2.6).
    """
    slots, prompt = state.slots, ctx.plan.prompt
    if slots.borders:  # any of their segments can be lent, and enough of them are left
        return state
    if slots.low < slots.top:
        return refit_chunk(ctx, state, slots.top) or state
    present = slots.num_present
    if not prompt.lent_slots:
        return with_slots(state, low=present, top=present)
    if present == slots.num_slots and not slots.given:
        return replace(
            with_slots(state, low=prompt.first_lent, top=prompt.first_lent), chunk_tokens=prompt.chunk_tokens
        )
    pct = lend_pct(ctx.plan.request, ctx.plan.card)
    least = min(max(MIN_KEPT_SLOTS, present - present * pct // 100), prompt.first_lent, present)
    fitted = refit_chunk(ctx, state, least)
    if fitted is None:  # a loan larger than the share: what `can_give` kept for it
        least = min(MIN_KEPT_SLOTS, prompt.first_lent, present)
        fitted = refit_chunk(ctx, state, least) or state
    first = slots.loan_first(max(0, ctx.buffer_bytes(fitted.chunk_tokens) - ctx.guest_bytes))
    top = least if first is None else max(least, min(first, present))
    return with_slots(fitted, low=top, top=top)


def _give(state: MemoryState) -> Step:
    slots = state.slots
    kept = slots.kept_bytes(state.segments_given + 1)
    freed = slots.kept_bytes(state.segments_given) - kept
    end = slots.slots_within(kept)
    gone = slots.occupant[end : slots.num_present]
    move = Move(
        MoveKind.GIVE_SEGMENT, "expert slots", freed, count=slots.num_present - end, first=end, last=slots.num_present,
        cause=f"{VramElastic.name}: other programs need memory", detail=(("experts", int((gone >= 0).sum())),),
    )  # fmt: skip
    top = min(slots.top, end)
    after = with_slots(state, end=end, low=min(slots.low, top), top=top)
    return Step(replace(after, segments_given=state.segments_given + 1, free_bytes=state.free_bytes + freed), (move,))


def _last_given_bytes(state: MemoryState) -> int:
    return state.slots.kept_bytes(state.segments_given - 1) - state.slots.kept_bytes(state.segments_given)


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB" if num_bytes >= MIB else f"{num_bytes:,} bytes"


def _take(ctx: PolicyContext, state: MemoryState) -> Step:
    slots, taken = state.slots, _last_given_bytes(state)
    first = slots.num_present
    end = slots.slots_within(slots.kept_bytes(state.segments_given - 1))
    occupant = slots.occupant.copy()
    resident = occupant[:first][occupant[:first] >= 0]
    back = occupant[first:end]
    back[np.isin(back, resident)] = EMPTY  # it has found another slot meanwhile
    holes = first + np.flatnonzero(back < 0)
    held = occupant[:end][occupant[:end] >= 0]
    occupant[holes] = hottest_that_fit(slots.sizes()[holes].tolist(), ctx.rank_bytes, held)
    ranks = occupant[first:end][occupant[first:end] >= 0]
    cause = f"{VramElastic.name}: memory is free again"
    moves = (
        Move(MoveKind.TAKE_SEGMENT, "expert slots", taken, count=end - first, first=first, last=end, cause=cause),
        Move(
            MoveKind.REFILL, "expert slots", int(ctx.rank_bytes[ranks].sum()), count=len(ranks), first=first, last=end,
            cause=cause,
        ),
    )  # fmt: skip
    after = with_slots(state, occupant=occupant, end=None if end == slots.num_slots else end)
    return Step(replace(after, segments_given=state.segments_given - 1, free_bytes=state.free_bytes - taken), moves)
