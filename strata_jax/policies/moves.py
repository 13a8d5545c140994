"""Moves: what a policy asks an executor to do, each with its bytes and its cause. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MoveKind(StrEnum):
    """The operations of an executor; their order within a step is the order of the moves."""

    EVICT = "evict"  # experts leave their slots for good
    MOVE_EXPERT = "move_expert"  # device copy of an expert into another slot
    SWAP_EXPERT = "swap_expert"  # another expert is copied into a slot
    LEND = "lend"  # slots serve the prompt; their experts are not resident meanwhile
    RETURN = "return"  # lent slots belong to the cache again
    REFILL = "refill"  # experts are copied into slots from RAM
    ALLOC_BUFFERS = "alloc_buffers"
    FREE_BUFFERS = "free_buffers"
    MAP_CELLS = "map_cells"
    TRIM_CELLS = "trim_cells"
    SPILL_CELLS = "spill_cells"  # the window of K/V cells moves on: those that leave it are copied to RAM
    FETCH_CELLS = "fetch_cells"  # it moves back: those that come into it are copied from RAM
    UNLOAD_HEAD = "unload_head"
    LOAD_HEAD = "load_head"
    GIVE_SEGMENT = "give_segment"  # a cache segment is given back to the driver
    TAKE_SEGMENT = "take_segment"
    PARK = "park"
    RESTORE = "restore"
    DROP = "drop"  # a parked conversation is forgotten
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Move:
    """One move.

    Attributes:
        bytes: what is copied, mapped or freed. count: slots, experts, cells or conversations, as `kind` says.
        first, last: half-open range of slots or cells where there is one. cause: the policy and why.
        detail: further numbers for the log.
    """

    kind: MoveKind
    owner: str
    bytes: int
    count: int = 0
    first: int = 0
    last: int = 0
    cause: str = ""
    conversation: str = ""
    detail: tuple[tuple[str, int], ...] = ()
