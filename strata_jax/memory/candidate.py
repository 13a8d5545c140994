"""One candidate of a plan: the bytes that a context, a chunk and a number of slots take, and whether they fit.

A `Frame` is a model and a request with everything that does not depend on these three numbers worked out; the planner
and its error messages ask it the same questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from strata_jax.errors import ConfigError
from strata_jax.kv_types import cell_bytes
from strata_jax.memory import layout
from strata_jax.memory.buffers import Cells, decode_buffers, prompt_buffers
from strata_jax.memory.ledger import (
    PHASES,
    Entry,
    Limit,
    Memory,
    Owner,
    Phase,
    Shortfall,
    always,
    phase_totals,
    worst_excess,
    worst_shortfall,
)
from strata_jax.memory.request import Choice, MovingMemory, Origin, PlanRequest
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
class Pieces:
    """What of a candidate's arena changes hands.

    Attributes:
        mapped_cells: K/V cells that have pages at the start.
        segment_slots: how many of the last slots lie in each segment.
        bucket_segments: how many of the last segments a prompt in chunks of each bucket borrows.
        lent_slots, lent_bytes: slots of all segments that the largest bucket borrows.
        base_bytes: what prompt buffers have without a loan and with the head loaded.
    """

    mapped_cells: int
    segment_slots: tuple[int, ...]
    bucket_segments: tuple[int, ...]
    lent_slots: int = 0
    lent_bytes: int = 0
    base_bytes: int = 0


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

    def kv_pages(self, mapped_cells: int) -> int:
        layers = self.sizes.attention_layers(self.with_draft)
        return len(layers) * self.kv_pages_per_layer(mapped_cells)

    def spare_pages(self, mapped_cells: int, num_slots: int) -> int:
        """Pages that only make the arena as long as one expert, since its program reads that many at a time."""
        used = layout.slot_pages(num_slots, self.pages) + self.kv_pages(mapped_cells)
        return max(0, self.most_pages - used)

    def first_cells(self, context_cells: int) -> int:
        """Return the K/V cells that have pages at the start, where slots can pay for the others."""
        init, cells = self.request.moving.grow_init_cells, self.num_cells(context_cells)
        return cells if init is None else min(init, cells)

    def context_entries(self, context_cells: int, mapped_cells: int | None = None) -> tuple[Entry, ...]:
        """Return what grows with the context alone: K/V pages, all of them or the mapped ones, and index keys."""
        cells = self.num_cells(context_cells)
        mapped = cells if mapped_cells is None else self.num_cells(mapped_cells)
        return _context_entries(
            self.sizes, self.with_draft, cells, mapped, self.page_bytes, self.cells_per_page, self.cell_bytes
        )

    def slot_bytes(self, context_cells: int, num_slots: int, mapped_cells: int | None = None) -> int:
        """Return the bytes of `slot_entries`."""
        mapped = context_cells if mapped_cells is None else mapped_cells
        pages = layout.slot_pages(num_slots, self.pages) + self.spare_pages(mapped, num_slots)
        tables = table_bytes(self.sizes, self.with_draft, num_slots, self.kv_pages_per_layer(context_cells))
        return pages * self.page_bytes + tables

    def slot_entries(self, context_cells: int, num_slots: int, pieces: Pieces | None = None) -> tuple[Entry, ...]:
        """Return what grows with the slots: their pages, the pages the arena lacks without them, and the tables."""
        lent = 0 if pieces is None else pieces.lent_bytes
        pages = layout.slot_pages(num_slots, self.pages) - lent // self.page_bytes
        rule = f"{num_slots - (pieces.lent_slots if pieces else 0):,} slots in {pages:,} pages x {self.page_bytes:,} B"
        entries = [always(Owner.EXPERT_SLOTS, "slots", pages * self.page_bytes, rule)]
        if pieces is not None and lent:
            rule = f"{pieces.lent_slots:,} slots in {lent // self.page_bytes:,} pages x {self.page_bytes:,} B"
            entries.append(_but_not(Phase.PREFILL, Owner.EXPERT_SLOTS, "slots lent while a prompt is read", lent, rule))
        spare = self.spare_pages(context_cells if pieces is None else pieces.mapped_cells, num_slots)
        if spare:
            rule = f"{spare} pages x {self.page_bytes:,} B, so that the arena is as long as one expert"
            entries.append(always(Owner.EXPERT_SLOTS, "spare pages", spare * self.page_bytes, rule))
        tables = table_bytes(self.sizes, self.with_draft, num_slots, self.kv_pages_per_layer(context_cells))
        rule = "(experts of all blocks + slots + K/V pages of all layers) x 4 B"
        return (*entries, always(Owner.TABLES, "slots and pages", tables, rule))

    def prompt_entries(self, context_cells: int, chunk_tokens: int) -> tuple[Entry, ...]:
        """Return the temporaries of the prompt programs of a chunk."""
        return prompt_buffers(
            self.sizes, chunk_tokens, self._cells(context_cells), with_draft=self.with_draft,
            all_logits=self.request.all_logits,
        )  # fmt: skip

    def decode_entries(self, context_cells: int) -> tuple[Entry, ...]:
        """Return the temporaries of the decode programs."""
        return decode_buffers(self.sizes, self.window_tokens, self._cells(context_cells), with_draft=self.with_draft)

    def buffer_entries(self, context_cells: int, chunk_tokens: int) -> tuple[Entry, ...]:
        """Return the temporaries of prompt and decode programs."""
        return _buffer_entries(
            self.sizes, self.with_draft, self._cells(context_cells), chunk_tokens, self.window_tokens,
            self.request.all_logits,
        )  # fmt: skip

    def entries(self, context_cells: int, chunk_tokens: int, num_slots: int) -> tuple[Entry, ...]:
        """Return the ledger's entries for a candidate."""
        pieces = self.pieces(context_cells, chunk_tokens, num_slots)
        return (
            *self.fixed,
            *self.context_entries(context_cells, pieces.mapped_cells),
            *self.slot_entries(context_cells, num_slots, pieces),
            *self.buffer_entries(context_cells, chunk_tokens),
        )

    def pieces(self, context_cells: int, chunk_tokens: int, num_slots: int) -> Pieces:
        """Return what of a candidate's arena changes hands.

        As many of the last slots are lent as prompts need beyond what else they have; where that is more than the core
        of the arena can spare the prefill phase exceeds the budget. The slots of the core above the floor pay for K/V
        cells; cells that they cannot pay for have pages from the start.
        """
        buckets = layout.prefill_buckets(chunk_tokens)
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
        borders = sorted({loan for loan in loans if loan})
        total = borders[-1] if borders else 0
        return Pieces(
            mapped_cells=mapped,
            segment_slots=tuple(b - a for a, b in pairwise([0, *borders]))[::-1],
            bucket_segments=tuple(borders.index(loan) + 1 if loan else 0 for loan in loans),
            lent_slots=total,
            lent_bytes=self._last_slots_bytes(num_slots, total),
            base_bytes=base,
        )

    def shortfall(self, context_cells: int, chunk_tokens: int, num_slots: int) -> Shortfall | None:
        """Return by how much a candidate exceeds a budget, or None if it fits."""
        return worst_excess(self.phase_bytes(context_cells, chunk_tokens, num_slots), self.limits)

    def phase_bytes(
        self, context_cells: int, chunk_tokens: int, num_slots: int
    ) -> dict[Memory, tuple[int, int, int, int]]:
        """Return what `entries` add up to in each phase; where nothing moves, without making them and their texts."""
        if self.request.moving.on_device:
            entries = self.entries(context_cells, chunk_tokens, num_slots)
            return {memory: phase_totals(entries, (memory,)) for memory in Memory}
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
        if not self.request.moving.on_device or most is None:
            return most
        # cells that no slot can pay for need pages from the start, and a loan leaves the core what it must have

        def fits(num_slots: int) -> bool:
            return self.shortfall(context_cells, chunk_tokens, num_slots) is None

        return most if fits(most) else layout.largest_where(fits, 0, most)

    def _cells(self, context_cells: int) -> Cells:
        return Cells(self.num_cells(context_cells), self.cells_per_page, self.cell_bytes)

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
        moving, longest = self.request.moving, self.most_pages
        if not moving.lend:
            return [0] * len(buckets)
        most = self._most_lent(num_slots, context_cells)
        head = self.sizes.head_bytes if moving.head_alias else 0
        loans: list[int] = []
        for bucket in buckets:
            need = sum(e.peak_bytes for e in self.prompt_entries(context_cells, bucket)) - base_bytes - head
            loans.append(max([self._fewest_slots(num_slots, need, most), *loans[-1:]]))
        # a segment is at least as long as an expert, and a smaller loan than that becomes the next larger one
        for idx, loan in enumerate(loans):
            below = loans[idx - 1] if idx else 0
            if loan <= below:
                continue
            border = self._last_slots_bytes(num_slots, below) + longest * self.page_bytes
            least = self._fewest_slots(num_slots, border, most)
            if self._last_slots_bytes(num_slots, least) < border:
                least = 0
            loans[idx] = max(loan, least) if least else below
        return loans

    def _most_lent(self, num_slots: int, context_cells: int) -> int:
        """Return how many slots can be lent: the core keeps the floor and one expert of every block."""
        keep = max(self.request.moving.floor_slots, len(self.pages))
        return max(0, num_slots - keep)

    def _fewest_slots(self, num_slots: int, num_bytes: int, most: int) -> int:
        """Return how few of the last slots have so many bytes, `most` if none do."""
        if num_bytes <= 0 or most <= 0:
            return 0
        short = layout.largest_where(lambda n: self._last_slots_bytes(num_slots, n) < num_bytes, 0, most)
        return min(most, (short or 0) + 1)

    def _last_slots_bytes(self, num_slots: int, count: int) -> int:
        pages = layout.slot_pages(num_slots, self.pages) - layout.slot_pages(num_slots - count, self.pages)
        return pages * self.page_bytes

    def _unpaid_cells(self, context_cells: int, core_slots: int) -> int:
        """Return the cells that need pages from the start: those of the whole window that core slots cannot pay for.

        The floor's slots never pay; counted as if the largest ones stayed.
        """
        moving = self.request.moving
        if moving.grow_init_cells is None:
            return self.num_cells(context_cells)
        rounds, rest = divmod(max(0, core_slots), len(self.pages))
        sizes = sorted((pages, rounds + (block < rest)) for block, pages in enumerate(self.pages))
        paying, payable = max(0, core_slots - moving.floor_slots), 0
        for pages, count in sizes:
            payable += min(count, paying) * pages
            paying -= min(count, paying)
        layers = max(1, len(self.sizes.attention_layers(self.with_draft)))
        groups = self.kv_pages_per_layer(context_cells) - payable // layers
        return min(self.num_cells(context_cells), max(0, groups) * self.cells_per_page)


