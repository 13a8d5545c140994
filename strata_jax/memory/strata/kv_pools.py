"""Bytes of a session's K/V and state: cells by type, pools of mapped chunks, streamed K/V, checkpoints and images.

Only attention layers have cells (planning notes 1.3); recurrent layers keep a state of a fixed size (1.4). An elastic
K/V maps every pool, one for K and one for V of each attention layer, in whole chunks of the device's granularity (6.3).
"""

from __future__ import annotations

from collections.abc import Mapping

from strata_jax.errors import ConfigError
from strata_jax.kv_types import Q4_BLOCK, cell_bytes
from strata_jax.memory.layout import align_up
from strata_jax.memory.strata.request import MIB, MIN_RESIDENT_CELLS
from strata_jax.memory.strata.sizes import PackSizes

F32_BYTES = 4
PAGE_ENTRY_BYTES = 4
SPARE_INDEX_ROWS = 2
SESSION_ALIGN, SESSION_SLACK_BYTES = 256, 4_096
DRAFT_WINDOW_CELLS = 32_768
DRAFT_WINDOW_SPARE_CELLS = 64
_BLOCK_TYPES = ("int8", "k8v4", "q4_0")


def kv_side_bytes(sizes: PackSizes, kv_type: str) -> tuple[int, int]:
    """Return the bytes of K and of V in one cell of one attention layer.

    Raises:
        ConfigError: unknown type, or heads that a block type cannot hold: they are not padded.
    """
    if kv_type in _BLOCK_TYPES and sizes.head_dim % Q4_BLOCK:
        raise ConfigError(
            f"kv.type={kv_type} stores blocks of {Q4_BLOCK} values within a head: a head of {sizes.head_dim} values is"
            f" no multiple of {Q4_BLOCK} and heads are not padded; kv.type=f16, bf16 or f32 would work"
        )
    return cell_bytes(kv_type, sizes.num_kv_heads, sizes.head_dim)


def kv_cell_bytes(sizes: PackSizes, kv_type: str) -> int:
    """Return the bytes of K and V in one cell of one attention layer (planning notes 1.3)."""
    return sum(kv_side_bytes(sizes, kv_type))


def drafter_kv_type(kv_type: str) -> str:
    """Return the type of the draft block's K/V: a mixed type keeps int8 there (planning notes 1.3)."""
    return "int8" if kv_type == "k8v4" else kv_type


def kv_token_bytes(sizes: PackSizes, kv_type: str, *, with_drafter: bool) -> int:
    """Return the bytes of one cell over all attention layers; layers without attention have none."""
    trunk = sizes.num_attention_layers * kv_cell_bytes(sizes, kv_type)
    return trunk + (kv_cell_bytes(sizes, drafter_kv_type(kv_type)) if with_drafter else 0)


def pool_cell_bytes(sizes: PackSizes, kv_type: str, *, with_drafter: bool) -> tuple[int, ...]:
    """Return the bytes per cell of every pool: K and V of each attention layer, the draft block's last."""
    pools = kv_side_bytes(sizes, kv_type) * sizes.num_attention_layers
    return pools + (kv_side_bytes(sizes, drafter_kv_type(kv_type)) if with_drafter else ())


def pool_chunks(
    sizes: PackSizes, kv_type: str, cells: int, chunk_bytes: int = 2 * MIB, with_drafter: bool = True
) -> int:
    """Return the chunks that map `cells` cells of every pool, each pool in whole chunks (planning notes 6.3).

    Raises:
        ConfigError: negative cells, or a chunk of no bytes.
    """
    if cells < 0 or chunk_bytes < 1:
        raise ConfigError(f"K/V is mapped in cells (got {cells}) and chunks of at least a byte (got {chunk_bytes})")
    trunk = sizes.num_attention_layers * _chunks(kv_side_bytes(sizes, kv_type), cells, chunk_bytes)
    drafter = _chunks(kv_side_bytes(sizes, drafter_kv_type(kv_type)), cells, chunk_bytes) if with_drafter else 0
    return trunk + drafter


def kv_mapped_bytes(
    sizes: PackSizes, kv_type: str, cells: int, chunk_bytes: int = 2 * MIB, with_drafter: bool = True
) -> int:
    """Return the device memory of an elastic K/V with `cells` cells mapped."""
    return pool_chunks(sizes, kv_type, cells, chunk_bytes, with_drafter) * chunk_bytes


def kv_resident_bytes(sizes: PackSizes, kv_type: str, resident_cells: int) -> int:
    """Return the device memory of a streamed K/V: whole pages of `resident_cells` cells in every layer of the trunk.

    Raises:
        ConfigError: fewer cells than a selection for a full verify window needs.
    """
    if resident_cells < MIN_RESIDENT_CELLS:
        raise ConfigError(
            f"kv.resident_cells={resident_cells}: a streamed K/V needs at least {MIN_RESIDENT_CELLS} of them"
        )
    cells = align_up(resident_cells, sizes.index_block)
    return sizes.num_attention_layers * cells * kv_cell_bytes(sizes, kv_type)


def kv_pinned_bytes(sizes: PackSizes, kv_type: str, cells: int) -> int:
    """Return the pinned RAM of a streamed K/V: all cells of the trunk's layers (planning notes 1.5)."""
    return sizes.num_attention_layers * cells * kv_cell_bytes(sizes, kv_type)


def draft_ring_cells(cells: int, window_rows: int) -> int:
    """Return the cells of the draft block beside a streamed K/V: a window that slides (planning notes 1.5, mode 2)."""
    return min(cells, DRAFT_WINDOW_CELLS + 4 * window_rows + DRAFT_WINDOW_SPARE_CELLS)


