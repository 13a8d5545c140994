"""Where each field of a packed matrix lies in its planes. Pure arithmetic; sizes are 32-bit words.

A field is named by what it holds: `code` (or the low bits of it), `high` (the bits above), `index` (of a codebook
entry), `sign`, `scale`, `d` (an f16 scale), `m` (an f16 minimum). `SOURCES` says from which bits of a block each field
is taken; the repack and its inverse are this table and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import block_type

ITEM = 32
"""Weights of an item."""
MAX_TILE_ROWS = 128
_WORD = 32


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One field of a block: ``bits[i, b]`` is the position in the block of bit b of the i-th of its values.

    A value belongs to ``share`` items in a row. It has 1, 2, 4, 8 or 16 bits, or whole words.
    """

    name: str
    share: int
    bits: np.ndarray


@dataclass(frozen=True, slots=True)
class Field:
    """One field in the row string: values of ``bits`` bits, one per ``share`` items, from word ``first``.

    Below 32 bits, value i has bits ``i * bits`` and up of ``num_words`` words. Otherwise there are ``bits / 32`` planes
    of one word per item: word k of item j is at ``first + k * num_items + j``.
    """

    name: str
    bits: int
    share: int
    first: int
    num_words: int


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """A matrix of ``rows`` x ``cols`` weights of one type in planes: u32[rows / tile_rows, row_words, tile_rows]."""

    type_name: str
    rows: int
    cols: int
    tile_rows: int
    row_words: int
    fields: tuple[Field, ...]

    @property
    def num_items(self) -> int:
        """Items of a row."""
        return self.cols // ITEM

    @property
    def num_words(self) -> int:
        return self.rows * self.row_words

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as the file packs it."""
        block = block_type(self.type_name)
        return self.cols // block.block_len * block.block_bytes


@cache
def plane_layout(type_name: str, rows: int, cols: int, tile_rows: int | None = None) -> PlaneLayout:
    """Return the layout of a matrix.

    Args:
        tile_rows: rows that are interleaved; a divisor of `rows`, by default the largest power of two up to 128.

    Raises:
        FormatError: planes know no such type. ValueError: `cols` are not whole blocks, or `tile_rows` no divisor.
    """
    if type_name not in SOURCES:
        raise FormatError(f"no planes for type {type_name!r}; there are for {', '.join(SOURCES)}")
    block = block_type(type_name)
    if rows < 1 or cols < 1 or cols % block.block_len:
        raise ValueError(
            f"a {rows} x {cols} matrix cannot be {type_name}: a row is whole blocks of {block.block_len} weights"
        )
    if tile_rows is None:
        tile_rows = min(rows & -rows, MAX_TILE_ROWS)
    if tile_rows < 1 or rows % tile_rows:
        raise ValueError(f"tile_rows={tile_rows} does not divide {rows} rows; {min(rows & -rows, MAX_TILE_ROWS)} does")
    num_items, first, fields = cols // ITEM, 0, []
    for source in sources(type_name):
        bits = source.bits.shape[1]
        words = -(-(num_items // source.share * bits) // _WORD)
        fields.append(Field(source.name, bits, source.share, first, words))
        first += words
    return PlaneLayout(type_name, rows, cols, tile_rows, first, tuple(fields))


def word_address(layout: PlaneLayout, row: int, word: int) -> int:
    """Return where word ``word`` of row ``row`` lies in the matrix's words."""
    tile, lane = divmod(row, layout.tile_rows)
    return (tile * layout.row_words + word) * layout.tile_rows + lane


# Fields of each type --------------------------------------------------------------------------------------------------


@cache
def sources(type_name: str) -> tuple[Source, ...]:
    """Return the fields of a type, in the order in which they lie in a row string."""
    return SOURCES[type_name]()


def _bytes(name: str, first: int, count: int, items: int = 1, share: int = 1) -> Source:
    """``count`` bytes for each value, one after the other from byte ``first``: in the order of the file."""
    values = items // share
    return Source(name, share, 8 * first + np.arange(values * count * 8).reshape(values, count * 8))


def _bits(name: str, first: int, bits: int, items: int) -> Source:
    """``bits`` bits for each item, in the order of the file."""
    return Source(name, 1, 8 * first + np.arange(items * bits).reshape(items, bits))


def _d(first: int, items: int, name: str = "d") -> Source:
    return _bytes(name, first, 2, items, share=items)


def _nibble_bits(nibble_of: np.ndarray) -> np.ndarray:
    """Positions of the items' nibbles [items, 32] -> bits [items, 128], byte b being weights b (low) and 16 + b."""
    by_byte = nibble_of.reshape(-1, 2, 16).swapaxes(1, 2)
    return (by_byte[..., None] * 4 + np.arange(4)).reshape(len(nibble_of), -1)


