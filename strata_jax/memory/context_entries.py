"""The ledger's entries that grow with context and chunk: K/V pages, index keys, temporaries of the programs."""

from __future__ import annotations

from functools import lru_cache

from strata_jax.memory import layout
from strata_jax.memory.buffers import Cells, decode_buffers, prompt_buffers
from strata_jax.memory.ledger import Entry, Memory, Owner, always, phase_totals
from strata_jax.memory.sizes import ModelSizes, index_key_bytes


@lru_cache(maxsize=4096)
def cell_entries(
    sizes: ModelSizes, with_draft: bool, cells: int, mapped_cells: int, page_bytes: int, cells_per_page: int,
    cell_bytes: int, in_host: bool = False,
) -> tuple[Entry, ...]:  # fmt: skip
    """Return K/V pages of the mapped cells and index keys of all. Cached: searches ask for the same again and again.

    in_host: every cell has a place in host memory, too.
    """
    g, layers, trunk = sizes.geometry, sizes.attention_layers(with_draft), len(sizes.trunk_attention)
    pages = layout.kv_pages_per_layer(mapped_cells, cells_per_page)
    rule = f"x {pages:,} pages x {page_bytes:,} B; {cells_per_page:,} cells of {cell_bytes:,} B a page"
    entries = [always(Owner.KV, "trunk", trunk * pages * page_bytes, f"{trunk} attention layers {rule}")]
    if len(layers) > trunk:
        entries.append(always(Owner.KV, "draft block", pages * page_bytes, f"1 attention layer {rule}"))
    if in_host:
        every = len(layers) * layout.kv_pages_per_layer(cells, cells_per_page)
        rule = f"{every:,} pages x {page_bytes:,} B: all cells of {len(layers)} attention layers"
        entries.append(always(Owner.KV, "all cells", every * page_bytes, rule, memory=Memory.HOST))
    for ratio, count in sizes.sparse_ratios(with_draft):
        keys = count * index_key_bytes(g, ratio, cells)
        rule = f"{count} sparse layers x ({cells:,} cells / {ratio} + 1) x {g.index_dim} x 4 B"
        entries.append(always(Owner.INDEX_KEYS, f"blocks of {ratio}", keys, rule))
    return tuple(entries)


def buffer_entries(
    sizes: ModelSizes, with_draft: bool, cells: Cells, chunk_tokens: int, window_tokens: int, all_logits: bool
) -> tuple[Entry, ...]:
    """Return the temporaries of prompt and decode programs."""
    prompt = prompt_buffers(sizes, chunk_tokens, cells, with_draft=with_draft, all_logits=all_logits)
    return prompt + decode_buffers(sizes, window_tokens, cells, with_draft=with_draft)


@lru_cache(maxsize=4096)
def grown_bytes(
    sizes: ModelSizes, with_draft: bool, page_bytes: int, cells: Cells, chunk_tokens: int, window_tokens: int,
    all_logits: bool,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return the bytes of each phase that context and chunk take together."""
    context = cell_entries(
        sizes, with_draft, cells.context_cells, cells.context_cells, page_bytes, cells.cells_per_page, cells.cell_bytes
    )
    buffers = buffer_entries(sizes, with_draft, cells, chunk_tokens, window_tokens, all_logits)
    return phase_totals((*context, *buffers))