def index_key_bytes(sizes: PackSizes, cells: int, *, drafter_rows: int | None = None) -> int:
    """Return the pooled index keys of all attention layers, float32 (planning notes 1.3).

    drafter_rows: rows of the draft block: None as many as a layer of the trunk, 0 without a draft block.
    """
    rows = _index_rows(sizes, cells)
    all_rows = sizes.num_attention_layers * rows + (rows if drafter_rows is None else drafter_rows)
    return all_rows * sizes.index_dim * F32_BYTES


def rope_bytes(sizes: PackSizes, cells: int) -> int:
    """Return sines and cosines of every position, held once."""
    return cells * sizes.rope_dim * F32_BYTES


def page_table_bytes(sizes: PackSizes, cells: int, *, with_drafter: bool) -> int:
    """Return the page tables: one entry per page of every attention layer."""
    return (sizes.num_attention_layers + with_drafter) * -(-cells // sizes.index_block) * PAGE_ENTRY_BYTES


def session_bytes(
    sizes: PackSizes,
    cells: int,
    kv_type: str,
    *,
    mapped_cells: int | None = None,
    resident_cells: int = 0,
    with_drafter: bool = True,
    window_rows: int = 6,
    chunk_bytes: int = 2 * MIB,
) -> Mapping[str, int]:
    """Return the device memory of one sequence of up to `cells` cells, by item (planning notes 1.5).

    Args:
        mapped_cells: cells mapped now, when the K/V is elastic; everything else is sized for the whole window.
        resident_cells: cells on the device when the K/V is streamed from RAM; 0: all.
        window_rows: rows of a verify window, which the draft block's window of a streamed K/V must outlast.

    Raises:
        ConfigError: both elastic and streamed, or a type of K/V that the heads cannot be stored in.
    """
    if mapped_cells is not None and resident_cells:
        raise ConfigError(
            f"kv.grow maps {mapped_cells} cells and kv.resident_cells={resident_cells} streams the K/V: only one of"
            " both can be on"
        )
    streamed = resident_cells > 0
    draft_cells = draft_ring_cells(cells, window_rows) if streamed else cells
    if mapped_cells is not None:
        kv = kv_mapped_bytes(sizes, kv_type, mapped_cells, chunk_bytes, with_drafter)
    else:
        trunk = (
            kv_resident_bytes(sizes, kv_type, resident_cells) if streamed else kv_pinned_bytes(sizes, kv_type, cells)
        )
        kv = trunk + (draft_cells * kv_cell_bytes(sizes, drafter_kv_type(kv_type)) if with_drafter else 0)
    draft_rows = None if with_drafter and not streamed else SPARE_INDEX_ROWS * with_drafter
    items = {
        "K/V": kv,
        "index keys": index_key_bytes(sizes, cells, drafter_rows=draft_rows),
        "rotary table": rope_bytes(sizes, cells),
        "page tables": page_table_bytes(sizes, cells, with_drafter=with_drafter),
        "recurrent state": sizes.recurrent_state_bytes,
        "n-gram history": sizes.ple_history_bytes,
        "buffers of a row": row_buffer_bytes(sizes, cells) + SESSION_SLACK_BYTES,
    }
    return {name: align_up(num_bytes, SESSION_ALIGN) for name, num_bytes in items.items()}


def row_buffer_bytes(sizes: PackSizes, cells: int) -> int:
    """Return the buffers one row is computed in: the widths of planning notes 2.4 for a single token, float32.

    They are about 1 MiB and the scores of every cell. The original's own sum is not published.
    """
    s = sizes
    gdn = 2 * (s.gdn_channels + s.gdn_value_width) + 4 * s.gdn_value_heads
    attention = 4 * s.query_width + 2 * s.kv_width + (s.index_heads + 1) * s.index_dim
    experts = s.num_experts + s.num_experts_used * (3 * s.expert_width + s.embed_width)
    return (3 * s.residual_width + 4 * s.embed_width + gdn + attention + experts + cells) * F32_BYTES


def checkpoint_bytes(sizes: PackSizes) -> int:
    """Return one checkpoint: recurrent state, incomplete index blocks, n-gram history; no cells (notes 1.4)."""
    tails = sizes.num_attention_layers * (sizes.index_block - 1) * sizes.index_dim * F32_BYTES
    return sizes.recurrent_state_bytes + tails + sizes.ple_history_bytes


def conversation_image_bytes(
    sizes: PackSizes, kv_type: str, tokens: int, checkpoints: int = 0, *, with_drafter: bool = True
) -> int:
    """Return the RAM of a parked conversation: its state, checkpoints, used cells and index keys (planning notes 2.9).

    Raises:
        ConfigError: negative tokens or checkpoints.
    """
    if tokens < 0 or checkpoints < 0:
        raise ConfigError(f"a conversation has no negative tokens ({tokens}) or checkpoints ({checkpoints})")
    cells = align_up(tokens, sizes.index_block)
    keys = sizes.num_attention_layers * (cells // sizes.index_block) * sizes.index_dim * F32_BYTES
    cells_bytes = cells * kv_token_bytes(sizes, kv_type, with_drafter=with_drafter)
    return (1 + checkpoints) * checkpoint_bytes(sizes) + cells_bytes + keys


def _index_rows(sizes: PackSizes, cells: int) -> int:
    return cells // sizes.index_block + SPARE_INDEX_ROWS


def _chunks(side_bytes: tuple[int, int], cells: int, chunk_bytes: int) -> int:
    return sum(-(-cells * b // chunk_bytes) for b in side_bytes)