def _but_not(phase: Phase, owner: Owner, item: str, num_bytes: int, rule: str) -> Entry:
    """Return an entry that takes the same bytes in every phase but one."""
    start, prefill, decode, park = (0 if each is phase else num_bytes for each in PHASES)
    return Entry(owner, item, (start, prefill, decode, park), Memory.DEVICE, Origin.COMPUTED, rule)


@lru_cache(maxsize=4096)
def _context_entries(
    sizes: ModelSizes, with_draft: bool, cells: int, mapped_cells: int, page_bytes: int, cells_per_page: int,
    cell_bytes: int,
) -> tuple[Entry, ...]:  # fmt: skip
    """Return K/V pages of the mapped cells and index keys of all. Cached: searches ask for the same again and again."""
    g, layers, trunk = sizes.geometry, sizes.attention_layers(with_draft), len(sizes.trunk_attention)
    pages = layout.kv_pages_per_layer(mapped_cells, cells_per_page)
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
        sizes, with_draft, cells.context_cells, cells.context_cells, page_bytes, cells.cells_per_page, cells.cell_bytes
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
    fixed = (*_reserve_entries(request), *_model_entries(sizes, with_draft, request.moving))
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
def _model_entries(sizes: ModelSizes, with_draft: bool, moving: MovingMemory) -> tuple[Entry, ...]:
    """Return weights, states, the bank and what parking takes. Cached: they are the same for many requests."""
    g, entries = sizes.geometry, []
    stored = "as stored; vectors and convolution kernels as float32"
    entries.append(always(Owner.DENSE, "trunk", sizes.dense_bytes, stored))
    entries.append(always(Owner.EMBEDDING, "rows", sizes.embedding_bytes, "token_embd as stored"))
    head = "output as stored" if sizes.head_bytes else "0: the head uses the embedding"
    if moving.head_alias:
        rule = f"{head}; unloaded while a prompt is read"
        entries.append(_but_not(Phase.PREFILL, Owner.HEAD, "rows", sizes.head_bytes, rule))
        entries.append(always(Owner.BANK, "head", sizes.head_bytes, "copy to load it from", memory=Memory.HOST))
    else:
        entries.append(always(Owner.HEAD, "rows", sizes.head_bytes, head))
    if moving.conversation_bytes:
        rule = "conversation.budget_mib"
        entries.append(
            always(Owner.CONVERSATIONS, "parked", moving.conversation_bytes, rule, Memory.HOST, Origin.GIVEN)
        )
    if moving.checkpoints:
        each = _checkpoint_bytes(sizes, with_draft)
        rule = f"{moving.checkpoints} states x {each:,} B"
        entries.append(always(Owner.CHECKPOINTS, "live", moving.checkpoints * each, rule, memory=Memory.HOST))
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


def _checkpoint_bytes(sizes: ModelSizes, with_draft: bool) -> int:
    """Return the bytes of a stored state: all of a sequence but its cells and the keys of complete index blocks."""
    g = sizes.geometry
    tails = sum(count * index_tail_bytes(g, ratio) for ratio, count in sizes.sparse_ratios(with_draft))
    hidden = g.num_streams * g.embed_width * F32_BYTES
    return len(g.recurrent_layers) * gdn_state_bytes(g) + ple_state_bytes(g) + tails + hidden
