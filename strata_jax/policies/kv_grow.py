"""Elastic K/V: cells are mapped in steps and paid for by the coldest expert slots (planning notes 6.3).

As the original (`grow_anywhere` off): physical chunks leave the cache range just under the loan, from the top down to a
floor; a hot expert in the way first moves into the coldest large-enough slot of the loan region. Trimming maps chunks
back as one run from `low` upward and refills the slots they cover completely.

Anywhere: K/V pages are table entries, so the coldest slots pay wherever they lie, nothing is copied, and what a slot
keeps of a page is all that is lost. The loan then starts lower, or the chunk shrinks, so that both still fit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import MIB
from strata_jax.policies.adaptive import land
from strata_jax.policies.grow_anywhere import give_coldest, take_back
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import Policy, PolicyContext, refit_chunk
from strata_jax.policies.residency import ColdestSlots, heat, hottest_that_fit
from strata_jax.policies.state import EMPTY, GIVEN, MemoryState, RequestFacts, SlotTable, Step, with_slots

GIB = 2**30


class KvGrow(Policy):
    """Grow before a prompt, before a restore and inside decoding; trim when a session has been parked."""

    name = "kv_grow"

    def on_start(self, ctx: PolicyContext, state: MemoryState) -> Step:
        """Map the whole window at once where growth could never pay: no slots above the floor."""
        if not growth_refusal(ctx, state):
            return Step(state)
        window = ctx.plan.request.context_cells
        need = (ctx.kv_chunks(window) - ctx.kv_chunks(state.kv_mapped_cells)) * ctx.granule_bytes
        if need > ctx.spendable_bytes(state):
            raise DoesNotFit(
                f"elastic K/V is off for this run ({growth_refusal(ctx, state)}) and the whole window of {window:,}"
                f" cells needs {need / MIB:,.0f} MiB more; {ctx.spendable_bytes(state) / MIB:,.0f} MiB are free; set a"
                " smaller model.max_context, or policy.kv_grow.enabled=false",
                shortfall_bytes=need - ctx.spendable_bytes(state),
            )
        note = f"elastic K/V off for this run: {growth_refusal(ctx, state)}; the whole window is mapped up front"
        step = _map_cells(ctx, state, window, 0, need // ctx.granule_bytes, "", "start")
        return Step(step.state, step.moves, (note,))

    def after_park(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """Trim to what the new request needs."""
        cells = facts.prompt_tokens + ctx.parameters.request_margin_cells
        if ctx.parameters.keep_restorable:
            cells = max([cells, *(c.tokens + ctx.parameters.request_margin_cells for c in state.parked)])
        return trim(ctx, state, cells, facts.conversation)

    def before_restore(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, tokens: int) -> Step:
        """A restored session's cells must be there before they are written."""
        return ensure(ctx, state, tokens + ctx.parameters.request_margin_cells, facts.conversation, "restore")

    def on_request(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts) -> Step:
        """Grow to the prompt and a margin."""
        cells = facts.prompt_tokens + ctx.parameters.request_margin_cells
        return ensure(ctx, state, cells, facts.conversation, "request")

    def before_round(
        self, ctx: PolicyContext, state: MemoryState, position: int, window: int, used: NDArray[np.int32] | None = None
    ) -> Step:
        """Grow when the window and a margin would pass the mapped cells."""
        cells = position + window + ctx.parameters.round_margin_cells
        if cells <= state.kv_mapped_cells:
            return Step(state)
        return ensure(ctx, state, cells, "", "decode")


def growth_refusal(ctx: PolicyContext, state: MemoryState) -> str | None:
    """Return why slots could never pay for K/V cells, None if they can."""
    floor, slots = ctx.plan.request.grow.floor_slots, state.slots
    if state.kv_mapped_cells >= ctx.plan.request.context_cells:
        return None
    if ctx.grows_anywhere:
        able = slots.borders[0] if slots.borders else slots.num_present
        return f"{able:,} slots, the floor is {floor:,}" if able <= floor else None
    return f"{slots.top:,} slots under the loan, the floor is {floor:,}" if slots.top <= floor else None


