"""Prompt buffers that borrow expert slots: which chunk the last slots of the cache can hold (planning notes 2.6, 2.7).

While a prompt is read the last k slots of the cache are the prompt's arena; their experts come back afterwards. The
old rule takes the largest chunk of a list. From 0.1.40 on a second pass looks for a larger one on a grid of 256
tokens that still has a full ring, which releases then size by bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from numpy.typing import NDArray

from strata_jax.errors import ConfigError
from strata_jax.memory.layout import align_down, align_up, largest_where
from strata_jax.memory.strata import ring
from strata_jax.memory.strata.cache import MIN_KEPT_SLOTS
from strata_jax.memory.strata.prompt_buffers import request_bytes
from strata_jax.memory.strata.request import MIB, Card, StrataRequest, Version
from strata_jax.memory.strata.result import Layout, PromptPath
from strata_jax.memory.strata.sizes import PackSizes

BORROW_CHUNKS = (32_768, 16_384, 8_192, 6_144, 4_096, 3_072, 2_048, 1_024, 512, 256)
GRID_TOKENS = 256
AUTO_CAP_TOKENS = 8_192
LEND_PCT, LEND_PCT_UNPINNED = 90, 85
HELD_RING_SLOTS = ring.MIN_SLOTS
"""Slots that a byte-sized ring holds beside those it states. Inferred from two published plans: the 1,280-token chunk
of a 3070 Ti (ring 351) lends 873 slots and not 857, and the reserve-to-chunk ladder of an 8 GB card needs it at all
steps above its old pick."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotSizes:
    """The slots of an expert cache in rank order: all of `slot_bytes`, or with running sums of their own sizes."""

    num_slots: int
    slot_bytes: int
    end_bytes: NDArray | None = None

    @classmethod
    def of(cls, sizes: PackSizes, num_slots: int, *, uniform: bool) -> SlotSizes:
        """Return the slots of a cache that holds the first `num_slots` ranks; uniform ones hold the largest blob.

        Raises:
            ConfigError: more slots than the profile has ranks.
        """
        if not 0 <= num_slots <= sizes.num_ranks:
            raise ConfigError(f"a cache of {num_slots} slots: {sizes.name} has 0 to {sizes.num_ranks} experts to hold")
        if uniform:
            return cls(num_slots, sizes.max_blob_bytes)
        return cls(num_slots, sizes.max_blob_bytes, sizes.rank_end_bytes[:num_slots])

    @property
    def total_bytes(self) -> int:
        return self.offset_bytes(self.num_slots)

    def offset_bytes(self, slot: int) -> int:
        """Return where a slot begins; the cache's end for `num_slots`."""
        if self.end_bytes is None:
            return slot * self.slot_bytes
        return int(self.end_bytes[slot - 1]) if slot else 0

    def tail_bytes(self, num_last: int) -> int:
        """Return the bytes of the last `num_last` slots."""
        return self.total_bytes - self.offset_bytes(self.num_slots - num_last)

    def tail_slots(self, num_bytes: int) -> int | None:
        """Return the fewest last slots that hold `num_bytes`; None if all together are too small."""
        if num_bytes <= 0:
            return 0
        start = self.total_bytes - num_bytes
        if start < 0:
            return None
        if self.end_bytes is None:
            return -(-num_bytes // self.slot_bytes)
        return self.num_slots - int(self.end_bytes.searchsorted(start, side="right"))


@dataclass(frozen=True, slots=True)
class ReadLoan:
    """What one prompt borrows: slots from `first_lent` on, `lent_slots` of them, for chunks of `chunk_tokens`."""

    chunk_tokens: int
    buffer_bytes: int
    lent_slots: int
    first_lent: int


def lend_pct(request: StrataRequest, card: Card) -> int:
    """Return the share of the slots that auto may lend, in percent."""
    if request.lend_pct is not None:
        return request.lend_pct
    return LEND_PCT if ring.is_pinned(card.pinned_share) else LEND_PCT_UNPINNED


def most_lent(num_slots: int, pct: int) -> int:
    """Return the most slots that may be lent: at least 128 stay, and `pct` percent at most."""
    return max(0, min(num_slots - MIN_KEPT_SLOTS, pct * num_slots // 100))


def auto_limit_tokens(request: StrataRequest) -> int:
    """Return the largest chunk auto may take: 8,192, or what was asked for above as far as the context goes."""
    return min(request.chunk_auto_max, max(AUTO_CAP_TOKENS, request.context_cells))


def borrowed_path(
    sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, *, may_halve: bool = True
) -> PromptPath | None:
    """Return the prompt path that borrows slots, or None if it cannot.

    A given chunk is halved until its loan leaves 128 slots; auto follows the old rule, and from 0.1.40 on the grid.

    Args:
        may_halve: False for a one-shot run, which takes own buffers rather than a smaller chunk than given.
    """
    if not (request.borrow and request.profile):
        return None
    if request.chunk_tokens is not None:
        return _given(sizes, slots, request, card, request.chunk_tokens, may_halve)
    old = old_pick(sizes, slots, request, card)
    if request.version is Version.V0_1_35:
        return _old_path(sizes, slots, request, card, old)
    return _grid_path(sizes, slots, request, card, old)


def old_pick(sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card) -> int:
    """Return the old rule's chunk: the largest of the list whose buffers fit the lendable slots; 0 if none do."""
    room = slots.tail_bytes(most_lent(slots.num_slots, lend_pct(request, card)))
    for chunk in _old_candidates(request):
        if request_bytes(sizes, request, chunk, ring.request_ring(sizes, request, card, chunk)) <= room:
            return chunk
    return 0


def held_ring(sizes: PackSizes, request: StrataRequest, card: Card, tokens: int, old_chunk: int) -> tuple[int, int]:
    """Return (ring slots, slots held for it) of a chunk above the old rule's pick or at it (planning notes 2.5).

    They differ for a ring that is sized by bytes.
    """
    stated = ring.request_ring(sizes, request, card, tokens, old_chunk=old_chunk)
    by_bytes = tokens > old_chunk and tokens >= request.stream_min_tokens and _sized_by_bytes(request, old_chunk)
    return stated, stated + (HELD_RING_SLOTS if by_bytes else 0)


def read_loan(
    sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, path: PromptPath, fresh_tokens: int
) -> ReadLoan:
    """Return what a prompt of `fresh_tokens` borrows under a plan's path: a short one needs fewer slots (notes 2.7)."""
    want = min(path.chunk_tokens, align_up(max(1, fresh_tokens), GRID_TOKENS))
    if want == path.chunk_tokens or path.lent_slots == 0:
        return ReadLoan(path.chunk_tokens, path.buffer_bytes, path.lent_slots, path.first_lent)
    grid = request.chunk_tokens is None and request.version is not Version.V0_1_35
    old = old_pick(sizes, slots, request, card) if grid else want
    held = held_ring(sizes, request, card, want, old)[1]
    num_bytes = request_bytes(sizes, request, want, held)
    needed = slots.tail_slots(num_bytes)
    lent = path.lent_slots if needed is None else min(needed, path.lent_slots)
    return ReadLoan(want, num_bytes, lent, slots.num_slots - lent)


def _sized_by_bytes(request: StrataRequest, old_chunk: int) -> bool:
    by_version = request.version is not Version.V0_1_35 and old_chunk < ring.BYTES_UP_TO_CHUNK
    return by_version and request.ring_slots is None


def _old_candidates(request: StrataRequest) -> tuple[int, ...]:
    limit = auto_limit_tokens(request)
    return tuple(c for c in BORROW_CHUNKS if c <= limit)


def _given(
    sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, given: int, may_halve: bool
) -> PromptPath | None:
    chunk, why = given, ""
    most = max(0, slots.num_slots - MIN_KEPT_SLOTS)
    while chunk > 0:
        ring_slots = ring.request_ring(sizes, request, card, chunk)
        num_bytes = request_bytes(sizes, request, chunk, ring_slots)
        needed = slots.tail_slots(num_bytes)
        if needed is not None and needed <= most:
            return _path(slots, chunk, ring_slots, num_bytes, why or f"prefill.chunk={given} is given")
        if not may_halve:
            return None
        why = why or (
            f"prefill.chunk={given} needs {num_bytes / MIB:,.1f} MiB; {slots.tail_bytes(most) / MIB:,.1f} MiB lie in"
            f" the {most:,} of {slots.num_slots:,} slots that may be lent ({MIN_KEPT_SLOTS} stay), so it was halved"
        )
        chunk //= 2
    return None


def _old_path(sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, chunk: int) -> PromptPath | None:
    if not chunk:
        return None
    larger = [c for c in _old_candidates(request) if c > chunk]
    why = _auto_limit_text(request)
    if larger:
        ring_slots = ring.request_ring(sizes, request, card, larger[-1])
        why = _too_large(sizes, slots, request, card, larger[-1], ring_slots, ring_slots)
    ring_slots = ring.request_ring(sizes, request, card, chunk)
    return _path(slots, chunk, ring_slots, request_bytes(sizes, request, chunk, ring_slots), why)


def _grid_path(sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, old: int) -> PromptPath | None:
    """The second pass: the largest chunk on the grid that leaves room for a full ring, even if it needs none."""
    limit = align_down(auto_limit_tokens(request), GRID_TOKENS) // GRID_TOKENS
    room = slots.tail_bytes(most_lent(slots.num_slots, lend_pct(request, card)))
    full = request.ring_slots or ring.ring_cap_for(sizes, old, request.version, pinned_share=card.pinned_share)
    spare = HELD_RING_SLOTS if _sized_by_bytes(request, old) else 0

    def fits(steps: int) -> bool:
        return request_bytes(sizes, request, steps * GRID_TOKENS, full + spare) <= room

    chunk = (largest_where(fits, 1, limit) or 0) * GRID_TOKENS
    if chunk > old:
        ring_slots, held = held_ring(sizes, request, card, chunk, old)
    elif old:
        chunk, ring_slots = old, ring.request_ring(sizes, request, card, old)
        held = ring_slots
    else:
        return _short_ring_path(sizes, slots, request, room, full, limit)
    why = _auto_limit_text(request)
    if chunk + GRID_TOKENS <= limit * GRID_TOKENS:
        why = _too_large(sizes, slots, request, card, chunk + GRID_TOKENS, full, full + spare)
    return _path(slots, chunk, ring_slots, request_bytes(sizes, request, chunk, held), why)


def _short_ring_path(
    sizes: PackSizes, slots: SlotSizes, request: StrataRequest, room: int, full: int, limit: int
) -> PromptPath | None:
    """No chunk has a full ring: take a ring as short as 16. That helps when even the smallest chunks stream all."""
    if limit * GRID_TOKENS < request.stream_min_tokens or request.ring_slots is not None:
        return None
    first = max(1, -(-request.stream_min_tokens // GRID_TOKENS))

    def slots_left(steps: int) -> int:
        return (room - request_bytes(sizes, request, steps * GRID_TOKENS, 0)) // sizes.max_blob_bytes

    steps = largest_where(lambda n: slots_left(n) >= ring.MIN_SLOTS, first, limit)
    if steps is None:
        return None
    ring_slots = min(slots_left(steps), full)
    num_bytes = request_bytes(sizes, request, steps * GRID_TOKENS, ring_slots)
    return _path(slots, steps * GRID_TOKENS, ring_slots, num_bytes, f"no chunk has room for a ring of {full} slots")


def _path(slots: SlotSizes, chunk: int, ring_slots: int, num_bytes: int, why: str) -> PromptPath:
    lent = slots.tail_slots(num_bytes) or 0
    return PromptPath(
        chunk_tokens=chunk,
        layout=Layout.BORROWED,
        ring_slots=ring_slots,
        buffer_bytes=num_bytes,
        own_bytes=0,
        lent_slots=lent,
        first_lent=slots.num_slots - lent,
        lent_bytes=slots.tail_bytes(lent),
        why_not_larger=why,
    )


def _auto_limit_text(request: StrataRequest) -> str:
    return f"auto takes no chunk above {auto_limit_tokens(request):,} tokens"


def _too_large(
    sizes: PackSizes, slots: SlotSizes, request: StrataRequest, card: Card, tokens: int, ring_slots: int, held: int
) -> str:
    pct = lend_pct(request, card)
    most = most_lent(slots.num_slots, pct)
    needed = request_bytes(sizes, request, tokens, held)
    return (
        f"{tokens:,} tokens and a ring of {ring_slots} need {needed / MIB:,.1f} MiB; the {most:,} of"
        f" {slots.num_slots:,} slots that may be lent ({pct} %, {MIN_KEPT_SLOTS} stay) hold"
        f" {slots.tail_bytes(most) / MIB:,.1f}"
    )
