"""Arithmetic of the paged arena: experts in slots, K/V cells in pages, prompt chunks in buckets.

The arena is ``u32[num_pages, page_words]``. Slots come first, each a run of consecutive pages (`slot_order.py` says in
which order experts get them); K/V pages follow. A K/V page holds the keys of all its cells,
then their values. All functions are pure; sizes are integer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

WORD_BYTES = 4
KIB = 2**10
MIN_PAGE_BYTES = KIB
MAX_AUTO_PAGE_BYTES = 64 * KIB
MAX_SLOT_WASTE_FRAC = 0.03
SMALL_BUCKET_TOKENS = 8
GDN_CHUNK_TOKENS = 64  # longer prompt programs take whole multiples of it
MATRIX_TILE_WEIGHTS = 16 * 2**20  # a larger matrix is decoded and multiplied in tiles (64 MiB of float32 at a time)
GATHER_TILE_VALUES = 16 * 2**20  # keys (or values) that one tile of tokens gathers (64 MiB of float32)
MAX_EXPERT_TILE_ROWS = 128
MAX_GROUP_ROWS = 128  # most rows of a tile of the grouped kernels (`kernels/grouped_matmul/blocks.py`)
MAX_WINDOW_TOKENS = 8
STAGE_BYTES = 8 * 2**20  # most device memory of one block of rows on its way to or from the host
STAGE_SHARE = 16  # a block is at most this part of its array


def align_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def align_down(value: int, multiple: int) -> int:
    """Round down to a multiple."""
    return value // multiple * multiple


def largest_where(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest value in ``low .. high`` that fits, all smaller ones fitting too; None if ``low`` does not."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


# Expert slots


def blob_bytes(part_bytes: Sequence[int]) -> int:
    """Return the bytes of one expert's blob: its packed matrices end to end, each padded to whole words."""
    return sum(align_up(part, WORD_BYTES) for part in part_bytes)


def pages_per_expert(num_bytes: int, page_bytes: int) -> int:
    """Return the pages of a slot that holds a blob of `num_bytes`."""
    return -(-num_bytes // page_bytes)


def slot_waste_frac(blobs: Sequence[int], page_bytes: int) -> float:
    """Return the share of slot bytes that pad the last page, over one slot of every block."""
    used = sum(blobs)
    taken = sum(pages_per_expert(blob, page_bytes) for blob in blobs) * page_bytes
    return 1 - used / taken if taken else 0.0


# K/V cells


def cell_block(compress_ratios: Sequence[int]) -> int:
    """Return the cells that must lie in one page: a common multiple of the layers' block sizes, 1 if all are dense."""
    return lcm(*(ratio for ratio in compress_ratios if ratio > 0))


def cells_per_page(page_bytes: int, cell_bytes: int, block_cells: int) -> int:
    """Return the K/V cells of a page: whole cells, rounded down to whole blocks. 0 if not one block fits."""
    return align_down(page_bytes // cell_bytes, block_cells)


def kv_pages_per_layer(context_cells: int, page_cells: int) -> int:
    """Return the pages that one attention layer needs for a context."""
    return -(-context_cells // page_cells)


def cells_in_pages(num_pages: int, page_cells: int) -> int:
    """Return the cells of one layer in `num_pages` pages: the inverse of `kv_pages_per_layer`."""
    return num_pages * page_cells


def key_word_offset(page: int, cell: int, page_bytes: int, page_cells: int, k_bytes: int) -> int:
    """Return the arena word at which the keys of a cell lie; `page` is where its group of cells is mapped to."""
    return (page * page_bytes + cell % page_cells * k_bytes) // WORD_BYTES


def value_word_offset(page: int, cell: int, page_bytes: int, page_cells: int, k_bytes: int, v_bytes: int) -> int:
    """Return the arena word at which the values of a cell lie, behind the keys of the whole page."""
    return (page * page_bytes + page_cells * k_bytes + cell % page_cells * v_bytes) // WORD_BYTES


def kv_bytes_per_token(num_attention_layers: int, cell_bytes: int) -> int:
    """Return K/V bytes of one token: recurrent layers have none."""
    return num_attention_layers * cell_bytes


# Pages


def choose_page_bytes(blobs: Sequence[int], cell_bytes: int, block_cells: int) -> int:
    """Return the page size for experts of these blob sizes (one per block) and K/V cells of `cell_bytes`.

    The largest power of two from 1 to 64 KiB that holds one block of cells and wastes less than 3 % of the slots. Where
    none does, the one that wastes least. Where 64 KiB is too small for one block of cells, the smallest that is not.
    """
    sizes = [MIN_PAGE_BYTES << i for i in range((MAX_AUTO_PAGE_BYTES // MIN_PAGE_BYTES).bit_length())]
    sizes = [size for size in sizes if cells_per_page(size, cell_bytes, block_cells) > 0]
    if not sizes:
        return 1 << (block_cells * cell_bytes - 1).bit_length()
    waste = {size: slot_waste_frac(blobs, size) for size in sizes}
    low_waste = [size for size in sizes if waste[size] < MAX_SLOT_WASTE_FRAC]
    return max(low_waste) if low_waste else min(sizes, key=lambda size: (waste[size], -size))


# Prompt chunks


def expert_tile_rows(num_tokens: int, num_experts_used: int, num_experts: int) -> int:
    """Return the rows of a tile in which a prompt applies one expert: near twice its mean load, from 16 to 128."""
    mean = 2 * num_tokens * num_experts_used // num_experts
    return min(MAX_EXPERT_TILE_ROWS, max(16, 2 ** mean.bit_length() // 2))


def padded_chunk(chunk_tokens: int) -> int:
    """Return the rows of the program that reads a full chunk: above 64 tokens, a multiple of 64."""
    return chunk_tokens if chunk_tokens <= GDN_CHUNK_TOKENS else align_up(chunk_tokens, GDN_CHUNK_TOKENS)


def prefill_buckets(chunk_tokens: int, *, kernels: bool = False) -> tuple[int, ...]:
    """Return the row counts of the prompt programs: a part of a prompt is padded to the smallest that holds it.

    Args:
        kernels: programs are made of kernels; those for windows, of up to 8 rows, take longest to compile.
    """
    smallest = 2 * MAX_WINDOW_TOKENS if kernels else SMALL_BUCKET_TOKENS
    small = {size for size in (smallest, GDN_CHUNK_TOKENS) if size < chunk_tokens}
    return tuple(sorted(small | {padded_chunk(chunk_tokens)}))


# Copies of rows


def stage_rows(num_rows: int, row_bytes: int, most_bytes: int = STAGE_BYTES) -> int:
    """Return the rows of an array that are copied to or from the host at a time: at most a 16th of them, if not one."""
    return max(1, min(num_rows // STAGE_SHARE, most_bytes // row_bytes))


def staging_bytes(num_rows: int, row_bytes: int) -> int:
    """Return the device memory of the two blocks that are under way while an array's rows are copied."""
    return 2 * min(num_rows, stage_rows(num_rows, row_bytes)) * row_bytes
