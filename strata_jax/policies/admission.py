"""Which conversations may be parked in RAM, and which go to make room (planning notes 2.9, 7.3). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from strata_jax.memory.ledger import MIB

_SMALL_MIB = 10  # sizes below are shown with decimals


class ParkedFacts(Protocol):
    """What admission knows of a parked conversation; a larger ``order`` is more recent."""

    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def order(self) -> int: ...
    @property
    def pinned(self) -> bool: ...


P = TypeVar("P", bound=ParkedFacts)
C = TypeVar("C")


def make_room(
    parked: Sequence[P], leaving: str, incoming: str, size: int, budget: int, most: int
) -> tuple[list[P], list[P]] | str:
    """Return (kept, dropped) parked conversations, or why nothing can make enough room.

    Older images of the leaving conversation are superseded; then the oldest go that are not pinned. What the request is
    about to restore is not evicted.

    Args:
        incoming: name of the conversation that takes over.
        size: bytes of the new image. budget: bytes of all parked ones. most: how many there may be.
    """
    dropped = [c for c in parked if c.name == leaving]
    kept = sorted((c for c in parked if c.name != leaving), key=lambda c: c.order)
    protected = [c for c in kept if c.pinned or c.name == incoming]
    if sum(c.bytes for c in protected) + size > budget:
        return f"{_size(size)}; conversation.budget_mib={budget / MIB:,.0f} has no room for it"
    if len(protected) >= most:
        return f"conversation.slots={most} are taken"
    while sum(c.bytes for c in kept) + size > budget or len(kept) >= most:
        oldest = next(c for c in kept if c not in protected)
        kept.remove(oldest)
        dropped.append(oldest)
    return kept, dropped


def ram_refusal(available: int | None, size: int, floor: int) -> str | None:
    """Return why RAM does not allow ``size`` more bytes, None if it does.

    Args:
        available: bytes of RAM that can be had, what is freed first included; None: unknown, so nothing is allowed.
        floor: bytes that must stay available.
    """
    if available is None:
        return "available RAM is unknown"
    if available < floor or size > available - floor:
        return (
            f"{_size(size)} with {available / MIB:,.0f} MiB of RAM available;"
            f" conversation.min_free_mib={floor / MIB:,.0f} must stay free"
        )
    return None


def with_checkpoint(stored: Sequence[C], new: C, capacity: int) -> tuple[C, ...]:
    """Return the checkpoints with one more: of too many the oldest goes, but the first (the root) stays.

    Capacity 1 keeps no root.
    """
    kept = [*stored, new]
    while len(kept) > capacity:
        kept.pop(1 if capacity >= 2 else 0)
    return tuple(kept)


def _size(num_bytes: int) -> str:
    mib = num_bytes / MIB
    return f"{mib:,.2f} MiB" if mib < _SMALL_MIB else f"{mib:,.0f} MiB"
