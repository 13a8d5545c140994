"""What a move has done, and whether the device's own count of its memory agrees."""

from __future__ import annotations

import time
from dataclasses import dataclass

from strata_jax.engine.engine import LEDGER_TOLERANCE_FRAC, Engine
from strata_jax.memory.ledger import Owner
from strata_jax.policies.moves import MoveKind

RELEASE_S = 1.0  # in which the device's count has to show what a checked move has freed


@dataclass(frozen=True, slots=True)
class MoveDone:
    """One move that was carried out.

    Attributes:
        bytes: what was copied; mapped, lent or freed where nothing was copied (``gb_s`` is None there).
        count: slots, experts, cells or segments, as `kind` says.
        gb_s: 10^9 bytes per second, copying alone.
        device_change_bytes: by how much the device's own count of bytes in use has changed; None: it keeps none. What
            is freed a moment later is only counted where moves are checked.
    """

    kind: MoveKind
    owner: Owner
    bytes: int
    count: int
    ms: float
    gb_s: float | None
    cause: str
    device_change_bytes: int | None = None


# what these moves do to the bytes that the allocator has handed out
DEVICE_SIGNS = {
    MoveKind.LEND: -1, MoveKind.GIVE_SEGMENT: -1, MoveKind.UNLOAD_HEAD: -1,
    MoveKind.RETURN: 1, MoveKind.TAKE_SEGMENT: 1, MoveKind.LOAD_HEAD: 1,
}  # fmt: skip


def device_change(
    engine: Engine, kind: MoveKind, num_bytes: int, before: int | None, patience_s: float = 0.0
) -> int | None:
    """Return by how much the device's bytes in use have changed, once that fits the move or ``patience_s`` have passed.

    A copy may hold what it has read for a moment after its result is there.
    """
    until = time.perf_counter() + patience_s
    while True:
        now = engine.bytes_in_use()
        change = None if now is None or before is None else now - before
        if _has_changed(kind, num_bytes, change) or time.perf_counter() >= until:
            return change
        time.sleep(0.001)


def _has_changed(kind: MoveKind, num_bytes: int, change: int | None) -> bool:
    """Whether a move has freed or taken at least 99 % of what it says, as far as the device counts that.

    More is no error: the allocator may hand out a whole hole for what nearly fills it.
    """
    sign = DEVICE_SIGNS.get(kind, 0)
    return not sign or change is None or sign * change >= (1 - LEDGER_TOLERANCE_FRAC) * num_bytes


def check_change(kind: MoveKind, num_bytes: int, change: int | None) -> None:
    """Verify a move with the device's own count. Raises RuntimeError: it has not changed as the move says."""
    if not _has_changed(kind, num_bytes, change):
        raise RuntimeError(f"{kind} of {num_bytes:,} bytes changed the device's bytes in use by {change:,}")
