"""One candidate of a plan: the bytes that a context, a chunk and a number of slots take, and whether they fit.

A `Frame` is a model and a request with everything that does not depend on these three numbers worked out; the planner
and its error messages ask it the same questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from strata_jax.errors import ConfigError
from strata_jax.kv_types import cell_bytes
from strata_jax.memory import layout
from strata_jax.memory.buffers import Cells, decode_buffers, prompt_buffers
from strata_jax.memory.ledger import (
    Entry,
    Limit,
    Memory,
    Owner,
    Shortfall,
    always,
    phase_totals,
    worst_excess,
    worst_shortfall,
)
from strata_jax.memory.request import Choice, Origin, PlanRequest
from strata_jax.memory.sizes import (
    F32_BYTES,
    ModelSizes,
    bank_bytes,
    gdn_state_bytes,
    index_key_bytes,
    index_tail_bytes,
    ple_state_bytes,
    table_bytes,
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A model and a request, before context, chunk and slots are chosen.

    Attributes:
        pages: pages of a slot of each loaded block.
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
        return len(self.pages) * self.sizes.geometry.num_experts

    @property
    def window_tokens(self) -> int:
        """Rows of the decode program: without a draft block there are no windows."""
        return self.request.spec_window if self.with_draft else 1

    def num_cells(self, context_cells: int) -> int:
        return layout.align_up(context_cells, self.block_cells)

    def kv_pages_per_layer(self, context_cells: int) -> int:
        return layout.kv_pages_per_layer(self.num_cells(context_cells), self.cells_per_page)

    def kv_pages(self, context_cells: int) -> int:
        layers = self.sizes.attention_layers(self.with_draft)
        return len(layers) * self.kv_pages_per_layer(context_cells)

    def spare_pages(self, context_cells: int, num_slots: int) -> int:
        """Pages that only make the arena as long as one expert, since its program reads that many at a time."""
        used = layout.slot_pages(num_slots, self.pages) + self.kv_pages(context_cells)
        return max(0, self.most_pages - used)

    def context_entries(self, context_cells: int) -> tuple[Entry, ...]:
        """Return what grows with the context alone: K/V pages and index keys."""
        cells = self.num_cells(context_cells)
        return _context_entries(
            self.sizes, self.with_draft, cells, self.page_bytes, self.cells_per_page, self.cell_bytes
        )

    def slot_bytes(self, context_cells: int, num_slots: int) -> int:
        """Return the bytes of `slot_entries`."""
        pages = layout.slot_pages(num_slots, self.pages) + self.spare_pages(context_cells, num_slots)
        tables = table_bytes(self.sizes, self.with_draft, num_slots, self.kv_pages_per_layer(context_cells))
        return pages * self.page_bytes + tables

    def slot_entries(self, context_cells: int, num_slots: int) -> tuple[Entry, ...]:
        """Return what grows with the slots: their pages, the pages the arena lacks without them, and the tables."""
        pages = layout.slot_pages(num_slots, self.pages)
        rule = f"{num_slots:,} slots in {pages:,} pages x {self.page_bytes:,} B"
        entries = [always(Owner.EXPERT_SLOTS, "slots", pages * self.page_bytes, rule)]
        spare = self.spare_pages(context_cells, num_slots)
        if spare:
            rule = f"{spare} pages x {self.page_bytes:,} B, so that the arena is as long as one expert"
            entries.append(always(Owner.EXPERT_SLOTS, "spare pages", spare * self.page_bytes, rule))
        tables = table_bytes(self.sizes, self.with_draft, num_slots, self.kv_pages_per_layer(context_cells))
        rule = "(experts of all blocks + slots + K/V pages of all layers) x 4 B"
        return (*entries, always(Owner.TABLES, "slots and pages", tables, rule))

    def buffer_entries(self, context_cells: int, chunk_tokens: int) -> tuple[Entry, ...]:
        """Return the temporaries of prompt and decode programs."""
        return _buffer_entries(
            self.sizes, self.with_draft, self._cells(context_cells), chunk_tokens, self.window_tokens,
            self.request.all_logits,
        )  # fmt: skip

    def _cells(self, context_cells: int) -> Cells:
        return Cells(self.num_cells(context_cells), self.cells_per_page, self.cell_bytes)

    def entries(self, context_cells: int, chunk_tokens: int, num_slots: int) -> tuple[Entry, ...]:
        """Return the ledger's entries for a candidate."""
        return (
            *self.fixed,
            *self.context_entries(context_cells),
            *self.slot_entries(context_cells, num_slots),
            *self.buffer_entries(context_cells, chunk_tokens),
        )

    def shortfall(self, context_cells: int, chunk_tokens: int, num_slots: int) -> Shortfall | None:
        """Return by how much a candidate exceeds a budget, or None if it fits."""
        return worst_excess(self.phase_bytes(context_cells, chunk_tokens, num_slots), self.limits)

    def phase_bytes(
        self, context_cells: int, chunk_tokens: int, num_slots: int
    ) -> dict[Memory, tuple[int, int, int, int]]:
        """Return what `entries` add up to in each phase, without making them and their texts: for searches."""
        start, prefill, decode, park = _grown_bytes(
            self.sizes, self.with_draft, self.page_bytes, self._cells(context_cells), chunk_tokens,
            self.window_tokens, self.request.all_logits,
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
        others = (*self.fixed, *self.context_entries(context_cells), *self.buffer_entries(context_cells, chunk_tokens))
        if worst_shortfall(others, self.limits) is not None:
            return None
        room = self.room_bytes(others)
        if room is None:
            return self.max_slots
        return layout.largest_where(lambda n: self.slot_bytes(context_cells, n) <= room, 0, self.max_slots)


@lru_cache(maxsize=4096)
def _context_entries(
    sizes: ModelSizes, with_draft: bool, cells: int, page_bytes: int, cells_per_page: int, cell_bytes: int
) -> tuple[Entry, ...]:
    """Return K/V pages and index keys of `cells` cells. Cached: searches ask for the same contexts again and again."""
    g, layers, trunk = sizes.geometry, sizes.attention_layers(with_draft), len(sizes.trunk_attention)
    pages = layout.kv_pages_per_layer(cells, cells_per_page)
    rule = f"x {pages:,} pages x {page_bytes:,} B; {cells_per_page:,} cells of {cell_bytes:,} B a page"
    entries = [always(Owner.KV, "trunk", trunk * pages * page_bytes, f"{trunk} attention layers {rule}")]
    if len(layers) > trunk:
        entries.append(always(Owner.KV, "draft block", pages * page_bytes, f"1 attention layer {rule}"))
    for ratio, count in sizes.sparse_ratios(with_draft):
        keys = count * index_key_bytes(g, ratio, cells)
        rule = f"{count} sparse layers x ({cells:,} cells / {ratio} + 1) x {g.index_dim} x 4 B"
        entries.append(always(Owner.INDEX_KEYS, f"blocks of {ratio}", keys, rule))
    return tuple(entries)


def _buffer_entries(
    sizes: ModelSizes, with_draft: bool, cells: Cells, chunk_tokens: int, window_tokens: int, all_logits: bool
) -> tuple[Entry, ...]:
    prompt = prompt_buffers(sizes, chunk_tokens, cells, with_draft=with_draft, all_logits=all_logits)
    return prompt + decode_buffers(sizes, window_tokens, cells, with_draft=with_draft)


@lru_cache(maxsize=4096)
def _grown_bytes(
    sizes: ModelSizes, with_draft: bool, page_bytes: int, cells: Cells, chunk_tokens: int, window_tokens: int,
    all_logits: bool,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return the bytes of each phase that context and chunk take together."""
    context = _context_entries(
        sizes, with_draft, cells.context_cells, page_bytes, cells.cells_per_page, cells.cell_bytes
    )
    buffers = _buffer_entries(sizes, with_draft, cells, chunk_tokens, window_tokens, all_logits)
    return phase_totals((*context, *buffers))


def make_frame(sizes: ModelSizes, request: PlanRequest) -> Frame:
    """Work out all that does not depend on context, chunk and slots. `request` has passed `check_request`."""
    g = sizes.geometry
    with_draft = request.spec_window > 1 and g.num_mtp_layers > 0
    cell = sum(cell_bytes(request.kv_type, g.num_kv_heads, g.head_dim))
    blobs = sizes.blobs[: sizes.blocks(with_draft)]
    if request.page_bytes is None:
        value, waste = _auto_page(blobs, cell, sizes.block_cells)
        reason = f"largest power of two up to 64 KiB that wastes < 3 % of the slots ({waste:.2f} %)"
        if waste >= 100 * layout.MAX_SLOT_WASTE_FRAC:
            reason = f"none wastes < 3 % of the slots; this one wastes least ({waste:.2f} %)"
        page_choice = Choice("page_bytes", value, Origin.COMPUTED, reason)
    else:
        page_choice = request.choice("page_bytes", request.page_bytes)
    per_page = layout.cells_per_page(page_choice.value, cell, sizes.block_cells)
    if per_page == 0:
        needed = sizes.block_cells * cell
        raise ConfigError(
            f"engine.page_kib={page_choice.value / layout.KIB:g} and kv.type={request.kv_type}: a page of"
            f" {page_choice.value:,} bytes does not hold one block of {sizes.block_cells} cells of {cell:,} bytes; it"
            f" needs {needed:,}. Set engine.page_kib={-(-needed // layout.KIB)} or more"
        )
    pages = _pages(blobs, page_choice.value)
    fixed = (*_reserve_entries(request), *_model_entries(sizes, with_draft))
    return Frame(
        sizes=sizes,
        request=request,
        with_draft=with_draft,
        page_choice=page_choice,
        cell_bytes=cell,
        cells_per_page=per_page,
        pages=pages,
        most_pages=max(pages),
        limits=request.limits(),
        fixed=fixed,
        fixed_bytes={memory: phase_totals(fixed, (memory,)) for memory in Memory},
    )


@lru_cache(maxsize=64)
def _auto_page(blobs: tuple[int, ...], cell: int, block_cells: int) -> tuple[int, float]:
    """Return the page size in bytes that auto takes and the percentage of the slots that it wastes."""
    value = layout.choose_page_bytes(blobs, cell, block_cells)
    return value, 100 * layout.slot_waste_frac(blobs, value)


@lru_cache(maxsize=64)
def _pages(blobs: tuple[int, ...], page_bytes: int) -> tuple[int, ...]:
    return tuple(layout.pages_per_expert(blob, page_bytes) for blob in blobs)


def _reserve_entries(request: PlanRequest) -> tuple[Entry, ...]:
    if request.device_budget_bytes is None:
        return ()
    rule = "left to the desktop and other programs"
    return (always(Owner.RESERVE, "reserve", request.reserve_bytes, rule, origin=request.reserve_origin),)


@lru_cache(maxsize=32)
def _model_entries(sizes: ModelSizes, with_draft: bool) -> tuple[Entry, ...]:
    """Return weights, states and the bank. Cached: they are the same for every request."""
    g, entries = sizes.geometry, []
    stored = "as stored; vectors and convolution kernels as float32"
    entries.append(always(Owner.DENSE, "trunk", sizes.dense_bytes, stored))
    entries.append(always(Owner.EMBEDDING, "rows", sizes.embedding_bytes, "token_embd as stored"))
    head = "output as stored" if sizes.head_bytes else "0: the head uses the embedding"
    entries.append(always(Owner.HEAD, "rows", sizes.head_bytes, head))
    if with_draft:
        entries.append(always(Owner.DRAFTER, "draft block", sizes.drafter_bytes, f"{stored}; without its experts"))
    num_gdn = len(g.recurrent_layers)
    if num_gdn:
        each = gdn_state_bytes(g)
        entries.append(
            always(Owner.RECURRENT_STATE, "GDN", num_gdn * each, f"{num_gdn} GDN layers x {each:,} B of float32")
        )
    if g.ple_layer is not None:
        rule = "inputs the n-gram convolution looks back to, float32"
        entries.append(always(Owner.RECURRENT_STATE, "n-gram convolution", ple_state_bytes(g), rule))
    width = g.num_streams * g.embed_width
    entries.append(always(Owner.RECURRENT_STATE, "hidden row", width * F32_BYTES, f"C*E {width:,} x 4 B"))
    for ratio, count in sizes.sparse_ratios(with_draft):
        rule = f"{count} sparse layers x ({ratio} - 1) raw keys x {g.index_dim} x 4 B"
        tails = count * index_tail_bytes(g, ratio)
        entries.append(always(Owner.INDEX_KEYS, f"incomplete blocks of {ratio}", tails, rule))
    if with_draft and g.compress_ratio[-1]:
        ratio = g.compress_ratio[-1]
        rule = f"the draft block's ({ratio} - 1) raw keys x {g.index_dim} x 4 B at the last committed token"
        entries.append(always(Owner.INDEX_KEYS, "draft block before its last token", index_tail_bytes(g, ratio), rule))
    blocks = sizes.blocks(with_draft)
    rule = f"{g.num_experts} experts of {blocks} blocks, packed, matrices padded to 4 B"
    entries.append(always(Owner.BANK, "experts", bank_bytes(sizes, with_draft), rule, memory=Memory.HOST))
    return tuple(entries)
