"""The memory that policies see and change: slots, K/V, head, buffers, parked conversations.

Everything is frozen: a policy returns a new state and shares with the old one every array that did not change. A step
that fails therefore leaves no half-changed table behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strata_jax.memory.ledger import MIB, Memory, Owner, Phase
from strata_jax.policies.moves import Move

if TYPE_CHECKING:
    from strata_jax.memory.strata.result import StrataPlan
    from strata_jax.memory.strata.sizes import PackSizes

EMPTY = -1
GIVEN = -2


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """Expert slots of one range of memory.

    Attributes:
        offset_bytes: i64[S + 1], where each slot starts; the last entry is the end.
        occupant: i32[S], rank of the resident expert (0 = hottest); EMPTY: none; GIVEN: the slot belongs to the K/V.
            Lent slots and slots past `end` keep the rank of the expert that comes back to them.
        low, top: slots [low, top) belong to the K/V at present where it takes them just under the loan (otherwise
            low == top); slots from `top` on may be lent.
        end: slots from here on are given back to the driver; None: all slots are there.
        cut_bytes: where the cache can be cut, ascending: the segments that the driver may have begin there and reach to
            the next one or to the end. Empty: none can be given.
        borders: first slots of the segments in which alone slots can be lent, ascending; slots in them never pay for
            cells. Empty: any slot can be lent.
        unmapped_from, unmapped_chunks: first chunk of the range that the K/V has taken, and how many. Where slots pay
            anywhere the chunks are counted only.
    """

    offset_bytes: NDArray[np.int64]
    occupant: NDArray[np.int32]
    low: int
    top: int
    end: int | None = None
    unmapped_from: int = 0
    unmapped_chunks: int = 0
    borders: tuple[int, ...] = ()
    cut_bytes: tuple[int, ...] = ()

    @property
    def num_slots(self) -> int:
        return len(self.occupant)

    @property
    def num_present(self) -> int:
        """Slots that the driver does not hold."""
        return self.num_slots if self.end is None else self.end

    @property
    def total_bytes(self) -> int:
        return int(self.offset_bytes[-1])

    @property
    def given(self) -> int:
        """Slots that belong to the K/V."""
        return int(np.count_nonzero(self.occupant == GIVEN))

    def kept_bytes(self, segments_given: int) -> int:
        """Return the bytes of the cache that are left when its last segments are given; 0: there are fewer."""
        if not segments_given:
            return self.total_bytes
        return self.cut_bytes[-segments_given] if segments_given <= len(self.cut_bytes) else 0

    def slots_within(self, num_bytes: int) -> int:
        """Return how many of the first slots lie in the first `num_bytes`."""
        return int(np.searchsorted(self.offset_bytes, num_bytes, side="right")) - 1

    def sizes(self) -> NDArray[np.int64]:
        """Return i64[S], the bytes of each slot."""
        return np.diff(self.offset_bytes)

    def lendable_bytes(self, first: int) -> int:
        """Return the bytes of the slots from `first` on that are there and not the K/V's."""
        last = self.num_present
        if first >= self.top and not np.any(self.occupant[first:last] == GIVEN):
            return int(self.offset_bytes[last] - self.offset_bytes[first])
        return int(self.sizes()[first:last][self.occupant[first:last] != GIVEN].sum())

    def loan_first(self, need_bytes: int) -> int | None:
        """Return the largest first slot whose loan has `need_bytes`, None if all slots together have less.

        The smallest number k of slots, counted from the end, with enough bytes (planning notes 2.6); where slots lie in
        segments, the fewest segments.
        """
        last = self.num_present
        if self.borders:
            return max((b for b in self.borders if self.lendable_bytes(b) >= need_bytes), default=None)
        if not np.any(self.occupant[:last] == GIVEN):
            start = int(self.offset_bytes[last]) - need_bytes
            return None if start < 0 else int(np.searchsorted(self.offset_bytes, start, side="right")) - 1
        usable = np.where(self.occupant[:last] == GIVEN, 0, self.sizes()[:last])
        from_here = np.cumsum(usable[::-1])[::-1]
        enough = np.flatnonzero(from_here >= need_bytes)
        return int(enough[-1]) if len(enough) else None

    def resident(self, lent_from: int | None = None) -> NDArray[np.int32]:
        """Return the ranks of the experts that can be used at present."""
        last = self.num_present if lent_from is None else min(self.num_present, lent_from)
        ranks = self.occupant[:last]
        return ranks[ranks >= 0]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sequence: the live one, or one parked in RAM.

    Attributes:
        tokens: ids whose state it holds, as a count. checkpoints: token counts of its stored states.
        bytes: RAM it takes when parked. order: larger is more recent.
    """

    name: str
    tokens: int
    bytes: int = 0
    checkpoints: tuple[int, ...] = ()
    order: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Swap:
    """An expert on its way into the slot that another has left; it may land from round `due` on."""

    slot: int
    incoming: int
    outgoing: int
    due: int


@dataclass(frozen=True, slots=True, eq=False)
class MemoryState:
    """Memory at one moment.

    Attributes:
        lent_from: slots from here on are lent at present; None: none are.
        chunk_tokens: the prompt chunk whose buffers fit at present.
        own_buffer_bytes: prompt buffers allocated at present, apart from lent slots.
        free_bytes: device memory that nobody owns; negative: what the engine holds beyond the card, which an operating
            system that lets it has moved out to RAM (WDDM).
        spare_chunks: physical chunks that the K/V holds unmapped. chunk_bytes: their size.
        kv_mapped_cells: cells that may be written. kv_grown_chunks: mapped since the start, negative when trimmed.
        segments_given: cache segments given back to the driver.
        usage: f32[ranks], decayed usage of every expert, or None when not counted.
        ram_available_bytes: None: unknown.
        pending: swaps that have not landed. rounds: decode rounds so far.
    """

    slots: SlotTable
    kv_mapped_cells: int
    head_loaded: bool = True
    lent_from: int | None = None
    own_buffer_bytes: int = 0
    free_bytes: int = 0
    spare_chunks: int = 0
    chunk_bytes: int = 2 * MIB
    kv_grown_chunks: int = 0
    segments_given: int = 0
    live: Conversation | None = None
    parked: tuple[Conversation, ...] = ()
    usage: NDArray[np.float32] | None = None
    ram_available_bytes: int | None = None
    clock: int = 0
    chunk_tokens: int = 0
    pending: tuple[Swap, ...] = ()
    rounds: int = 0

    @property
    def reading(self) -> bool:
        """Whether a prompt holds memory: lent slots."""
        return self.lent_from is not None

    def resident_ranks(self) -> NDArray[np.int32]:
        """Return the ranks of the experts that can be used now."""
        return self.slots.resident(self.lent_from)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a hook: the state after the moves, the moves in order, and lines for the log.

    parts: the steps that it was put together from, in order, each with the state after it; empty: it is one.
    """

    state: MemoryState
    moves: tuple[Move, ...] = ()
    notes: tuple[str, ...] = ()
    parts: tuple[Step, ...] = ()

    def then(self, following: Step) -> Step:
        """Return both steps as one."""
        if following.state is self.state and not following.moves and not following.notes:
            return self
        parts = (*self.each(), *following.each())
        return Step(following.state, self.moves + following.moves, self.notes + following.notes, parts)

    def each(self) -> tuple[Step, ...]:
        """Return the steps of which this one consists; their last state is its own."""
        return self.parts or (self,)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request before it runs.

    Attributes:
        conversation: whose state it continues. switches: whether the live session is another conversation's.
        reused_tokens: the longest prefix that some stored state covers. fresh_tokens: the rest of the prompt.
        text_only: images are never read through decode windows.
    """

    name: str
    conversation: str
    prompt_tokens: int
    output_tokens: int
    reused_tokens: int = 0
    fresh_tokens: int = 0
    switches: bool = False
    boundaries: Sequence[int] = field(default_factory=tuple)
    text_only: bool = True


def initial_state(
    sizes: PackSizes, plan: StrataPlan, *, ram_available_bytes: int | None = None, chunk_bytes: int | None = None
) -> MemoryState:
    """Return the memory when the cache has been filled, before the policies' start hooks run.

    The head is loaded and own buffers are not allocated: `on_start` of the policies leads to the plan's ready state.

    Args:
        ram_available_bytes: RAM that parking may see; None: the card's, less what the plan takes of it.
        chunk_bytes: granularity of K/V memory; None: the card's.
    """
    return MemoryState(
        slots=initial_slots(sizes, plan),
        kv_mapped_cells=plan.kv_mapped_cells,
        free_bytes=plan.card.vram_bytes - fixed_bytes(plan) - plan.head_bytes,
        chunk_bytes=plan.card.vmm_chunk_bytes if chunk_bytes is None else chunk_bytes,
        ram_available_bytes=ram_after_start(plan) if ram_available_bytes is None else ram_available_bytes,
        chunk_tokens=plan.prompt.chunk_tokens,
    )


def fixed_bytes(plan: StrataPlan) -> int:
    """Return the device memory taken at start besides the head and own prompt buffers."""
    start = plan.ledger.owner_bytes(Phase.START, Memory.DEVICE)
    apart = (Owner.RESERVE, Owner.FREE, Owner.HEAD, Owner.PROMPT_BUFFERS)
    return sum(num for owner, num in start.items() if owner not in apart) + beside_head_bytes(plan)


def beside_head_bytes(plan: StrataPlan) -> int:
    """Return what the ledger books on the head besides its rows, which stays when these are unloaded."""
    return max(0, plan.ledger.owner_bytes(Phase.DECODE, Memory.DEVICE).get(Owner.HEAD, 0) - plan.head_bytes)


def ram_after_start(plan: StrataPlan) -> int | None:
    """Return the RAM available to parked conversations once the engine is ready; None: unknown."""
    available = plan.card.ram_available_bytes
    if available is None:
        return None
    host = plan.ledger.owner_bytes(Phase.START, Memory.HOST)
    return max(0, available - sum(num for owner, num in host.items() if owner is not Owner.CONVERSATIONS))


@lru_cache(maxsize=32)
def expert_bytes(sizes: PackSizes, uniform: bool) -> NDArray[np.int64]:
    """Return i64[R], the bytes of each rank's expert in its slot: aligned in sized slots, unaligned in uniform ones."""
    if not uniform:
        return sizes.rank_bytes
    return np.array(sizes.blob_bytes, np.int64)[sizes.rank_layer]


