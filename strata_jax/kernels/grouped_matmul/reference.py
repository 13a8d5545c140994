"""The grouped products in plain jnp: every expert decoded, rows gathered, one expert at a time."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from strata_jax.kernels.grouped_matmul.tile_map import Source, TileMap
from strata_jax.kernels.planes import decode_planes
from strata_jax.kernels.quant_matmul.tiles import PlanePart


def part_matrix(words: jax.Array, line: jax.Array, part: PlanePart) -> jax.Array:
    """Decode one matrix that starts in a line of ``words`` and may go on over the next ones: f32[rows, cols].

    ``words`` may be in host memory.
    """
    num_words, length = part.layout.num_words, words.shape[1]
    num_lines = -(-(part.first_word + num_words) // length)
    run = jax.lax.dynamic_slice_in_dim(words, line, num_lines)
    run = jax.device_put(run, jax.memory.Space.Device).reshape(-1)
    return decode_planes(jax.lax.slice_in_dim(run, part.first_word, part.first_word + num_words), part.layout)


def swiglu(
    u: jax.Array,
    token_of: jax.Array,
    tiles: TileMap,
    source: Source,
    parts: tuple[PlanePart, PlanePart],
    out: jax.Array,
    tile_rows: int,
) -> jax.Array:
    """See `grouped_swiglu`."""

    def product(i: jax.Array, rows: jax.Array) -> jax.Array:
        line = source.lines[tiles.expert[i]]
        x = u[token_of[rows]]
        gate, up = (_times(x, part_matrix(source.words, line, part)) for part in parts)
        return gate * jax.nn.sigmoid(gate) * up

    return _fill(tiles, source.lines, out, tile_rows, product)


def down(
    h: jax.Array,
    tiles: TileMap,
    source: Source,
    part: PlanePart,
    out: jax.Array,
    tile_rows: int,
) -> jax.Array:
    """See `grouped_down`."""

    def product(i: jax.Array, rows: jax.Array) -> jax.Array:
        return _times(h[rows], part_matrix(source.words, source.lines[tiles.expert[i]], part))

    return _fill(tiles, source.lines, out, tile_rows, product)


def _times(x: jax.Array, w: jax.Array) -> jax.Array:
    """Float32 product of rows with a decoded matrix."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x.astype(jnp.float32), w, dims, precision=jax.lax.Precision.HIGHEST)


def _fill(
    tiles: TileMap,
    lines: jax.Array,
    out: jax.Array,
    tile_rows: int,
    product: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = tiles.first[i] + jnp.arange(tile_rows)
        here = lines[tiles.expert[i]] >= 0
        value = product(i, jnp.minimum(rows, out.shape[0] - 1)).astype(out.dtype)
        keep = here & (jnp.arange(tile_rows) < tiles.count[i])
        return out.at[jnp.where(keep, rows, out.shape[0])].set(value, mode="drop")

    return jax.lax.fori_loop(0, tiles.num[0], step, out)
