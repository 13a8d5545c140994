"""What of an arena changes hands: loans of the last slots in whole segments, and slots that pay for K/V cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata_jax.memory import layout
from strata_jax.memory.segments import MAX_SEGMENTS
from strata_jax.memory.slot_order import SlotOrder


@dataclass(frozen=True, slots=True)
class Pieces:
    """What of a candidate's arena changes hands.

    Attributes:
        mapped_cells: K/V cells that have pages at the start.
        segment_slots: how many of the last slots lie in each segment.
        bucket_segments: how many of the last segments a prompt in chunks of each bucket borrows.
        lent_slots, lent_bytes: slots of all segments that the largest bucket borrows.
        givable_bytes: the last segments that can be given back while the others still hold that loan.
        base_bytes: what prompt buffers have without a loan and with the head loaded.
    """

    mapped_cells: int
    segment_slots: tuple[int, ...]
    bucket_segments: tuple[int, ...]
    lent_slots: int = 0
    lent_bytes: int = 0
    givable_bytes: int = 0
    base_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LastSlots:
    """The slots of an arena, counted from its end."""

    order: SlotOrder
    page_bytes: int
    num_slots: int

    def bytes(self, count: int) -> int:
        """Return the bytes of the last `count` slots."""
        return (self.order.pages(self.num_slots) - self.order.pages(self.num_slots - count)) * self.page_bytes

    def fewest_with(self, num_bytes: int, most: int) -> int:
        """Return how few of the last slots have so many bytes, `most` if none do."""
        if num_bytes <= 0 or most <= 0:
            return 0
        short = layout.largest_where(lambda n: self.bytes(n) < num_bytes, 0, most)
        return min(most, (short or 0) + 1)

    def loans(self, needs: Sequence[int], most: int, longest_bytes: int) -> list[int]:
        """Return how many of the last slots cover the need of each bucket in bytes, in whole segments.

        A segment is at least as long as the largest expert, and a smaller loan than that becomes the next larger one.

        Args:
            needs: by ascending bucket. most: slots that can be lent.
        """
        loans: list[int] = []
        for need in needs:
            loans.append(max([self.fewest_with(need, most), *loans[-1:]]))
        for idx, loan in enumerate(loans):
            below = loans[idx - 1] if idx else 0
            if loan <= below:
                continue
            border = self.bytes(below) + longest_bytes
            least = self.fewest_with(border, most)
            if self.bytes(least) < border:
                least = 0
            loans[idx] = max(loan, least) if least else below
        return loans

    def borders(self, loans: Sequence[int], segment_bytes: int, most: int, longest_bytes: int) -> list[int]:
        """Return how many of the last slots lie behind each border of a segment, ascending.

        There is one at each loan, then one every `segment_bytes` for segments that can be given back, as far as an
        arena can have more; a border is left out where less than the largest expert would lie beside it. Segments are
        larger where as many as there can be would not hold the loan twice: what goes must leave it behind.

        Args:
            segment_bytes: 0: nothing is given back. most: slots that can lie in segments.
        """
        found = sorted({loan for loan in loans if loan})
        twice = -(-2 * self.bytes(max(loans)) // (MAX_SEGMENTS - len(found)))
        step, reach = max(segment_bytes, longest_bytes, twice), 0
        while segment_bytes and len(found) < MAX_SEGMENTS:
            reach += step
            border = self.fewest_with(reach, most)
            size = self.bytes(border)
            if size < reach:
                break
            if all(abs(size - self.bytes(other)) >= longest_bytes for other in found):
                found = sorted([*found, border])
        return found

    def givable_bytes(self, borders: Sequence[int], loan_bytes: int) -> int:
        """Return the bytes of the most last segments that can go while the others have `loan_bytes`."""
        sizes = [self.bytes(border) for border in borders]
        return max((size for size in sizes if sizes[-1] - size >= loan_bytes), default=0)


def payable_pages(order: SlotOrder, pages: Sequence[int], core_slots: int, floor_slots: int) -> int:
    """Return the pages that the slots of the core can pay above a floor, counted as if the largest ones stayed.

    pages: of a slot of each block.
    """
    sizes = sorted(zip(pages, order.slots_by_block(max(0, core_slots)), strict=True))
    paying, payable = max(0, core_slots - floor_slots), 0
    for num_pages, count in sizes:
        payable += min(count, paying) * num_pages
        paying -= min(count, paying)
    return payable
