"""Where slots and K/V pages lie in an arena of one core and some segments. Pure arithmetic.

The arena is a core array and up to `MAX_SEGMENTS` segments behind it; page numbers run through all of them. The first
slots lie in the core, then the K/V pages that are mapped at the start, then spare pages; the last slots lie in the
segments. A segment can be given back to the device's allocator and made again, the last one first; so K/V pages, which
must stay where they are, are pages of the core.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from strata_jax.errors import ConfigError
from strata_jax.memory import layout

MAX_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The arena as it is allocated.

    Attributes:
        array_pages: pages of the core, then of each segment.
        slot_first_page: where each slot starts. slot_num_pages: its pages.
        segment_first_slot: the first slot of each segment; before the first of them all slots lie in the core.
        kv_first_page: the first of the pages that K/V cells have at the start, layer by layer.
        start_groups: pages of each attention layer that are mapped at the start, out of `num_groups`.
        cells_per_page: K/V cells of one layer in a page; `context_cells` in all.
        has_window: whether the pages that are mapped slide over the sequence, the other cells being in host memory.
    """

    page_bytes: int
    array_pages: tuple[int, ...]
    slot_first_page: tuple[int, ...]
    slot_num_pages: tuple[int, ...]
    segment_first_slot: tuple[int, ...]
    kv_first_page: int
    num_kv_layers: int
    start_groups: int
    num_groups: int
    cells_per_page: int
    context_cells: int
    has_window: bool = False

    @property
    def num_slots(self) -> int:
        return len(self.slot_first_page)

    @property
    def num_pages(self) -> int:
        return sum(self.array_pages)

    @property
    def core_pages(self) -> int:
        return self.array_pages[0]

    @property
    def num_segments(self) -> int:
        return len(self.array_pages) - 1

    @property
    def first_pages(self) -> tuple[int, ...]:
        """The first page of each array."""
        return (0, *accumulate(self.array_pages))[:-1]

    def locate(self, page: int) -> tuple[int, int]:
        """Return the array that a page lies in (0 is the core) and its place there."""
        first = self.first_pages
        array = bisect_right(first, page) - 1
        return array, page - first[array]

    def slots_of_segment(self, segment: int) -> range:
        """Return the slots that lie in a segment."""
        ends = (*self.segment_first_slot[1:], self.num_slots)
        return range(self.segment_first_slot[segment], ends[segment])

    def groups(self, cells: int) -> int:
        """Return the pages of each attention layer that hold the first `cells` cells."""
        return layout.kv_pages_per_layer(cells, self.cells_per_page)

    def cells(self, groups: int) -> int:
        """Return the cells that the first `groups` pages of each attention layer hold."""
        return min(self.context_cells, layout.cells_in_pages(groups, self.cells_per_page))


def arena_layout(
    *,
    pages_per_expert: Sequence[int],
    slot_blocks: Sequence[int],
    segment_slots: Sequence[int],
    num_kv_layers: int,
    context_cells: int,
    kv_mapped_cells: int,
    cells_per_page: int,
    spare_pages: int,
    page_bytes: int,
    has_window: bool = False,
) -> ArenaLayout:
    """Lay out an arena.

    Args:
        pages_per_expert: pages of a slot of each block. slot_blocks: the block of each slot.
        segment_slots: how many of the last slots lie in each segment.
        kv_mapped_cells: cells that have pages at the start.
        spare_pages: pages of the core that belong to nobody at the start.
        has_window: see `ArenaLayout`.

    Raises:
        ConfigError: too many segments, segments with more slots than there are, or an array shorter than one expert
            (a program reads that many pages of it at a time).
    """
    num_slots = len(slot_blocks)
    if len(segment_slots) > MAX_SEGMENTS:
        raise ConfigError(f"{len(segment_slots)} segments; an arena has {MAX_SEGMENTS} at most")
    if sum(segment_slots) > num_slots:
        raise ConfigError(f"segments with {sum(segment_slots):,} slots; there are {num_slots:,} slots")
    core_slots = num_slots - sum(segment_slots)
    num_groups = layout.kv_pages_per_layer(context_cells, cells_per_page)
    start_groups = layout.kv_pages_per_layer(min(kv_mapped_cells, context_cells), cells_per_page)
    beside = num_kv_layers * start_groups + spare_pages
    borders = tuple(accumulate(segment_slots, initial=core_slots))
    slot_pages = [pages_per_expert[block] for block in slot_blocks]
    first_pages = (0, *accumulate(slot_pages))
    ends = [first_pages[border] for border in borders]
    made = ArenaLayout(
        page_bytes=page_bytes,
        array_pages=(ends[0] + beside, *(b - a for a, b in pairwise(ends))),
        slot_first_page=tuple(first_pages[slot] + (beside if slot >= core_slots else 0) for slot in range(num_slots)),
        slot_num_pages=tuple(slot_pages),
        segment_first_slot=borders[:-1],
        kv_first_page=ends[0],
        num_kv_layers=num_kv_layers,
        start_groups=start_groups,
        num_groups=num_groups,
        cells_per_page=cells_per_page,
        context_cells=context_cells,
        has_window=has_window,
    )
    longest = max(pages_per_expert)
    for array, pages in enumerate(made.array_pages):
        if pages < longest:
            name = f"segment {array - 1}" if array else "the core of the arena"
            raise ConfigError(f"{name} has {pages} pages; it needs the {longest} of the largest expert")
    return made