def own_at_start_bytes(plan: StrataPlan) -> int:
    """Return prompt buffers that are allocated at start and kept; hybrid ones are allocated for each prompt."""
    return plan.prompt.own_bytes if plan.prompt.layout == "own" else 0


def initial_slots(sizes: PackSizes, plan: StrataPlan) -> SlotTable:
    """Return the filled cache: slot i holds rank i, or with equal slots per layer each layer's hottest."""
    num = plan.slots
    offsets = np.zeros(num + 1, np.int64)
    if plan.uniform:
        offsets[1:] = np.arange(1, num + 1) * sizes.max_blob_bytes
    else:
        offsets[1:] = sizes.rank_end_bytes[:num]
    occupant = np.arange(num, dtype=np.int32)
    if plan.request.cache_per_layer:
        layers = np.asarray(sizes.rank_layer)
        each = num // sizes.num_layers
        hottest = sorted(chain.from_iterable(np.flatnonzero(layers == n)[:each] for n in range(sizes.num_layers)))
        occupant = np.full(num, EMPTY, np.int32)
        occupant[: len(hottest)] = hottest
    top = plan.prompt.first_lent if plan.prompt.lent_slots else num
    segment = plan.request.vram_elastic_mib * MIB  # counted from the start; the last one may be partial
    cuts = tuple(range(segment, int(offsets[-1]), segment)) if segment else ()
    return SlotTable(offsets, occupant, low=top, top=top, cut_bytes=cuts)


def with_slots(state: MemoryState, **changes: object) -> MemoryState:
    """Return the state with other values in its slot table."""
    return replace(state, slots=replace(state.slots, **changes))  # type: ignore[arg-type]
