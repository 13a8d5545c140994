"""One candidate of a plan: the bytes that a context, a chunk and a number of slots take, and whether they fit.

A `Frame` is a model and a request with everything that does not depend on these three numbers worked out; the planner
and its error messages ask it the same questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from strata_jax.memory import layout
from strata_jax.memory.buffers import Cells, decode_buffers, prompt_buffers
from strata_jax.memory.context_entries import buffer_entries, cell_entries, grown_bytes
from strata_jax.memory.fixed_entries import but_not
from strata_jax.memory.ledger import (
    PHASES,
    Entry,
    Limit,
    Memory,
    Owner,
    Phase,
    Shortfall,
    always,
    during,
    phase_totals,
    worst_excess,
    worst_shortfall,
)
from strata_jax.memory.pieces import LastSlots, Pieces, payable_pages
from strata_jax.memory.request import Choice, PlanRequest
from strata_jax.memory.sizes import ModelSizes, table_bytes
from strata_jax.memory.slot_order import SlotOrder
from strata_jax.memory.staging import StageNeed, choose_stage_bytes, stage_need


@dataclass(frozen=True, slots=True)
class Frame:
    """A model and a request, before context, chunk and slots are chosen.

    Attributes:
        pages: pages of a slot of each loaded block. order: which experts get slots first.
        most_pages: pages of the largest of them.
        fixed: entries that depend on none of the three. fixed_bytes: their bytes of each phase.
    """

    sizes: ModelSizes
    request: PlanRequest
    with_draft: bool
    page_choice: Choice
    cell_bytes: int
    cells_per_page: int
    pages: tuple[int, ...]
    order: SlotOrder
    most_pages: int
    limits: tuple[Limit, ...]
    fixed: tuple[Entry, ...]
    fixed_bytes: Mapping[Memory, tuple[int, int, int, int]]

    @property
    def page_bytes(self) -> int:
        return self.page_choice.value

    @property
    def block_cells(self) -> int:
        return self.sizes.block_cells

    @property
    def max_slots(self) -> int:
        return self.order.num_ranked

    @property
    def window_tokens(self) -> int:
        """Rows of the decode program: without a draft block there are no windows."""
        return self.request.spec_window if self.with_draft else 1

    def num_cells(self, context_cells: int) -> int:
        return layout.align_up(context_cells, self.block_cells)

    def kv_pages_per_layer(self, context_cells: int) -> int:
        return layout.kv_pages_per_layer(self.num_cells(context_cells), self.cells_per_page)

    def kv_pages(self, mapped_cells: int) -> int:
        layers = self.sizes.attention_layers(self.with_draft)
        return len(layers) * self.kv_pages_per_layer(mapped_cells)

    def spare_pages(self, mapped_cells: int, num_slots: int) -> int:
        """Pages that only make the arena as long as one expert, since its program reads that many at a time."""
        used = self.order.pages(num_slots) + self.kv_pages(mapped_cells)
        return max(0, self.most_pages - used)

    def first_cells(self, context_cells: int) -> int:
        """Return the K/V cells that have pages at the start, where slots can pay for the others or RAM holds them."""
        moving, cells = self.request.moving, self.num_cells(context_cells)
        if moving.resident_cells:
            return min(cells, layout.align_up(moving.resident_cells, self.cells_per_page))
        return cells if moving.grow_init_cells is None else min(moving.grow_init_cells, cells)

    def keeps_cells_in_host(self, context_cells: int) -> bool:
        """Whether host memory has a place for every K/V cell, since the device does not."""
        mapped = self.first_cells(context_cells)
        return self.request.moving.resident_cells > 0 and mapped < self.num_cells(context_cells)

    def least_resident_cells(self, chunk_tokens: int) -> int:
        """Return the K/V cells that must be on the device: what a chunk or round writes, wherever in a page it begins.

        A round writes a window and the drafts of the next one.
        """
        return max(chunk_tokens, 2 * self.window_tokens) + self.cells_per_page

    def context_entries(self, context_cells: int, mapped_cells: int | None = None) -> tuple[Entry, ...]:
        """Return what grows with the context alone: K/V pages, all of them or the mapped ones, and index keys."""
        cells = self.num_cells(context_cells)
        mapped = cells if mapped_cells is None else self.num_cells(mapped_cells)
        return cell_entries(
            self.sizes, self.with_draft, cells, mapped, self.page_bytes, self.cells_per_page, self.cell_bytes,
            self.keeps_cells_in_host(context_cells),
        )  # fmt: skip

    def slot_bytes(self, context_cells: int, num_slots: int, mapped_cells: int | None = None) -> int:
        """Return the bytes of `slot_entries`."""
        mapped = context_cells if mapped_cells is None else mapped_cells
        pages = self.order.pages(num_slots) + self.spare_pages(mapped, num_slots)
        tables = table_bytes(self.sizes, self.with_draft, num_slots, self.kv_pages_per_layer(context_cells))
        return pages * self.page_bytes + tables

    def slot_entries(self, context_cells: int, num_slots: int, pieces: Pieces | None = None) -> tuple[Entry, ...]:
        """Return what grows with the slots: their pages, the pages the arena lacks without them, and the tables."""
        lent = 0 if pieces is None else pieces.lent_bytes
        pages = self.order.pages(num_slots) - lent // self.page_bytes
        rule = f"{num_slots - (pieces.lent_slots if pieces else 0):,} slots in {pages:,} pages x {self.page_bytes:,} B"
        entries = [always(Owner.EXPERT_SLOTS, "slots", pages * self.page_bytes, rule)]
        if pieces is not None and lent:
            rule = f"{pieces.lent_slots:,} slots in {lent // self.page_bytes:,} pages x {self.page_bytes:,} B"
            entries.append(but_not(Phase.PREFILL, Owner.EXPERT_SLOTS, "slots lent while a prompt is read", lent, rule))
        spare = self.spare_pages(context_cells if pieces is None else pieces.mapped_cells, num_slots)
        if spare:
            rule = f"{spare} pages x {self.page_bytes:,} B, so that the arena is as long as one expert"
            entries.append(always(Owner.EXPERT_SLOTS, "spare pages", spare * self.page_bytes, rule))
        tables = table_bytes(self.sizes, self.with_draft, num_slots, self.kv_pages_per_layer(context_cells))
        rule = "(experts of all blocks + slots + K/V pages of all layers) x 4 B"
        return (*entries, always(Owner.TABLES, "slots and pages", tables, rule))

    def prompt_entries(self, context_cells: int, bucket_tokens: int, stage_bytes: int = 0) -> tuple[Entry, ...]:
        """Return the temporaries of the prompt programs of a bucket, and staged experts if it takes some."""
        return prompt_buffers(
            self.sizes, bucket_tokens, self._cells(context_cells, stage_bytes), with_draft=self.with_draft,
            all_logits=self.request.all_logits,
        )  # fmt: skip

    def buckets(self, chunk_tokens: int) -> tuple[int, ...]:
        """Return the row counts of the prompt programs."""
        return layout.prefill_buckets(chunk_tokens, kernels=self.request.expert_kernels)

    def stage_bytes(self, context_cells: int, chunk_tokens: int) -> int:
        """Return the bytes of the buffers through which experts are copied ahead; 0 for chunks that are too short."""
        need, wanted = self.stage_need, self.request.stage_bytes
        if not need.stages(layout.padded_chunk(chunk_tokens)):
            return 0
        if wanted is not None or self.request.is_shared:
            return choose_stage_bytes(wanted, need, None)
        cells = self.context_entries(context_cells, self.first_cells(context_cells))
        others = (*self.fixed, *cells, *self.prompt_entries(context_cells, chunk_tokens))
        num_slots = self.request.expert_slots
        slot_bytes = None if num_slots is None else self.slot_bytes(context_cells, num_slots)
        lends, room = self.request.moving.lend, self.room_bytes(others)
        return choose_stage_bytes(None, need, room, chunk_tokens, slot_bytes, lends=lends)

    @property
    def stage_need(self) -> StageNeed:
        return stage_need(self.sizes, with_draft=self.with_draft, expert_kernels=self.request.expert_kernels)

    def decode_entries(self, context_cells: int) -> tuple[Entry, ...]:
        """Return the temporaries of the decode programs."""
        return decode_buffers(self.sizes, self.window_tokens, self._cells(context_cells), with_draft=self.with_draft)

    def buffer_entries(self, context_cells: int, chunk_tokens: int) -> tuple[Entry, ...]:
        """Return the temporaries of prompt and decode programs."""
        cells = self._cells(context_cells, self.stage_bytes(context_cells, chunk_tokens))
        return buffer_entries(
            self.sizes, self.with_draft, cells, chunk_tokens, self.window_tokens, self.request.all_logits
        )

    def entries(self, context_cells: int, chunk_tokens: int, num_slots: int) -> tuple[Entry, ...]:
        """Return the ledger's entries for a candidate."""
        pieces = self.pieces(context_cells, chunk_tokens, num_slots)
        return (
            *self.fixed,
            *self.context_entries(context_cells, pieces.mapped_cells),
            *self.slot_entries(context_cells, num_slots, pieces),
            *self.buffer_entries(context_cells, chunk_tokens),
            *self.park_entries(num_slots, pieces),
        )

    def park_entries(self, num_slots: int, pieces: Pieces) -> tuple[Entry, ...]:
        """Return the blocks through which pages are copied while a conversation is parked or restored."""
        if not self.parks:
            return ()
        pages = self.order.pages(num_slots) + self.kv_pages(pieces.mapped_cells)
        rows = layout.stage_rows(pages, self.page_bytes)
        rule = f"2 blocks of {rows:,} pages x {self.page_bytes:,} B"
        staging = layout.staging_bytes(pages, self.page_bytes)
        return (during(Phase.PARK, Owner.CONVERSATIONS, "blocks of pages", staging, rule),)

    @property
    def parks(self) -> bool:
        """Whether conversations are parked."""
        return self.request.moving.conversation_bytes > 0

    def pieces(self, context_cells: int, chunk_tokens: int, num_slots: int) -> Pieces:
        """Return what of a candidate's arena changes hands.

        As many of the last slots are lent as prompts need beyond what else they have; where that is more than the core
        of the arena can spare the prefill phase exceeds the budget. The slots of the core above the floor pay for K/V
        cells; cells that they cannot pay for have pages from the start.
        """
        buckets = self.buckets(chunk_tokens)
        mapped = self.first_cells(context_cells)
        if not self.request.moving.on_device:
            return Pieces(mapped, (), (0,) * len(buckets))
        while True:
            base = self._base_bytes(context_cells, mapped, num_slots)
            loans = self._loans(context_cells, buckets, num_slots, base)
            more = self._unpaid_cells(context_cells, num_slots - max(loans))
            if more <= mapped:
                break
            mapped = more
        last, total = self._last_slots(num_slots), max(loans)
        borders = self._borders(context_cells, num_slots, loans, mapped)
        return Pieces(
            mapped_cells=mapped,
            segment_slots=tuple(b - a for a, b in pairwise([0, *borders]))[::-1],
            bucket_segments=tuple(borders.index(loan) + 1 if loan else 0 for loan in loans),
            lent_slots=total,
            lent_bytes=last.bytes(total),
            givable_bytes=last.givable_bytes(borders, last.bytes(total)) if self.request.moving.elastic_bytes else 0,
            base_bytes=base,
        )

    def shortfall(self, context_cells: int, chunk_tokens: int, num_slots: int) -> Shortfall | None:
        """Return by how much a candidate exceeds a budget, or None if it fits."""
        return worst_excess(self.phase_bytes(context_cells, chunk_tokens, num_slots), self.limits)

    def phase_bytes(
        self, context_cells: int, chunk_tokens: int, num_slots: int
    ) -> dict[Memory, tuple[int, int, int, int]]:
        """Return what `entries` add up to in each phase; where nothing moves, without making them and their texts."""
        if self.request.moving.on_device or self.parks:
            entries = self.entries(context_cells, chunk_tokens, num_slots)
            return {memory: phase_totals(entries, (memory,)) for memory in Memory}
        cells = self._cells(context_cells, self.stage_bytes(context_cells, chunk_tokens))
        start, prefill, decode, park = grown_bytes(
            self.sizes, self.with_draft, self.page_bytes, cells, chunk_tokens, self.window_tokens,
            self.request.all_logits,
        )  # fmt: skip
        slots = self.slot_bytes(context_cells, num_slots)
        a, b, c, d = self.fixed_bytes[Memory.DEVICE]
        device = (a + start + slots, b + prefill + slots, c + decode + slots, d + park + slots)
        return {**self.fixed_bytes, Memory.DEVICE: device}

    def room_bytes(self, entries: Sequence[Entry]) -> int | None:
        """Return the device bytes that `entries` leave in every phase (below 0: too few); None without a budget."""
        rooms = [
            limit.budget_bytes - max(phase_totals(entries, limit.memories))
            for limit in self.limits
            if Memory.DEVICE in limit.memories
        ]
        return min(rooms, default=None)

    def slots_that_fit(self, context_cells: int, chunk_tokens: int) -> int | None:
        """Return the most slots beside a context and a chunk; None if not even 0 fit."""
        mapped, lends = self.first_cells(context_cells), self.request.moving.lend
        buffers = self.buffer_entries(context_cells, chunk_tokens)
        if lends:  # prompts get what they need from the slots
            buffers = self.decode_entries(context_cells)
        others = (*self.fixed, *self.context_entries(context_cells, mapped), *buffers)
        if worst_shortfall(others, self.limits) is not None:
            return None
        room = self.room_bytes(others)
        if room is None:
            return self.max_slots
        most = layout.largest_where(lambda n: self.slot_bytes(context_cells, n, mapped) <= room, 0, self.max_slots)
        if most is None or not (self.request.moving.on_device or self.parks):
            return most
        # cells that no slot can pay for need pages from the start, and a loan leaves the core what it must have

        def fits(num_slots: int) -> bool:
            return self.shortfall(context_cells, chunk_tokens, num_slots) is None

        return most if fits(most) else layout.largest_where(fits, 0, most)

    def _cells(self, context_cells: int, stage_bytes: int = 0) -> Cells:
        return Cells(
            self.num_cells(context_cells), self.cells_per_page, self.cell_bytes, self.request.expert_kernels,
            stage_bytes, self.request.kv_type,
        )  # fmt: skip

    def _base_bytes(self, context_cells: int, mapped_cells: int, num_slots: int) -> int:
        """Return what prompt buffers have without a loan and with the head loaded.

        That is what nobody owns while a prompt is read, of it only the decode programs' part with own=off; without a
        budget there is no end to it.
        """
        others = (*self.fixed, *self.context_entries(context_cells, mapped_cells))
        taken = sum(e.phase_bytes[PHASES.index(Phase.START)] for e in others if e.memory is Memory.DEVICE)
        taken += self.slot_bytes(context_cells, num_slots, mapped_cells)
        budget = self.request.device_budget_bytes
        if self.request.moving.own == "off":
            decode = sum(e.peak_bytes for e in self.decode_entries(context_cells))
            return decode if budget is None else min(decode, budget - taken)
        return 2**62 if budget is None else budget - taken

    def _loans(self, context_cells: int, buckets: Sequence[int], num_slots: int, base_bytes: int) -> list[int]:
        """Return how many of the last slots a prompt in chunks of each bucket borrows, in whole segments."""
        moving = self.request.moving
        if not moving.lend:
            return [0] * len(buckets)
        base = base_bytes + (self.sizes.head_bytes if moving.head_alias else 0)
        stage = self.stage_bytes(context_cells, buckets[-1])
        entries = [self.prompt_entries(context_cells, bucket, stage) for bucket in buckets]
        needs = [sum(e.peak_bytes for e in of_bucket) - base for of_bucket in entries]
        return self._last_slots(num_slots).loans(needs, self._most_in_segments(num_slots), self._longest_bytes)

    def _borders(self, context_cells: int, num_slots: int, loans: Sequence[int], mapped_cells: int) -> list[int]:
        """Return how many of the last slots lie behind each border of a segment; the core still pays for K/V cells."""

        def pays(in_segments: int) -> bool:
            return self._unpaid_cells(context_cells, num_slots - in_segments) <= mapped_cells

        most = layout.largest_where(pays, max(loans), self._most_in_segments(num_slots)) or 0
        elastic = self.request.moving.elastic_bytes
        return self._last_slots(num_slots).borders(loans, elastic, most, self._longest_bytes)

    def _most_in_segments(self, num_slots: int) -> int:
        """Return how many slots can lie in segments: the core keeps the floor and one expert of every block."""
        keep = max(self.request.moving.floor_slots, len(self.pages), self.order.slots_with(self.most_pages))
        return max(0, num_slots - keep)

    @property
    def _longest_bytes(self) -> int:
        return self.most_pages * self.page_bytes

    def _last_slots(self, num_slots: int) -> LastSlots:
        return LastSlots(self.order, self.page_bytes, num_slots)

    def _unpaid_cells(self, context_cells: int, core_slots: int) -> int:
        """Return the cells that need pages from the start: those of the whole window that core slots cannot pay for.

        The floor's slots never pay.
        """
        moving = self.request.moving
        if moving.grow_init_cells is None:
            return self.first_cells(context_cells)
        payable = payable_pages(self.order, self.pages, core_slots, moving.floor_slots)
        layers = max(1, len(self.sizes.attention_layers(self.with_draft)))
        groups = self.kv_pages_per_layer(context_cells) - payable // layers
        return min(self.num_cells(context_cells), max(0, groups) * self.cells_per_page)
