"""Packing one side of a cell in a kernel's registers; the layouts are those of `strata_jax.kv_types`.

Tile j holds the values of place j of each word, so that a word is put together without crossing threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kv_types import int8_group
from strata_jax.memory.attention_kernels import TILES_OF_HEAD

F16_MAX = 65504.0
WHOLE = 1.5 * 2.0**23
"""A small number plus this has the nearest whole number, ties to even, in the lowest bits of the sum."""


def values_at(fmt: str, num_heads: int, head_dim: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return, tile by tile, the head and the index in it of each value; head is the leading axis.

    Tiles have one word's value each: i32[H, words of a head], for ``int8`` i32[H, groups, words of a group].
    """
    places = TILES_OF_HEAD[fmt]
    if fmt == "int8":
        group = int8_group(head_dim)
        shape: tuple[int, ...] = (num_heads, head_dim // group, group // places)
        at = _axis(shape, 1) * group + _axis(shape, 2) * places
    else:
        shape = (num_heads, head_dim // places)
        at = _axis(shape, 1) * places
    return [(_axis(shape, 0), at + place) for place in range(places)]


def pack(fmt: str, tiles: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """Return (index of each word in the side, words) of tiles of finite values as of `values_at`."""
    if fmt == "int8":
        return _int8(tiles)
    bits = [_bits(fmt, tile) for tile in tiles]
    words = bits[0]
    for place, more in enumerate(bits[1:], 1):
        words = words | (more << (32 // len(bits) * place))
    return [(_flat_index(words.shape), words)]


def _bits(fmt: str, x: jax.Array) -> jax.Array:
    if fmt == "f32":
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    half = jnp.clip(x, -F16_MAX, F16_MAX).astype(jnp.float16) if fmt == "f16" else x.astype(jnp.bfloat16)
    return jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32)


def _int8(tiles: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    largest = jnp.max(jnp.abs(tiles[0]), axis=2)
    for tile in tiles[1:]:
        largest = jnp.maximum(largest, jnp.max(jnp.abs(tile), axis=2))
    stored = jnp.minimum(largest / 127, F16_MAX).astype(jnp.float16)
    scale = stored.astype(jnp.float32)[:, :, None]
    words = jnp.zeros(tiles[0].shape, jnp.uint32)
    for place, tile in enumerate(tiles):
        steps = jnp.where(scale > 0, jnp.clip(tile / scale, -127, 127), 0.0)
        code = jax.lax.bitcast_convert_type(steps + WHOLE, jnp.uint32) & 255
        words = words | (code << (8 * place))
    halves = jax.lax.bitcast_convert_type(stored, jnp.uint16).astype(jnp.uint32).reshape(-1)
    num_groups = halves.shape[0]
    if num_groups > 1:
        pairs = halves.reshape(num_groups // 2, 2)
        halves = jnp.sum(pairs << (16 * jnp.arange(2, dtype=jnp.uint32))[None, :], axis=1)
    first_scale = words.size
    return [(_flat_index(words.shape), words), (first_scale + jnp.arange(halves.shape[0]), halves)]


def _flat_index(shape: tuple[int, ...]) -> jax.Array:
    index = jnp.zeros(shape, jnp.int32)
    for axis, size in enumerate(shape):
        index = index * size + _axis(shape, axis)
    return index


def _axis(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
