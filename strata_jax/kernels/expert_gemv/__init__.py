"""Routed experts of a decode window: T <= 8 tokens, K experts each, packed weights read where they lie.

An expert's words come from the arena if it is resident and otherwise straight from the bank in host memory, inside the
kernel; the arithmetic is the same. Not here: routing, the shared expert, prompts (`kernels/grouped_matmul`).
Source of the formula: qwen4exp (`ffn_*`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.expert_gemv import reference
from strata_jax.kernels.expert_gemv.blocks import Blocks, LaunchBlocks, blocks_for
from strata_jax.kernels.expert_gemv.layout import ExpertLayout, WindowPlan, expert_layout, pack_expert, plan_window
from strata_jax.kernels.expert_gemv.vectors import VectorRows, input_rows, pack_input, pack_rows
from strata_jax.kernels.form import form
from strata_jax.kernels.planes import ITEM
from strata_jax.memory.layout import MAX_WINDOW_TOKENS

__all__ = [
    "MAX_WINDOW_TOKENS",
    "Blocks",
    "ExpertLayout",
    "LaunchBlocks",
    "VectorRows",
    "WindowPlan",
    "expert_gemv",
    "expert_layout",
    "input_rows",
    "pack_expert",
    "pack_input",
    "pack_rows",
    "plan_window",
    "planned_gemv",
]


def expert_gemv(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
    *,
    backend: str | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Apply each token's experts and add them up, weighted, in ascending order of `ids`.

    Args:
        u: f32[T, E], T from 1 to 8.
        ids: i32[T, K], the experts of each token, ascending and distinct; X = none.
        weights: f32[T, K].
        arrays: the arena's core and its segments, u32[pages, page_words], page numbers running through all of them. No
            resident expert lies in one that is left out.
        bank: u32[X, blob_words], all experts of the block; on a GPU it may be in host memory.
        pages: i32[X], first arena page of each expert, -1 = read it from the bank.
        layout: of the blobs, in the arena and in the bank.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        blocks: block sizes of the Triton kernels; None = from the table.
        interpret: run the Triton kernels in Pallas' interpreter, on any device.

    Returns:
        f32[T, E]. Tokens are sums in float32; the same bits wherever an expert is resident.

    Raises:
        ValueError: shapes or types do not fit, `blocks` do not divide the planes' tiles, or `backend` is unknown.
    """
    _check(u, ids, weights, arrays, bank, pages, layout)
    if blocks is not None:
        _check_blocks(blocks, layout.tile_rows)

    def in_jnp(u: jax.Array, ids: jax.Array, weights: jax.Array, bank: jax.Array, pages: jax.Array) -> jax.Array:
        return reference.expert_window(u, ids, weights, arrays, bank, pages, layout)

    def on_triton(u: jax.Array, ids: jax.Array, weights: jax.Array, bank: jax.Array, pages: jax.Array) -> jax.Array:
        x, plan = pack_input(u, input_rows(layout)), plan_window(ids, pages)
        return planned_gemv(x, plan, weights, arrays, bank, pages, layout, blocks=blocks, interpret=interpret)

    return on_backend(backend, on_triton, in_jnp, u, ids, weights, bank, pages)


def planned_gemv(
    x: jax.Array,
    plan: WindowPlan,
    weights: jax.Array,
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The Triton kernels of `expert_gemv` for a window that is planned and packed already (`kernels/route`).

    Args:
        x: u32[T, input_rows, E / 32], as `pack_input` makes it.
    """
    from strata_jax.kernels.expert_gemv import triton

    found = blocks or blocks_for(_device_kind(), layout.tile_rows, x.shape[0])
    return triton.expert_window(x, plan, weights, arrays, bank, pages, layout, found, interpret=interpret)


def _device_kind() -> str:
    return jax.devices()[0].device_kind


def _check(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
) -> None:
    width, num_experts = layout.down.rows, pages.shape[0]
    if u.ndim != 2 or not 1 <= u.shape[0] <= MAX_WINDOW_TOKENS or u.shape[1] != width or u.dtype != jnp.float32:
        raise ValueError(f"u is f32[T, {width}] with T from 1 to {MAX_WINDOW_TOKENS}, got {form(u)}")
    types_fit = ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    if ids.shape != weights.shape or ids.shape[:1] != u.shape[:1] or ids.ndim != 2 or not types_fit:
        raise ValueError(f"ids and weights are i32 and f32 [{u.shape[0]}, K], got {form(ids)} and {form(weights)}")
    if pages.ndim != 1 or pages.dtype != jnp.int32:
        raise ValueError(f"pages is i32[X], got {form(pages)}")
    if bank.shape != (num_experts, layout.num_words) or bank.dtype != jnp.uint32:
        raise ValueError(f"bank is u32[{num_experts}, {layout.num_words}], got {form(bank)}")
    if not arrays or any(a.ndim != 2 or a.shape[1] != arrays[0].shape[1] or a.dtype != jnp.uint32 for a in arrays):
        raise ValueError(
            f"the arena is one or more arrays u32[pages, page_words] of one page size, got {[*map(form, arrays)]}"
        )
    if arrays[0].shape[1] % layout.tile_rows:
        raise ValueError(f"pages of {arrays[0].shape[1]} words are no whole lines of {layout.tile_rows} words")


def _check_blocks(blocks: Blocks, tile_rows: int) -> None:
    for name, launch in (("gate_up", blocks.gate_up), ("down", blocks.down)):
        if launch.rows < 1 or tile_rows % launch.rows:
            raise ValueError(f"{name}: {launch.rows} rows a program do not divide the planes' tile of {tile_rows} rows")
    if blocks.gate_up.rows % ITEM:
        raise ValueError(f"gate_up: {blocks.gate_up.rows} rows a program are no whole items of {ITEM} for `down`")