def _q4_0() -> tuple[Source, ...]:
    return _bytes("code", 2, 16), _d(0, 1)


def _q5_0() -> tuple[Source, ...]:
    return _bytes("code", 6, 16), _bytes("high", 2, 4), _d(0, 1)


def _q5_1() -> tuple[Source, ...]:
    return _bytes("code", 8, 16), _bytes("high", 4, 4), _d(0, 1), _d(2, 1, "m")


def _q8_0() -> tuple[Source, ...]:
    return _bytes("code", 2, 32), _d(0, 1)


def _q2_0() -> tuple[Source, ...]:
    return _bytes("code", 2, 8, items=2), _d(0, 2)


def _k_codes(first: int) -> Source:
    """32 bytes for each pair of items: the low nibbles are the first item's codes, the high ones the second's."""
    item, weight = np.arange(8)[:, None], np.arange(ITEM)
    return Source("code", 1, _nibble_bits((first + item // 2 * ITEM + weight) * 2 + item % 2))


def _k_scales(first: int) -> tuple[Source, ...]:
    """Six-bit scales and minima of 8 items in 12 bytes -> low four bits of both (a byte), high two of both."""
    low, high = np.zeros((8, 8), int), np.zeros((8, 4), int)
    for item in range(8):
        k = item % 4
        for kind in range(2):  # scale, minimum
            own = 8 * (first + 4 * kind + k)
            rest = 8 * (first + 8 + k) + 4 * kind
            low[item, 4 * kind : 4 * kind + 4] = np.arange(4) + (own if item < 4 else rest)
            high[item, 2 * kind : 2 * kind + 2] = np.arange(2) + own + (4 if item < 4 else 6)
    return Source("scale", 1, low), Source("scale_high", 1, high)


def _q4_k() -> tuple[Source, ...]:
    return _k_codes(16), *_k_scales(4), _d(0, 8), _d(2, 8, "m")


def _q5_k() -> tuple[Source, ...]:
    item, weight = np.arange(8)[:, None], np.arange(ITEM)
    high = Source("high", 1, 8 * (16 + weight) + item)
    return _k_codes(48), high, *_k_scales(4), _d(0, 8), _d(2, 8, "m")


def _q6_k() -> tuple[Source, ...]:
    item, weight = np.arange(8)[:, None], np.arange(ITEM)
    half, group = item // 4, item % 4
    low = _nibble_bits((64 * half + ITEM * (group % 2) + weight) * 2 + group // 2)
    high = (8 * (128 + ITEM * half + weight) + 2 * group)[..., None] + np.arange(2)
    return (
        Source("code", 1, low),
        Source("high", 1, high.reshape(8, -1)),
        _bytes("scale", 192, 2, items=8),
        _d(208, 8),
    )


def _iq4_xs() -> tuple[Source, ...]:
    return _bytes("code", 8, 16, 8), _bits("scale", 4, 4, 8), _bits("scale_high", 2, 2, 8), _d(0, 8)


def _iq3_s() -> tuple[Source, ...]:
    return (
        _bytes("index", 2, 8, 8),
        _bytes("sign", 74, 4, 8),
        _bytes("high", 66, 1, 8),
        _bits("scale", 106, 4, 8),
        _d(0, 8),
    )


def _iq3_xxs() -> tuple[Source, ...]:
    return _bytes("index", 2, 8, 8), _bytes("sign", 66, 4, 8), _d(0, 8)


def _iq2_s() -> tuple[Source, ...]:
    return (
        _bytes("index", 2, 4, 8),
        _bytes("sign", 34, 4, 8),
        _bytes("high", 66, 1, 8),
        _bytes("scale", 74, 1, 8),
        _d(0, 8),
    )


def _iq2_xs() -> tuple[Source, ...]:
    return _bytes("index", 2, 8, 8), _bytes("scale", 66, 1, 8), _d(0, 8)


def _iq2_xxs() -> tuple[Source, ...]:
    start = 8 * (2 + 8 * np.arange(8))[:, None] + np.arange(_WORD)
    return Source("index", 1, start), Source("sign", 1, start + _WORD), _d(0, 8)


SOURCES: Mapping[str, Callable[[], tuple[Source, ...]]] = {
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q4_K": _q4_k,
    "Q5_1": _q5_1,
    "Q5_0": _q5_0,
    "Q4_0": _q4_0,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ2_S": _iq2_s,
    "IQ2_XS": _iq2_xs,
    "IQ2_XXS": _iq2_xxs,
    "Q2_0": _q2_0,
}
PLANE_TYPES = tuple(SOURCES)
