"""The ledger of a Strata plan: who takes what, in the order of allocation, with the rule behind every number.

Sections in the rules are those of the planning notes.
"""

from __future__ import annotations

from strata_jax.memory.ledger import MIB, Entry, Memory, Origin, Owner, always
from strata_jax.memory.strata import kv_pools
from strata_jax.memory.strata.cache import F32_BYTES, CacheSize, Prices, is_auto
from strata_jax.memory.strata.ram import RamPlan, row_cache_bytes
from strata_jax.memory.strata.request import Card, ExpertTier, StrataRequest
from strata_jax.memory.strata.result import Layout, PromptPath
from strata_jax.memory.strata.sizes import PackSizes

HOST_PAGE_BYTES = 4_096
MROPE_SPARE_CELLS, MROPE_CELL_BYTES = 64, 12

_SESSION: dict[str, tuple[Owner, str]] = {
    "K/V": (Owner.KV, "cells x bytes of a cell x attention layers (1.3)"),
    "index keys": (Owner.INDEX_KEYS, "pooled float32 keys, 128 B a cell and layer at the published width (1.3)"),
    "rotary table": (Owner.TABLES, "sines and cosines of every cell, once (1.3)"),
    "page tables": (Owner.TABLES, "4 B a page and layer (1.3)"),
    "recurrent state": (Owner.RECURRENT_STATE, "state and convolution tail of every recurrent layer (1.4)"),
    "n-gram history": (Owner.RECURRENT_STATE, "inputs of the n-gram convolution (1.4)"),
    "buffers of a row": (Owner.DECODE_BUFFERS, "widths of one row (1.5, 2.4)"),
}


def session(sizes: PackSizes, card: Card, request: StrataRequest, mapped_cells: int) -> dict[str, int]:
    """Return the device memory of the sequence by item; fewer `mapped_cells` than the context: it grows."""
    grows = mapped_cells < request.context_cells
    return dict(
        kv_pools.session_bytes(
            sizes,
            request.context_cells,
            request.kv_type,
            mapped_cells=mapped_cells if grows else None,
            resident_cells=request.resident_cells if request.kv_streamed else 0,
            with_drafter=request.mtp,
            window_rows=request.window_rows,
            chunk_bytes=card.vmm_chunk_bytes,
        )
    )


def kv_bytes(sizes: PackSizes, card: Card, request: StrataRequest, mapped_cells: int) -> tuple[int, int]:
    """Return the device bytes of the K/V at the start and with the whole window mapped."""
    start = session(sizes, card, request, mapped_cells)["K/V"]
    if mapped_cells == request.context_cells:
        return start, start
    whole = kv_pools.kv_mapped_bytes(
        sizes, request.kv_type, request.context_cells, card.vmm_chunk_bytes, with_drafter=request.mtp
    )
    return start, whole


def before_cache(sizes: PackSizes, card: Card, request: StrataRequest, mapped_cells: int) -> tuple[Entry, ...]:
    """Return the device memory that is taken before the expert cache, whatever it costs, in its order (2.1).

    With the head lent, it is not there at the start nor while a prompt is read (6.2).
    """
    s, r = sizes, request
    system = f"{card.name}: other programs, driver, context and modules"
    entries = [
        always(Owner.SYSTEM, "taken before the start", card.taken_bytes, system, origin=Origin.GIVEN),
        always(Owner.DENSE, "dense weights", s.dense_bytes, "weights besides experts, head and draft block (1.8)"),
    ]
    pinned = _pinned_before(s, card, r)
    if card.pinned_entry_bytes and pinned:
        entries.append(_page_tables(Owner.SYSTEM, "page tables of pinned RAM", card, pinned))
    if r.vision:
        table = (r.context_cells + MROPE_SPARE_CELLS) * MROPE_CELL_BYTES
        entries.append(always(Owner.TABLES, "image positions", table, "12 B for each cell and 64 more (1.8)"))
    partial = s.num_experts_used * s.embed_width * F32_BYTES
    entries.append(always(Owner.DECODE_BUFFERS, "partial sums", partial, "experts a token x width, float32 (2.1)"))
    for item, num_bytes in session(s, card, r, mapped_cells).items():
        owner, rule = _SESSION[item]
        if owner is Owner.KV:
            rule = _kv_rule(card, r, mapped_cells)
        entries.append(always(owner, item, num_bytes, rule))
    if r.mtp:
        entries.append(always(Owner.DRAFTER, "draft block", s.drafter_bytes, "experts, dense part, buffers (1.6)"))
    logits = s.vocab_size * F32_BYTES
    if r.head_alias:
        phases = (0, 0, s.head_bytes, s.head_bytes)
        rule = "rows x bytes of a row; unloaded at the start, loaded for decoding (1.6, 6.2)"
        entries.append(Entry(Owner.HEAD, "output head", phases, Memory.DEVICE, Origin.COMPUTED, rule))
    else:
        entries.append(always(Owner.HEAD, "output head", s.head_bytes, "rows x bytes of a row (1.6)"))
    entries.append(always(Owner.DECODE_BUFFERS, "logits", logits, "vocabulary, float32 (1.6)"))
    return tuple(entries)