def ensure(ctx: PolicyContext, state: MemoryState, cells: int, conversation: str = "", why: str = "request") -> Step:
    """Map at least `cells` cells, in whole steps and never beyond the window.

    Raises DoesNotFit with the shortfall when slots above the floor and free memory together are too few.
    """
    grow, window = ctx.plan.request.grow, ctx.plan.request.context_cells
    if min(cells, window) <= state.kv_mapped_cells:
        return Step(state)
    target = min(window, -(-cells // grow.step_cells) * grow.step_cells)
    need = ctx.kv_chunks(target) - ctx.kv_chunks(state.kv_mapped_cells)
    step = land(ctx, state, due=None)
    give = give_coldest if ctx.grows_anywhere else _give_under_loan
    given = give(ctx, step.state, need - step.state.spare_chunks)
    step = step.then(given)
    from_spare = min(need, step.state.spare_chunks)
    new = need - from_spare
    short = new * ctx.granule_bytes - ctx.spendable_bytes(step.state)
    if new and short > 0:
        raise DoesNotFit(
            f"elastic K/V cannot map {target:,} cells: {short / MIB:,.0f} MiB are missing. They need"
            f" {need * ctx.granule_bytes / MIB:,.0f} MiB beyond the {state.kv_mapped_cells:,} cells that are mapped;"
            f" the slots above the floor of {grow.floor_slots:,} and free memory have"
            f" {(need * ctx.granule_bytes - short) / MIB:,.0f} MiB. Shorten the request, or set a smaller"
            " kv.grow.floor_slots",
            shortfall_bytes=short,
        )
    return step.then(_map_cells(ctx, step.state, target, from_spare, new, conversation, why, state.slots.given))


def trim(ctx: PolicyContext, state: MemoryState, cells: int, conversation: str = "") -> Step:
    """Unmap what is above `cells`, once that is `hysteresis_steps` steps or more, and give its slots back."""
    grow = ctx.plan.request.grow
    target = max(grow.step_cells, -(-cells // grow.step_cells) * grow.step_cells)
    if state.kv_mapped_cells < target + grow.hysteresis_steps * grow.step_cells or not state.slots.given:
        return Step(state)
    step = land(ctx, state, due=None)
    state = step.state
    chunks = ctx.kv_chunks(state.kv_mapped_cells) - ctx.kv_chunks(target)
    spare = state.spare_chunks + chunks
    back, slots, returned = (take_back if ctx.grows_anywhere else _map_back)(ctx, state.slots, spare)
    occupant = slots.occupant.copy()
    filled = hottest_that_fit(slots.sizes()[returned].tolist(), ctx.rank_bytes, occupant[occupant >= 0])
    occupant[returned] = filled
    ranks = np.array([rank for rank in filled if rank >= 0], np.int64)
    left = 0 if ctx.grows_anywhere or ctx.parameters.pages_stay else spare - back
    g = ctx.granule_bytes
    cause = f"{KvGrow.name}: the session has been parked"
    moves = [
        Move(
            MoveKind.TRIM_CELLS, "K/V", chunks * g, count=state.kv_mapped_cells - target, first=target,
            last=state.kv_mapped_cells, cause=cause, conversation=conversation,
            detail=(("slot_bytes", back * g), ("free_bytes", left * g), ("spare_bytes", (chunks - back - left) * g),
                    ("returned_slots", len(returned))),
        )
    ]  # fmt: skip
    if len(ranks):
        moves.append(
            Move(
                MoveKind.REFILL, "expert slots", int(ctx.rank_bytes[ranks].sum()), count=len(ranks),
                first=int(returned[0]), last=int(returned[-1]) + 1, cause=cause, conversation=conversation,
            )
        )  # fmt: skip
    after = replace(
        state, slots=replace(slots, occupant=occupant), kv_mapped_cells=target, spare_chunks=spare - back - left,
        kv_grown_chunks=state.kv_grown_chunks - chunks, free_bytes=state.free_bytes + left * g,
    )  # fmt: skip
    if ctx.grows_anywhere:
        after = refit_chunk(ctx, after, after.slots.top) or after
    note = f"K/V trimmed to {target:,} cells; {len(returned):,} expert slots are back, {len(ranks):,} refilled"
    return step.then(Step(after, tuple(moves), (note,)))


def _map_cells(
    ctx: PolicyContext, state: MemoryState, target: int, from_spare: int, new: int, conversation: str, why: str,
    given_before: int = 0,
) -> Step:  # fmt: skip
    """Map up to `target` with spare chunks and new memory; the log counts the slots given since `given_before`."""
    g = ctx.granule_bytes
    given = state.slots.given - given_before
    move = Move(
        MoveKind.MAP_CELLS, "K/V", (from_spare + new) * g, count=target - state.kv_mapped_cells,
        first=state.kv_mapped_cells, last=target, cause=f"{KvGrow.name}: {why}", conversation=conversation,
        detail=(("spare_bytes", from_spare * g), ("new_bytes", new * g), ("given_slots", given)),
    )  # fmt: skip
    after = replace(
        state, kv_mapped_cells=target, kv_grown_chunks=state.kv_grown_chunks + from_spare + new,
        spare_chunks=state.spare_chunks - from_spare, free_bytes=state.free_bytes - new * g,
    )  # fmt: skip
    size = ctx.kv_chunks(target) * g
    text = f"{size / GIB:.2f} GiB" if size >= GIB // 16 else f"{size / MIB:.2f} MiB"
    note = f"K/V grown to {target:,} cells ({text}); the expert cache gave {given:,} slots"
    return Step(after, (move,), (note,))


def _give_under_loan(ctx: PolicyContext, state: MemoryState, chunks: int) -> Step:
    """Take slots from the loan's edge downward until `chunks` whole chunks can leave the cache, or the floor."""
    slots, g = state.slots, ctx.granule_bytes
    if chunks <= 0:
        return Step(state)
    floor = ctx.plan.request.grow.floor_slots
    end = slots.unmapped_from if slots.unmapped_chunks else int(slots.offset_bytes[slots.top]) // g
    low = slots.low
    wanted = (end - chunks) * g  # low's offset, rounded up to a chunk, may not exceed this
    while low > floor and -(-int(slots.offset_bytes[low]) // g) * g > wanted:
        low -= 1
    first = -(-int(slots.offset_bytes[low]) // g)
    freed = max(0, end - first)
    if not freed:
        return Step(state)
    occupant, moved, evicted = _move_hot_experts(ctx, state, low)
    cause = f"{KvGrow.name}: chunks for cells"
    step = Step(state)
    if moved:
        num_bytes = int(ctx.rank_bytes[moved].sum())
        move = Move(
            MoveKind.MOVE_EXPERT, "expert slots", num_bytes, count=len(moved), first=low, last=slots.low, cause=cause
        )
        note = f"{len(moved):,} hotter experts moved into the loan region"
        step = Step(with_slots(state, occupant=_moved(slots, occupant)), (move,), (note,))
    occupant[low : slots.low] = GIVEN
    num_bytes = int(ctx.rank_bytes[evicted].sum()) if evicted else 0
    move = Move(
        MoveKind.EVICT, "expert slots", num_bytes, count=len(evicted), first=low, last=slots.low, cause=cause,
        detail=(("given_slots", slots.low - low), ("unmapped_bytes", freed * g)),
    )  # fmt: skip
    table = replace(
        slots, occupant=occupant, low=low, unmapped_from=end - freed, unmapped_chunks=slots.unmapped_chunks + freed
    )
    return step.then(Step(replace(state, slots=table, spare_chunks=state.spare_chunks + freed), (move,)))


def _moved(slots: SlotTable, after: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the occupants when experts have moved into the slots that differ `after`wards and nothing else has."""
    occupant, present = slots.occupant.copy(), slots.num_present
    targets = np.flatnonzero(after != occupant)
    occupant[:present][np.isin(occupant[:present], after[targets])] = EMPTY
    occupant[targets] = after[targets]
    return occupant


def _move_hot_experts(
    ctx: PolicyContext, state: MemoryState, low: int
) -> tuple[NDArray[np.int32], list[int], list[int]]:
    """Return (new occupants, moved ranks, evicted ranks) when slots [low, state.slots.low) are emptied, last first."""
    slots = state.slots
    occupant = slots.occupant.copy()
    leaving = occupant[low : slots.low][::-1]
    leaving = leaving[leaving >= 0]
    coldest = ColdestSlots(slots, slots.top, state.usage, occupant, len(leaving))
    moved: list[int] = []
    evicted: list[int] = []
    for rank, key in zip(leaving.tolist(), heat(leaving, state.usage).tolist()):
        slot = coldest.take_if_colder(key, int(ctx.rank_bytes[rank]))
        if slot is None:
            evicted.append(rank)
            continue
        evicted.append(int(occupant[slot]))
        moved.append(rank)
        occupant[slot] = rank
    return occupant, moved, evicted


def _map_back(ctx: PolicyContext, slots: SlotTable, chunks: int) -> tuple[int, SlotTable, NDArray[np.int64]]:
    """Return (chunks used, table, slots covered completely) of mapping chunks back as one run from `low` upward."""
    back = min(chunks, slots.unmapped_chunks)
    first, left = slots.unmapped_from + back, slots.unmapped_chunks - back
    low = slots.top if not left else int(np.searchsorted(slots.offset_bytes, first * ctx.granule_bytes, "right")) - 1
    table = replace(slots, low=low, unmapped_from=first if left else 0, unmapped_chunks=left)
    return back, table, np.arange(slots.low, low)
