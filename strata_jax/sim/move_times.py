"""The time of a policy's move on a machine."""

from __future__ import annotations

from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import Compat
from strata_jax.sim.machine import Machine
from strata_jax.sim.prefill_cost import head_load_ms, map_ms, move_ms, park_ms, refill_ms, relayout_ms, restore_ms

MAPPED = (MoveKind.MAP_CELLS, MoveKind.TRIM_CELLS, MoveKind.GIVE_SEGMENT, MoveKind.TAKE_SEGMENT)


def time_of(machine: Machine, move: Move, file_bytes: float = 0.0) -> float:
    """Return the ms that a move takes while nothing else goes on; what runs beside decoding takes none.

    file_bytes: the part of a refill that must be read from files first.
    """
    profile = machine.profile
    match move.kind:
        case MoveKind.REFILL:
            pinned = machine.plan.card.pinned_share
            return refill_ms(profile, machine.plan.request, move.bytes, file_bytes=file_bytes, pinned_share=pinned)
        case MoveKind.LOAD_HEAD:
            given = machine.options.head_pinned
            pinned_head = machine.ctx.compat is Compat.NATIVE if given is None else given
            return head_load_ms(profile, move.bytes, pinned=pinned_head)
        case MoveKind.UNLOAD_HEAD:
            return relayout_ms(profile)
        case MoveKind.PARK:
            return park_ms(profile, move.bytes)
        case MoveKind.RESTORE:
            return restore_ms(profile, move.bytes)
        case MoveKind.MOVE_EXPERT:
            return move_ms(profile, move.bytes)
    return map_ms(profile, move.bytes) if move.kind in MAPPED else 0.0