def after_cache(
    sizes: PackSizes, card: Card, request: StrataRequest, cache: CacheSize, path: PromptPath, ram: RamPlan
) -> tuple[Entry, ...]:
    """Return the expert cache and what is allocated after it (2.1 steps 13 to 16)."""
    r = request
    kind = "uniform slots" if cache.uniform else "slots of their experts' sizes"
    rule = f"{cache.slots:,} {kind} in {cache.budget_bytes:,} B (2.2)"
    full, lent = cache.bytes, path.lent_bytes
    origin = Origin.COMPUTED if is_auto(r) else Origin.GIVEN
    entries = [Entry(Owner.EXPERT_SLOTS, "slots", (full, full - lent, full, full), Memory.DEVICE, origin, rule)]
    if lent:
        said = f"the last {path.lent_slots:,} slots while a prompt is read (2.6, 2.7)"
        entries.append(_while_reading("borrowed slots", lent, said))
    if path.own_bytes:
        said = f"{path.chunk_tokens:,} tokens, ring of {path.ring_slots:,} (2.4)"
        if path.layout is Layout.HYBRID:
            entries.append(_while_reading("own part", path.own_bytes, f"{said}; freed after the prompt (6.2)"))
        else:
            entries.append(always(Owner.PROMPT_BUFFERS, "own buffers", path.own_bytes, said))
    if r.mtp:
        rows = r.draft_vocab * (sizes.head_row_bytes + F32_BYTES)
        said = f"{r.draft_vocab:,} rows of {sizes.head_row_bytes + F32_BYTES:,} B (1.6)"
        entries.append(always(Owner.DRAFT_BIND, "rows of the head", rows, said))
    logits = r.window_rows * sizes.vocab_size * F32_BYTES
    said = f"{r.window_rows} rows x vocabulary, float32 (1.6)"
    entries.append(always(Owner.DECODE_BUFFERS, "logits of a window", logits, said))
    if card.late_bytes:
        said = f"{card.name}: measured, no rule of the original reserves it"
        entries.append(always(Owner.LATE, "graphs, scratch and driver", card.late_bytes, said, origin=Origin.GIVEN))
    if card.pinned_entry_bytes and ram.resident_bytes:
        entries.append(_page_tables(Owner.LATE, "page tables of copies in RAM", card, ram.resident_bytes))
    if card.touch_bytes:
        said = f"{card.name}: found missing once the slots were written (2.3)"
        entries.append(always(Owner.SYSTEM, "taken on first touch", card.touch_bytes, said, origin=Origin.GIVEN))
    return tuple(entries)


def kept_out(request: StrataRequest, cache: CacheSize, prices: Prices, bind_bytes: int) -> tuple[Entry, ...]:
    """Return what the cache may not take: the reserve and the prices of what comes later (2.2)."""
    origin = Origin.GIVEN if request.reserve_given else Origin.DEFAULT
    reserve = cache.reserve_mib * MIB
    entries = [
        always(Owner.RESERVE, "reserve", reserve, "left free for the desktop (2.2)", origin=origin),
        always(Owner.DRAFT_BIND, "rows of the head, logits of a window", bind_bytes, "reserved for (1.6)"),
    ]
    if prices.prompt_bytes:
        entries.append(always(Owner.PROMPT_BUFFERS, "own buffers", prices.prompt_bytes, "their price (2.2)"))
    return tuple(entries)


