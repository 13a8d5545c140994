"""Seeded faults of moves: bytes go wrong in silence, as a bug would have it, and the matrix must notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from strata_jax.engine.runtime import Runtime
from strata_jax.errors import ConfigError
from strata_jax.policies.moves import MoveKind

FLIPPED_BITS = np.uint32(0x00400000)  # the highest bit of a float32's fraction; one of the codes or scales in planes


def spoil_slots_being_filled(runtime: Runtime) -> None:
    """Change a bit in every word of the slots that are empty in the tables: what has just been copied into them."""
    engine = runtime.engine
    layout = engine.residency.layout
    for slot in np.flatnonzero(engine.residency.occupant[: engine.residency.num_present] == -1).tolist():
        first = int(engine.residency.slot_page[slot])
        if first < 0:  # it pays for K/V cells
            continue
        array, page = layout.locate(first)
        pages = slice(page, page + layout.slot_num_pages[slot])
        values = engine.arrays[array]
        engine.set_array(array, values.at[pages].set(values[pages] ^ FLIPPED_BITS))


def make_parked_states_stale(runtime: Runtime) -> None:
    """Give every parked conversation the recurrent state of its first checkpoint with the cells of its end."""
    for parked in runtime.store.parked:
        if parked.checkpoints:
            dict.update(parked.image.end.arrays, parked.checkpoints[0].arrays)  # type: ignore[arg-type]


def lose_restored_cells(runtime: Runtime) -> None:
    """Write zeros over all K/V cells of the first attention layer."""
    engine = runtime.engine
    pages = engine.residency.kv_pages[0]
    engine.arena = engine.arena.at[pages[pages >= 0]].set(0)


FAULTS: Mapping[tuple[MoveKind, str], Callable[[Runtime], None]] = {
    (MoveKind.REFILL, "copied"): spoil_slots_being_filled,
    (MoveKind.SWAP_EXPERT, "copied"): spoil_slots_being_filled,
    (MoveKind.RESTORE, "prepared"): make_parked_states_stale,
    (MoveKind.RESTORE, "copied"): lose_restored_cells,
}


def arm(text: str) -> Callable[[Runtime], None]:
    """Return what seeds a fault `KIND:STAGE:N`: the N-th time that a move gets to that stage, its bytes go wrong.

    Raises:
        ConfigError: there is no such fault.
    """
    kind, _, rest = text.partition(":")
    stage, _, number = rest.partition(":")
    known = {f"{kind.value}:{stage}": spoil for (kind, stage), spoil in FAULTS.items()}
    if f"{kind}:{stage}" not in known or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"no fault {text!r}; use one of {', '.join(known)}, then :N with N from 1 up")
    spoil, nth, count = known[f"{kind}:{stage}"], int(number), 0

    def seed(runtime: Runtime) -> None:
        def at(move: MoveKind, where: str) -> None:
            nonlocal count
            if (move.value, where) == (kind, stage):
                count += 1
                if count == nth:
                    spoil(runtime)

        runtime.mover.fault = runtime.store.fault = at

    return seed
