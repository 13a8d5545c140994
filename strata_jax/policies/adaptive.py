"""Adaptive slots: experts that are used now take the slots of those that are not (planning notes 4.4).

Counters rise with use and decay at every decision. In each layer the hottest absent experts face the coldest residents;
pairs are sorted by gain over all layers. A victim leaves at once; its successor arrives by a copy that runs beside the
rounds and may land after a fixed number of rounds, so that runs are reproducible. Slots keep their layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import AdaptSettings, Policy, PolicyContext
from strata_jax.policies.state import EMPTY, MemoryState, RequestFacts, Step, Swap, with_slots


class AdaptiveSlots(Policy):
    """Count uses, decide every few rounds, land what has arrived."""

    name = "adaptive"

    def before_read(self, ctx: PolicyContext, state: MemoryState, facts: RequestFacts, fresh_tokens: int) -> Step:
        """A prompt's residency is kept apart: what is on its way lands first."""
        return land(ctx, state, due=None)

    def before_round(
        self, ctx: PolicyContext, state: MemoryState, position: int, window: int, used: NDArray[np.int32] | None = None
    ) -> Step:
        """Count the previous window, land what is due, and decide every `every_rounds` rounds."""
        settings = ctx.parameters.adapt
        if used is None or not settings.every_rounds:
            return Step(state)
        usage = np.zeros(len(ctx.rank_bytes), np.float32) if state.usage is None else state.usage.copy()
        np.add.at(usage, used, 1.0)
        rounds = state.rounds + 1
        decide = rounds % settings.every_rounds == 0
        if decide:
            usage *= np.float32(settings.decay)
        step = land(ctx, replace(state, usage=usage, rounds=rounds), due=rounds)
        return step.then(_swap(ctx, step.state, settings)) if decide else step


def land(ctx: PolicyContext, state: MemoryState, due: int | None) -> Step:
    """Put arrived experts into their slots: those due by a round, or all (the executor waits for them)."""
    landing = tuple(s for s in state.pending if due is None or s.due <= due)
    if not landing:
        return Step(state)
    occupant = state.slots.occupant.copy()
    for swap in landing:
        occupant[swap.slot] = swap.incoming
    waiting = tuple(s for s in state.pending if due is not None and s.due > due)
    copied = int(ctx.rank_bytes[[s.incoming for s in landing]].sum())
    move = Move(
        MoveKind.SWAP_EXPERT, "expert slots", copied, count=len(landing), cause=f"{AdaptiveSlots.name}: copies landed"
    )
    return Step(replace(with_slots(state, occupant=occupant), pending=waiting), (move,))


def choose_swaps(ctx: PolicyContext, state: MemoryState, settings: AdaptSettings) -> list[tuple[float, int, int]]:
    """Return (gain, slot, incoming rank), the largest gains first, at most `swaps` of them.

    Per layer candidates are absent experts with counters of at least `least_usage`, hottest first, and victims are
    residents, coldest first; pairs are made while the candidate exceeds its victim by `gap`.
    """
    if state.usage is None:
        return []
    present = state.slots.occupant[: state.slots.num_present]
    coming = [swap.incoming for swap in state.pending]
    return swap_pairs(state.usage, present, coming, np.asarray(ctx.sizes.rank_layer), settings)


def swap_pairs(
    usage: NDArray[np.float32],
    occupant: NDArray[np.int32],
    coming: Sequence[int],
    rank_layer: NDArray[np.integer],
    settings: AdaptSettings,
) -> list[tuple[float, int, int]]:
    """As `choose_swaps`, from f32[R] counters, i32[S] ranks in slots (negative: none) and ranks on their way."""
    if settings.swaps <= 0:
        return []
    held = np.flatnonzero(occupant >= 0)
    wanted = usage >= settings.least_usage
    wanted[occupant[held]] = False
    wanted[list(coming)] = False
    candidates = np.flatnonzero(wanted)
    if not len(candidates):
        return []
    held_layer = rank_layer[occupant[held]]
    pairs: list[tuple[float, int, int]] = []
    for layer in np.unique(rank_layer[candidates]):
        absent = candidates[rank_layer[candidates] == layer]
        absent = absent[np.lexsort((absent, -usage[absent]))]
        slots = held[held_layer == layer]
        ranks = occupant[slots]
        slots = slots[np.lexsort((-ranks, usage[ranks]))]
        for rank, slot in zip(absent.tolist(), slots.tolist()):
            gain = float(usage[rank] - usage[occupant[slot]])
            if gain < settings.gap:
                break
            pairs.append((gain, slot, rank))
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))
    return pairs[: settings.swaps]


def _swap(ctx: PolicyContext, state: MemoryState, settings: AdaptSettings) -> Step:
    pairs = choose_swaps(ctx, state, settings)
    if not pairs:
        return Step(state)
    occupant = state.slots.occupant.copy()
    due = state.rounds + settings.lag_rounds
    swaps = tuple(Swap(slot, rank, int(occupant[slot]), due) for _, slot, rank in pairs)
    for swap in swaps:
        occupant[swap.slot] = EMPTY
    evicted = int(ctx.rank_bytes[[s.outgoing for s in swaps]].sum())
    move = Move(
        MoveKind.EVICT, "expert slots", evicted, count=len(swaps),
        cause=f"{AdaptiveSlots.name}: hotter experts are on their way", detail=(("due_round", due),),
    )  # fmt: skip
    return Step(replace(with_slots(state, occupant=occupant), pending=state.pending + swaps), (move,))