def host_before_copies(sizes: PackSizes, request: StrataRequest) -> tuple[Entry, ...]:
    """Return the host memory that is taken before the experts: streamed K/V and the cache of n-gram rows."""
    entries = []
    if request.kv_streamed:
        num_bytes = kv_pools.kv_pinned_bytes(sizes, request.kv_type, request.context_cells)
        rule = f"{request.context_cells:,} cells of every attention layer of the trunk, pinned (1.5)"
        entries.append(always(Owner.KV, "streamed K/V", num_bytes, rule, Memory.HOST))
    rows = row_cache_bytes(sizes)
    if rows:
        entries.append(always(Owner.TABLES, "cache of n-gram rows", rows, "1,048,576 rows (1.7)", Memory.HOST))
    return tuple(entries)


def host_copies(sizes: PackSizes, request: StrataRequest, ram: RamPlan) -> tuple[Entry, ...]:
    """Return experts in RAM, checkpoints and what parked conversations may take (2.8, 2.9)."""
    entries = []
    if ram.arena_bytes:
        rule = f"{sizes.num_ranks:,} experts, pinned (2.8)"
        entries.append(always(Owner.BANK, "arena of all experts", ram.arena_bytes, rule, Memory.HOST))
    if ram.resident_bytes:
        rule = f"{ram.resident_experts:,} experts without a slot and those of slots from {ram.copies_from_slot:,} (2.8)"
        entries.append(always(Owner.RESIDENT_COPIES, "copies", ram.resident_bytes, rule, Memory.HOST))
    kept = request.checkpoints * kv_pools.checkpoint_bytes(sizes)
    if kept:
        rule = f"{request.checkpoints} snapshots of the recurrent state (1.4)"
        entries.append(Entry(Owner.CHECKPOINTS, "live", (0, kept, kept, kept), Memory.HOST, Origin.COMPUTED, rule))
    if ram.conversation_bytes:
        phases = (0, 0, 0, ram.conversation_bytes)
        rule = f"{request.conversation_mib:,} MiB, what is left above the minimum free at most (2.9)"
        entries.append(Entry(Owner.CONVERSATIONS, "parked", phases, Memory.HOST, Origin.GIVEN, rule))
    return tuple(entries)


def _pinned_before(sizes: PackSizes, card: Card, r: StrataRequest) -> int:
    """Return the RAM registered with the device before the cache is sized: the arena and a streamed K/V."""
    arena = int(sizes.total_expert_bytes * card.pinned_share) if r.tier is ExpertTier.ARENA else 0
    kv = kv_pools.kv_pinned_bytes(sizes, r.kv_type, r.context_cells) if r.kv_streamed else 0
    return arena + kv


def _page_tables(owner: Owner, item: str, card: Card, pinned_bytes: int) -> Entry:
    pages = -(-pinned_bytes // HOST_PAGE_BYTES)
    rule = f"{pages:,} pages of {HOST_PAGE_BYTES:,} B x {card.pinned_entry_bytes} B, inferred for {card.name}"
    return always(owner, item, pages * card.pinned_entry_bytes, rule)


def _while_reading(item: str, num_bytes: int, rule: str) -> Entry:
    return Entry(Owner.PROMPT_BUFFERS, item, (0, num_bytes, 0, 0), Memory.DEVICE, Origin.COMPUTED, rule)


def _kv_rule(card: Card, r: StrataRequest, mapped_cells: int) -> str:
    if mapped_cells < r.context_cells:
        return (
            f"{mapped_cells:,} of {r.context_cells:,} cells at the start, every pool in whole chunks of"
            f" {card.vmm_chunk_bytes:,} B; growth takes expert slots (6.3)"
        )
    if r.kv_streamed:
        return f"{r.resident_cells:,} of {r.context_cells:,} cells of the trunk, the draft block's window (1.5)"
    return f"{r.context_cells:,} cells at {r.kv_type} (1.3)"
