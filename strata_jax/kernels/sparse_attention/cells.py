"""One head of some K/V cells decoded in a kernel's registers. Layouts: `strata_jax.kv_types`.

A head of d values comes as a few tiles [C, d / n] of every n-th value: a word of a cell holds values of n tiles, and
nothing has to cross threads. ``columns`` says which values the tiles hold. ``q4_0`` stays in its rotated basis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from strata_jax.kv_types import INT8_GROUP, Q4_BLOCK
from strata_jax.memory.attention_kernels import TILES_OF_HEAD

Load = Callable[[jax.Array], jax.Array]
"""Words of a cell's side i32[...] -> u32[C, ...]."""

_PAIR_WORDS = 9  # of two q4_0 blocks


@dataclass(frozen=True, slots=True)
class Side:
    """How keys or values lie in a cell: ``fmt`` is a format of `kv_types.SIDES`."""

    fmt: str
    num_kv_heads: int
    head_dim: int

    @property
    def num_tiles(self) -> int:
        return TILES_OF_HEAD[self.fmt]

    @property
    def tile_width(self) -> int:
        return self.head_dim // self.num_tiles

    def columns(self, tile: int) -> jax.Array:
        """Return which values of a head a tile holds: i32[d / n]."""
        column = jnp.arange(self.tile_width)
        if self.fmt != "q4_0":
            return column * self.num_tiles + tile
        # byte i of a block holds values i and i + 16; tile 4 n + j is nibble n of every fourth byte
        block, word = column >> 2, column & 3
        return block * Q4_BLOCK + 4 * word + (tile >> 2) * 16 + (tile & 3)

    def decode(self, load: Load, head: jax.Array) -> list[jax.Array]:
        """Decode a head: f32[C, d / n], one for each tile."""
        if self.fmt == "int8":
            return self._int8(load, head)
        if self.fmt == "q4_0":
            return self._q4_0(load, head)
        num_words = self.head_dim * (4 if self.fmt == "f32" else 2) // 4
        words = load(head * num_words + jnp.arange(num_words))
        if self.fmt == "f32":
            return [_as_f32(words)]
        if self.fmt == "bf16":
            return [_as_f32(words << 16), _as_f32(words & jnp.uint32(0xFFFF0000))]
        return [_half(words, 0), _half(words, 16)]

    def _int8(self, load: Load, head: jax.Array) -> list[jax.Array]:
        groups = self.head_dim // INT8_GROUP
        group = head * groups + jnp.arange(groups)
        first_scale = self.num_kv_heads * self.head_dim // 4
        scale = _half(load(first_scale + (group >> 1)), ((group & 1) << 4)[None, :])[:, :, None]
        word = jnp.arange(groups)[:, None] * (INT8_GROUP // 4) + jnp.arange(INT8_GROUP // 4)[None, :]
        words = load(head * (self.head_dim // 4) + word) ^ jnp.uint32(0x80808080)  # codes become 0 to 255
        codes = [_code(words >> (8 * j), 255, -128) for j in range(4)]
        return [(code * scale).reshape(-1, self.tile_width) for code in codes]

    def _q4_0(self, load: Load, head: jax.Array) -> list[jax.Array]:
        # two blocks take nine words: the first begins with its scale and the halves of its words are apart,
        # the scale of the second is the upper half of the fifth word and its codes are the last four
        num_blocks = self.head_dim // Q4_BLOCK
        block = jnp.arange(num_blocks)
        odd, pair = block & 1, head * (num_blocks // 2 * _PAIR_WORDS) + (block >> 1) * _PAIR_WORDS
        scale = _half(load(pair + 4 * odd), (odd << 4)[None, :])[:, :, None]
        first, second = ((pair + 5 * odd)[:, None] + jnp.arange(4)[None, :] + step for step in (0, (1 - odd)[:, None]))
        low, high = load(first), load(second)
        codes = jnp.where((odd == 1)[None, :, None], low, (low >> 16) | (high << 16))
        tiles = []
        for tile in range(self.num_tiles):
            code = _code(codes >> (8 * (tile & 3) + 4 * (tile >> 2)), 15, -8)
            tiles.append((code * scale).reshape(-1, self.tile_width))
        return tiles


def _code(words: jax.Array, mask: int, first: int) -> jax.Array:
    """The lowest bits of each word plus ``first``, as float32: bits of 2^23's fraction, which is faster than a cast."""
    return _as_f32((words & mask) | jnp.uint32(0x4B000000)) - (2.0**23 - first)


def _half(words: jax.Array, shift: jax.Array | int) -> jax.Array:
    """The float16 in bits ``shift`` and up of each word, as float32."""
    bits = (words >> jnp.asarray(shift).astype(jnp.uint32)).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _as_f32(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)
