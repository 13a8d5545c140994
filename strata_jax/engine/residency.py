"""Who owns the pages of the arena: the host's master of the tables that programs read.

A `Residency` is data: every edit returns a new one (unchanged arrays are shared) and raises ValueError, changing
nothing, where it would give a page two owners or lose an expert's place. Publishing it is one assignment
(`Engine.publish`), so a move that fails on the way leaves the tables of before.

Terms: an expert is (block, number); a slot is a run of pages of one array that can hold an expert; a group is the page
of one attention layer that holds the next ``cells_per_page`` K/V cells. Slots can be *given* to the K/V: then their
pages are K/V or free ones until `trimmed` puts them together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strata_jax.memory.segments import ArenaLayout

Expert = tuple[int, int]
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Fill:
    """An expert and the slot it is to be copied into."""

    layer: int
    expert: int
    slot: int

    @property
    def pair(self) -> Expert:
        return self.layer, self.expert


@dataclass(frozen=True, slots=True)
class PageMove:
    """A K/V page whose cells go to a free page."""

    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Residency:
    """Slots, their experts, and K/V pages.

    Attributes:
        layout: the arena as allocated.
        expert_pages: i32[L'], pages that an expert of each block takes.
        slot_of: i32[L', X], the slot of each expert, -1 = only in the bank.
        occupant: i32[S], ``layer * X + expert`` of each slot, -1 = empty.
        slot_page: i32[S], the first page of each slot, -1 = given to the K/V.
        kv_pages: i32[A, N], the page of each group of cells, -1 = not mapped; a prefix, the same for all layers, or
            where the layout says so a window, the other groups being in the store of the engine.
        segments: how many of the arena's segments there are; the others are lent.
    """

    layout: ArenaLayout
    expert_pages: NDArray[np.int32]
    slot_of: NDArray[np.int32]
    occupant: NDArray[np.int32]
    slot_page: NDArray[np.int32]
    kv_pages: NDArray[np.int32]
    segments: int

    # --- what there is

    @property
    def num_experts(self) -> int:
        return self.slot_of.shape[1]

    @property
    def num_slots(self) -> int:
        return self.layout.num_slots

    @property
    def mapped_groups(self) -> int:
        """Pages that each attention layer has."""
        return int(np.count_nonzero(self.kv_pages[0] >= 0)) if len(self.kv_pages) else self.layout.num_groups

    @property
    def first_group(self) -> int:
        """The first group that has a page."""
        return int(np.argmax(self.kv_pages[0] >= 0)) if self.kv_pages.size else 0

    @property
    def mapped_cells(self) -> int:
        """Cells that may be written."""
        return self.layout.cells(self.mapped_groups)

    @property
    def num_present(self) -> int:
        """Slots from here on lie in segments that are lent."""
        first = self.layout.segment_first_slot
        return first[self.segments] if self.segments < len(first) else self.num_slots

    def last_slots(self, num_segments: int) -> range:
        """Return the slots of the last segments that are there."""
        return self._slots_between(self.segments - num_segments, self.segments)

    def next_slots(self, num_segments: int) -> range:
        """Return the slots of the first segments that are lent."""
        return self._slots_between(self.segments, self.segments + num_segments)

    def _slots_between(self, low: int, high: int) -> range:
        if not 0 <= low <= high <= self.layout.num_segments:
            there = f"{self.segments} of {self.layout.num_segments} segments are there"
            raise ValueError(f"segments {low} to {high} are not to be had: {there}")
        if low == high:
            return range(0)
        return range(self.layout.slots_of_segment(low).start, self.layout.slots_of_segment(high - 1).stop)

    def expert_in(self, slot: int) -> Expert | None:
        """Return the expert that a slot holds."""
        held = int(self.occupant[slot])
        return None if held < 0 else divmod(held, self.num_experts)

    def residents(self, slots: Iterable[int]) -> tuple[Fill, ...]:
        """Return the experts of the slots that hold one, with their slots."""
        found = ((slot, self.expert_in(slot)) for slot in slots)
        return tuple(Fill(*pair, slot) for slot, pair in found if pair is not None)

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """Return bool[X]: which experts of a block programs find in the arena."""
        slots = self.slot_of[layer]
        return (slots >= 0) & (self.slot_page[slots] >= 0) if len(self.slot_page) else slots >= 0

    def slot_bytes(self, slots: Iterable[int]) -> int:
        """Return the bytes of slots."""
        return sum(self.layout.slot_num_pages[slot] for slot in slots) * self.layout.page_bytes

    def owners(self) -> NDArray[np.int64]:
        """Return i64[P], the owner of each page: a slot's number, ``S + layer * N + group`` for K/V, -1 for nobody.

        Raises:
            ValueError: a page has two owners, or an owner names a page that does not exist.
        """
        pages, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        slots = np.flatnonzero(self.slot_page >= 0)
        sizes = np.asarray(self.layout.slot_num_pages, np.int64)[slots]
        offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        pages.append(np.repeat(self.slot_page[slots].astype(np.int64), sizes) + offsets)
        owners.append(np.repeat(slots, sizes))
        groups = np.flatnonzero(self.kv_pages.reshape(-1) >= 0)
        pages.append(self.kv_pages.reshape(-1)[groups].astype(np.int64))
        owners.append(self.num_slots + groups)
        every, whose = np.concatenate(pages), np.concatenate(owners)
        if len(every) and not 0 <= every.min() <= every.max() < self.layout.num_pages:
            raise ValueError(f"a page outside the arena's {self.layout.num_pages:,} has an owner")
        counts = np.bincount(every, minlength=self.layout.num_pages)
        if counts.max(initial=0) > 1:
            page = int(np.argmax(counts))
            raise ValueError(f"page {page} has {counts[page]} owners: {whose[every == page].tolist()}")
        found = np.full(self.layout.num_pages, NOBODY, np.int64)
        found[every] = whose
        return found

    def free_pages(self) -> NDArray[np.int64]:
        """Return the pages of the core that nobody owns."""
        return np.flatnonzero(self.owners()[: self.layout.core_pages] == NOBODY)

    def check(self) -> None:
        """Verify everything that must hold.

        Raises:
            ValueError: two owners of a page, a K/V page outside the core, an expert in two slots, in none that says so,
                in one too small, lent or given, holes in the mapped cells.
        """
        owners = self.owners()
        beyond = owners[self.layout.core_pages :]
        if (beyond >= self.num_slots).any() or (beyond == NOBODY).any():
            raise ValueError("a segment has a page that is no slot's")
        if (self.slot_page != self.layout.slot_first_page).any(where=self.slot_page >= 0):
            raise ValueError("a slot is not where it was allocated")
        mapped = self.kv_pages >= 0
        place = np.arange(mapped.shape[1]) - (self.first_group if self.layout.has_window else 0)
        if len(mapped) and not (mapped == ((place >= 0) & (place < self.mapped_groups))).all():
            what = "run" if self.layout.has_window else "prefix"
            raise ValueError(f"the mapped K/V pages are no {what} that all layers share")
        held = np.flatnonzero(self.occupant >= 0)
        back = np.full_like(self.slot_of, -1).reshape(-1)
        back[self.occupant[held]] = held
        if not (back.reshape(self.slot_of.shape) == self.slot_of).all() or (back >= 0).sum() != len(held):
            raise ValueError("the experts' slots and the slots' experts disagree")
        self._check_places(self.residents(held.tolist()))

    def _check_places(self, fills: Iterable[Fill]) -> None:
        for fill in fills:
            if fill.slot >= self.num_present:
                raise ValueError(f"slot {fill.slot} is lent")
            if self.slot_page[fill.slot] < 0:
                raise ValueError(f"slot {fill.slot} belongs to the K/V")
            if self.layout.slot_num_pages[fill.slot] < self.expert_pages[fill.layer]:
                needed = int(self.expert_pages[fill.layer])
                raise ValueError(f"slot {fill.slot} is too small for an expert of block {fill.layer}: {needed} pages")

    # --- experts

    def evicted(self, slots: Iterable[int]) -> Residency:
        """Return the tables without the experts of some slots; empty slots may be among them."""
        chosen = np.fromiter(slots, np.int64)
        if not len(chosen):
            return self
        occupant, slot_of = self.occupant.copy(), self.slot_of.copy()
        held = occupant[chosen]
        slot_of.reshape(-1)[held[held >= 0]] = -1
        occupant[chosen] = -1
        return replace(self, occupant=occupant, slot_of=slot_of)

    def filled(self, fills: Sequence[Fill]) -> Residency:
        """Return the tables with experts in empty slots that are there and large enough."""
        self._check_places(fills)
        occupant, slot_of = self.occupant.copy(), self.slot_of.copy()
        for fill in fills:
            if occupant[fill.slot] >= 0:
                raise ValueError(f"slot {fill.slot} holds expert {divmod(int(occupant[fill.slot]), self.num_experts)}")
            if slot_of[fill.pair] >= 0:
                raise ValueError(f"expert {fill.pair} is in slot {slot_of[fill.pair]} already")
            occupant[fill.slot] = fill.layer * self.num_experts + fill.expert
            slot_of[fill.pair] = fill.slot
        return replace(self, occupant=occupant, slot_of=slot_of)

    def with_experts(self, slot_of: NDArray[np.int32]) -> Residency:
        """Return the tables with the experts where the device says they are; it moves them between slots of a block.

        Raises:
            ValueError: the device has lost or filled a slot, given it to two experts or to another block's.
        """
        experts = np.flatnonzero(slot_of >= 0)
        slots = slot_of.reshape(-1)[experts]
        if not np.array_equal(np.sort(slots), np.flatnonzero(self.occupant >= 0)):
            raise ValueError("the device's experts are not in the slots that had some: one each")
        occupant = np.full_like(self.occupant, -1)
        occupant[slots] = experts
        moved = slots[occupant[slots] // self.num_experts != self.occupant[slots] // self.num_experts]
        if len(moved):
            was, now = self.expert_in(int(moved[0])), divmod(int(occupant[moved[0]]), self.num_experts)
            raise ValueError(f"slot {moved[0]} had expert {was}; the device gave it to {now}, of another block")
        return replace(self, slot_of=slot_of, occupant=occupant)

    # --- segments

    def lent(self, num_segments: int) -> Residency:
        """Return the tables without the last segments and their experts."""
        evicted = self.evicted(self.last_slots(num_segments))
        return replace(evicted, segments=self.segments - num_segments)

    def taken_back(self, num_segments: int) -> Residency:
        """Return the tables with the next segments, empty."""
        self.next_slots(num_segments)
        return replace(self, segments=self.segments + num_segments)

    # --- K/V cells

    def slots_to_pay(self, cells: int, order: Iterable[int]) -> tuple[int, ...] | None:
        """Return the first slots of ``order`` whose pages are enough to map ``cells`` cells; None: all are too few.

        Slots that belong to the K/V already are passed over.
        """
        missing = self._missing_pages(cells) - len(self.free_pages())
        chosen: list[int] = []
        for slot in order:
            if missing <= 0:
                break
            if self.slot_page[slot] >= 0:
                chosen.append(slot)
                missing -= self.layout.slot_num_pages[slot]
        return tuple(chosen) if missing <= 0 else None

    def mapped(self, cells: int, paying: Sequence[int] = ()) -> Residency:
        """Return the tables with at least ``cells`` cells mapped, on free pages and those of the paying slots.

        Pages of the paying slots that are left over become free. Slots that pay must lie in the core.
        """
        self._refuse_window()
        if cells > self.layout.context_cells:
            raise ValueError(f"{cells:,} cells to map; the context has {self.layout.context_cells:,}")
        first_segment = self.layout.segment_first_slot[0] if self.layout.segment_first_slot else self.num_slots
        slot_page = self.slot_page.copy()
        for slot in paying:
            if slot >= first_segment:
                raise ValueError(f"slot {slot} lies in a segment and cannot pay for K/V cells")
            if slot_page[slot] < 0:
                raise ValueError(f"slot {slot} belongs to the K/V already")
            slot_page[slot] = -1
        given = replace(self.evicted(paying), slot_page=slot_page)
        free, missing = given.free_pages(), self._missing_pages(cells)
        if missing > len(free):
            raise ValueError(f"{cells:,} cells need {missing} pages more; {len(free)} are free or paid for")
        old, new = self.mapped_groups, max(self.mapped_groups, self.layout.groups(cells))
        kv_pages = self.kv_pages.copy()
        # group after group, so that trimming frees neighbours
        kv_pages[:, old:new] = free[:missing].reshape(new - old, len(kv_pages)).T
        return replace(given, kv_pages=kv_pages)

    def trimmed(
        self, cells: int, returning: Sequence[int] | None = None
    ) -> tuple[Residency, tuple[PageMove, ...], tuple[int, ...]]:
        """Unmap the cells past the pages that hold the first ``cells`` cells; put slots together of what is free.

        Args:
            returning: the slots to put together; None: as many as the free pages suffice for, those with the fewest
                moves first.

        Returns:
            the tables, the K/V pages that must be moved before they are published, and the slots that are there again
            (empty).
        """
        self._refuse_window()
        groups = self.layout.groups(cells)
        if groups > self.mapped_groups:
            raise ValueError(f"{cells:,} cells to keep; {self.mapped_cells:,} are mapped")
        kv_pages = self.kv_pages.copy()
        kv_pages[:, groups:] = -1
        shorter = replace(self, kv_pages=kv_pages)
        owners = shorter.owners()[: self.layout.core_pages]
        free = owners == NOBODY
        runs = {slot: self._home(slot) for slot in np.flatnonzero(self.slot_page < 0).tolist()}
        in_use = {slot: int(np.count_nonzero(~free[run])) for slot, run in runs.items()}
        left, back = int(np.count_nonzero(free)), []
        chosen = sorted(runs, key=lambda slot: (in_use[slot], slot)) if returning is None else returning
        for slot in chosen:
            if slot not in runs:
                raise ValueError(f"slot {slot} does not belong to the K/V")
            size = self.layout.slot_num_pages[slot]
            if size <= left:
                left -= size
                back.append(slot)
        if returning is not None and len(back) < len(returning):
            raise ValueError(f"{len(returning)} slots need more pages than are free")
        slot_page, sources = self.slot_page.copy(), []
        for slot in back:
            slot_page[slot] = self.layout.slot_first_page[slot]
            sources += [page for page in range(runs[slot].start, runs[slot].stop) if not free[page]]
            free[runs[slot]] = False
        targets = np.flatnonzero(free)[: len(sources)].tolist()
        moves = tuple(PageMove(source, target) for source, target in zip(sources, targets, strict=True))
        for move in moves:
            layer, group = divmod(int(owners[move.source]) - self.num_slots, kv_pages.shape[1])
            kv_pages[layer, group] = move.target
        return replace(shorter, slot_page=slot_page), moves, tuple(sorted(back))

    def store_rows(self, layer: int, groups: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return i32[n], the rows of the store that belong to groups of an attention layer."""
        return (layer * self.kv_pages.shape[1] + groups).astype(np.int32)

    def with_window(self, leaving: Sequence[int], coming: Sequence[int]) -> Residency:
        """Give the pages of some groups to others."""
        if not self.layout.has_window:
            raise ValueError("the K/V pages are no window")
        kv_pages = self.kv_pages.copy()
        kv_pages[:, coming], kv_pages[:, leaving] = self.kv_pages[:, leaving], -1
        return replace(self, kv_pages=kv_pages)

    def _refuse_window(self) -> None:
        if self.layout.has_window:
            raise ValueError("the mapped K/V pages are a window: they slide, and neither grow nor shrink")

    def _missing_pages(self, cells: int) -> int:
        return max(0, self.layout.groups(cells) - self.mapped_groups) * len(self.kv_pages)

    def _home(self, slot: int) -> slice:
        first = self.layout.slot_first_page[slot]
        return slice(first, first + self.layout.slot_num_pages[slot])


def first_residency(
    layout: ArenaLayout, pages_per_expert: Sequence[int], num_experts: int, pairs: Iterable[Expert]
) -> Residency:
    """Return the tables at the start: slot i holds the i-th expert, K/V pages lie behind the core's slots."""
    slots = layout.num_slots
    kv_pages = np.full((layout.num_kv_layers, layout.num_groups), -1, np.int32)
    start = layout.kv_first_page + np.arange(layout.num_kv_layers * layout.start_groups, dtype=np.int32)
    kv_pages[:, : layout.start_groups] = start.reshape(layout.num_kv_layers, layout.start_groups)
    empty = Residency(
        layout=layout,
        expert_pages=np.asarray(pages_per_expert, np.int32),
        slot_of=np.full((len(pages_per_expert), num_experts), -1, np.int32),
        occupant=np.full(slots, -1, np.int32),
        slot_page=np.asarray(layout.slot_first_page, np.int32),
        kv_pages=kv_pages,
        segments=layout.num_segments,
    )
    return empty.filled([Fill(layer, expert, slot) for slot, (layer, expert) in enumerate(pairs)])
