"""Products of a prompt chunk's tokens with their experts, on packed weights, rows sorted by expert.

    blocks = choose_blocks(T * K / X, layout.tile_rows, device_kind)
    pairs = sort_pairs(ids, X, blocks.rows)                             # T tokens x K experts -> P sorted rows
    tiles = tile_map(pairs, blocks.rows)
    sources = arena_sources(arrays, pages)                              # experts where they are resident
    h = grouped_swiglu(u, pairs.token_of, tiles, sources, layout, h, blocks)    # silu(gate) * up, [P + pad, F]
    y = grouped_down(h, tiles, sources, layout, y, blocks)                      # [P + pad, E]
    out = combine(y, pairs, weights)                                    # f32[T, E]

An expert is read from the source that has it (one at most), by Mosaic all by one launch; by Triton each source takes a
launch, which fills its own rows of the same result. Experts of other sources are another call's, which goes on with the
result (written in place). Operands of the products are bfloat16 (weights decoded in float32, rounded once), sums
float32. Rows that no call fills are as the caller made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.expert_gemv.layout import ExpertLayout
from strata_jax.kernels.grouped_matmul import reference, triton
from strata_jax.kernels.grouped_matmul.blocks import Blocks, RingBlocks, choose_blocks
from strata_jax.kernels.grouped_matmul.tile_map import SortedPairs, Source, TileMap, arena_sources, sort_pairs, tile_map
from strata_jax.kernels.planes import PlaneLayout
from strata_jax.kernels.quant_matmul.tiles import PlanePart

__all__ = [
    "Blocks",
    "RingBlocks",
    "SortedPairs",
    "Source",
    "TileMap",
    "arena_sources",
    "choose_blocks",
    "combine",
    "grouped_down",
    "grouped_swiglu",
    "sort_pairs",
    "tile_map",
]


def grouped_swiglu(
    u: jax.Array,
    token_of: jax.Array,
    tiles: TileMap,
    sources: Sequence[Source],
    layout: ExpertLayout,
    out: jax.Array,
    blocks: Blocks,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Apply gate and up of each tile's expert to its rows: silu(gate x) * (up x).

    Args:
        u: bf16[T, E], the tokens.
        token_of: i32[P + pad] with pad >= blocks.rows.
        sources: at least one; no expert is in two.
        out: bf16[P + pad, F]; rows of other experts and of the padding keep what they hold.
        backend: ``"reference"``, ``"triton"`` or ``"mosaic"``; None = Mosaic or Triton on CUDA, the reference
            elsewhere. Mosaic takes what `blocks` have rings for: on Hopper, gate and up of one type, planes of 128
            rows. Triton takes the rest.
        interpret: run the Triton kernel in Pallas' interpreter, on any device.

    Raises:
        ValueError: shapes that do not fit, named, or `backend` is unknown.
    """
    parts = PlanePart(layout.gate, layout.firsts[0]), PlanePart(layout.up, layout.firsts[1])
    _check(layout, layout.gate, sources, u.shape[1], token_of.shape[0], out, blocks.swiglu.rows)

    def on_triton() -> jax.Array:
        return reduce(
            lambda done, source: triton.swiglu(u, token_of, tiles, source, parts, done, blocks, interpret), sources, out
        )

    def on_mosaic() -> jax.Array:
        ring = _ring(blocks, parts, interpret)
        if ring is None:
            return on_triton()
        from strata_jax.kernels.grouped_matmul import mosaic

        return mosaic.swiglu(u, token_of, tiles, sources, parts, out, ring)

    def in_jnp() -> jax.Array:
        return reduce(
            lambda done, source: reference.swiglu(u, token_of, tiles, source, parts, done, blocks.rows), sources, out
        )

    return on_backend(backend, on_triton, in_jnp, mosaic=on_mosaic)


def grouped_down(
    h: jax.Array,
    tiles: TileMap,
    sources: Sequence[Source],
    layout: ExpertLayout,
    out: jax.Array,
    blocks: Blocks,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Apply the down matrix of each tile's expert to its rows of ``h: bf16[P + pad, F]``, into ``out: [P + pad, E]``.

    Other arguments as of `grouped_swiglu`.

    Raises:
        ValueError: as `grouped_swiglu`.
    """
    part = PlanePart(layout.down, layout.firsts[2])
    _check(layout, layout.down, sources, h.shape[1], h.shape[0], out, blocks.down.rows)

    def on_triton() -> jax.Array:
        return reduce(lambda done, source: triton.down(h, tiles, source, part, done, blocks, interpret), sources, out)

    def on_mosaic() -> jax.Array:
        ring = _ring(blocks, (part,), interpret)
        if ring is None:
            return on_triton()
        from strata_jax.kernels.grouped_matmul import mosaic

        return mosaic.down(h, tiles, sources, part, out, ring)

    def in_jnp() -> jax.Array:
        return reduce(lambda done, source: reference.down(h, tiles, source, part, done, blocks.rows), sources, out)

    return on_backend(backend, on_triton, in_jnp, mosaic=on_mosaic)


def combine(y: jax.Array, pairs: SortedPairs, weights: jax.Array) -> jax.Array:
    """Sum each token's rows of ``y: [P + pad, E]``, weighted by ``weights: f32[T, K]``, in order of its experts.

    Rows of pairs without an expert count as 0, whatever they hold.
    """
    total, num_rows = jnp.zeros((pairs.row_of.shape[0], y.shape[1]), jnp.float32), jnp.sum(pairs.count)
    for i in range(pairs.row_of.shape[1]):
        row = pairs.row_of[:, i]
        value = jnp.where((row < num_rows)[:, None], y[row].astype(jnp.float32), 0.0)
        total = total + weights[:, i, None] * value
    return total


def _ring(blocks: Blocks, parts: tuple[PlanePart, ...], interpret: bool) -> RingBlocks | None:
    """Return how Mosaic cuts these products, None = Triton does them."""
    if blocks.rings is None or interpret:
        return None
    from strata_jax.kernels.grouped_matmul import mosaic  # not with every version of JAX

    return blocks.rings[0 if len(parts) == 2 else 1] if mosaic.takes(parts) else None


def _check(
    layout: ExpertLayout,
    part: PlaneLayout,
    sources: Sequence[Source],
    cols: int,
    num_rows: int,
    out: jax.Array,
    weight_rows: int,
) -> None:
    if (part.rows, part.cols) != (out.shape[1], cols):
        raise ValueError(f"the matrix is {part.rows} x {part.cols}, the operands need {out.shape[1]} x {cols}")
    if out.shape[0] != num_rows:
        raise ValueError(f"the result has {out.shape[0]} rows, the operand {num_rows}")
    if part.tile_rows % weight_rows:
        raise ValueError(f"programs of {weight_rows} rows of weights do not divide tiles of {part.tile_rows} rows")
    if not sources:
        raise ValueError("there is no source of experts")
    for words, _ in sources:
        if words.ndim != 2 or words.dtype != jnp.uint32 or words.shape[1] % layout.tile_rows:
            raise ValueError(
                f"words are u32[lines, words_per_line] with whole runs of {layout.tile_rows} words a line, "
                f"got {words.dtype}{list(words.shape)}"
            )
