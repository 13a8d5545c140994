"""Products with planes in whole numbers: four codes in a word, four products an instruction.

A code is a whole number from -128 to 127, so an item of 32 codes is 8 *quads*: words of four signed bytes. A vector
becomes whole numbers too: each item of 32 values is scaled so that its largest value is just below 2^23, rounded, and
cut into three signed bytes, the *limbs*. A row's product with an item is then 24 sums of four products of bytes, exact
in int32; only the scales are floats. Rounding the vector costs 2^-24 of an item's largest value, as float32 sums would.

    quads = decode_quads(fields, type_name, lookup, ops)    # 8 words u32[J, R]
    vector = pack_vector(x, (quad_order(type_name),))       # x: f32[..., 32] -> `PackedItems`

Which positions of an item share a word is a matter of the type (`quad_order`): packing the vector in the order in which
codes come out is cheaper than moving codes. Functions of plain arrays, that work in a kernel and outside alike; `Ops`
are the two operations that are single instructions on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.gguf.planes import ITEM
from strata_jax.kernels.dequant import grids
from strata_jax.kernels.planes.decode import Fields, Lookup, codebook_entries, sign_parity

QUADS = ITEM // 4
LIMBS = 3
_LARGEST = (127 << 16) + (127 << 8) + 127
_SMALLEST = 1e-30  # the largest value of an item is at least this: scales are normal numbers
_EACH_BYTE = 0x01010101


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations on 32-bit words as four bytes.

    Attributes:
        dot4: (a, b, sum): i32 ``sum`` plus the four products of signed bytes of the u32 ``a`` and ``b``.
        permute: (low, high, selector): nibble k of the selector, 0 to 7, says which of the 8 bytes becomes byte k.
    """

    dot4: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    permute: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _dot4(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    for k in range(4):
        total = total + _signed_byte(a, k) * _signed_byte(b, k)
    return total


def _permute(low: jax.Array, high: jax.Array, selector: jax.Array) -> jax.Array:
    result = jnp.zeros_like(selector)
    for k in range(4):
        nibble = selector >> np.uint32(4 * k)
        word = jnp.where((nibble & np.uint32(4)) == 0, low, high)
        result = result | (word >> ((nibble & np.uint32(3)) * np.uint32(8)) & np.uint32(255)) << np.uint32(8 * k)
    return result


PLAIN_OPS = Ops(_dot4, _permute)
"""In plain jnp."""


# Codes ---------------------------------------------------------------------------------------------------------------


def decode_quads(fields: Fields, type_name: str, lookup: Lookup, ops: Ops) -> tuple[jax.Array, ...]:
    """Return the codes of an item before scaling (those of `decode_codes`), four signed bytes a word: 8 u32[J, R].

    Words 0 to 3 hold the first half of an item where a type has a scale for each half.
    """
    return tuple(_QUADS[type_name](fields, type_name, lookup, ops, quad) for quad in range(QUADS))


def _bytes(f: Fields, name: str, lookup: Lookup, ops: Ops, quad: int) -> jax.Array:
    return f["code"][quad]


def _two_bits(f: Fields, name: str, lookup: Lookup, ops: Ops, quad: int) -> jax.Array:
    return _centred((f["code"][quad // 4] >> np.uint32(2 * (quad % 4))) & np.uint32(0x03030303), 1)


def _nibbles(f: Fields, quad: int) -> jax.Array:
    word = f["code"][quad % 4]
    return (word if quad < 4 else word >> np.uint32(4)) & np.uint32(0x0F0F0F0F)


def _four_bits(f: Fields, name: str, lookup: Lookup, ops: Ops, quad: int) -> jax.Array:
    codes = _nibbles(f, quad)
    return _centred(codes, 8) if name == "Q4_0" else codes


def _five_bits(f: Fields, name: str, lookup: Lookup, ops: Ops, quad: int) -> jax.Array:
    four = (f["high"][0] >> np.uint32(4 * quad)) & np.uint32(15)
    codes = _nibbles(f, quad) | (_spread(four) << np.uint32(4))
    return _centred(codes, 16) if name == "Q5_0" else codes


def _six_bits(f: Fields, name: str, lookup: Lookup, ops: Ops, quad: int) -> jax.Array:
    high = (f["high"][quad // 4] >> np.uint32(8 * (quad % 4))) & np.uint32(255)
    high = (high | (high << np.uint32(12))) & np.uint32(0x000F000F)
    high = (high | (high << np.uint32(6))) & np.uint32(0x03030303)
    return _centred(_nibbles(f, quad) | (high << np.uint32(4)), 32)


def _iq4(f: Fields, name: str, lookup: Lookup, ops: Ops, quad: int) -> jax.Array:
    """Two words of the table each for the lower and the upper eight values; bit 3 of a nibble chooses between them."""
    table = grids.iq4_values().astype(np.int8).view("<u4")
    word = f["code"][quad // 2]
    half = word >> np.uint32(16) if quad % 2 else word

    def chosen(first: int) -> jax.Array:
        low, high = (jnp.full(word.shape, table[first + i], jnp.uint32) for i in range(2))
        return ops.permute(low, high, half & np.uint32(0x7777))

    upper = ((half >> np.uint32(1)) & np.uint32(0x4444)) | np.uint32(0x3210)
    return ops.permute(chosen(0), chosen(2), upper)


def _codebook(f: Fields, name: str, lookup: Lookup, ops: Ops, quad: int) -> jax.Array:
    entry = next(e for i, e in enumerate(codebook_entries(f, name, lookup)) if i == quad)
    minus = _minus_signs(f, name, quad)
    return (entry ^ (minus * np.uint32(255))) + minus  # magnitudes are not 0: no byte carries into the next


def _minus_signs(f: Fields, name: str, quad: int) -> jax.Array:
    """1 in each byte of a quad whose weight is negative."""
    if name in ("IQ3_S", "IQ2_S"):  # a bit for each weight
        return _spread((f["sign"][0] >> np.uint32(4 * quad)) & np.uint32(15))
    # seven bits for each eight weights; the eighth makes their number even
    eight, upper = divmod(quad, 2)
    word, start = (f["index"][eight // 2], 16 * (eight % 2) + 9) if name == "IQ2_XS" else (f["sign"][0], 7 * eight)
    seven = (word >> np.uint32(start)) & np.uint32(127)
    if not upper:
        return _spread(seven)
    last = _moved(sign_parity(word), start, 24) & np.uint32(1 << 24)
    return (_copies(seven) >> np.uint32(4)) & np.uint32(0x00010101) | last


def _copies(seven: jax.Array) -> jax.Array:
    """Four copies of seven bits, seven bits apart."""
    return seven * np.uint32(0x00204081)


def _spread(bits: jax.Array) -> jax.Array:
    """The lowest four of at most seven bits, each to a byte of its own."""
    return _copies(bits) & np.uint32(_EACH_BYTE)


def _moved(word: jax.Array, bit: int, to: int) -> jax.Array:
    return word << np.uint32(to - bit) if to >= bit else word >> np.uint32(bit - to)


def _centred(codes: jax.Array, by: int) -> jax.Array:
    """Subtract a number from bytes below 128, each for itself."""
    return ((codes | np.uint32(0x80808080)) - np.uint32(by * _EACH_BYTE)) ^ np.uint32(0x80808080)


_QUADS: Mapping[str, Callable[[Fields, str, Lookup, Ops, int], jax.Array]] = {
    "Q8_0": _bytes,
    "Q6_K": _six_bits,
    "Q5_K": _five_bits,
    "Q5_1": _five_bits,
    "Q5_0": _five_bits,
    "Q4_K": _four_bits,
    "Q4_0": _four_bits,
    "IQ4_NL": _iq4,
    "IQ4_XS": _iq4,
    "IQ3_S": _codebook,
    "IQ3_XXS": _codebook,
    "IQ2_S": _codebook,
    "IQ2_XS": _codebook,
    "IQ2_XXS": _codebook,
    "Q2_0": _two_bits,
}


# Vectors -------------------------------------------------------------------------------------------------------------

_ORDERS: Mapping[str, Callable[[Any], tuple[Any, Any]]] = {
    "consecutive": lambda s: (s >> 2, s & 3),
    "strided": lambda s: ((s >> 4 << 2) | (s & 3), s >> 2 & 3),
    "interleaved": lambda s: (s >> 1 & 7, ((s & 1) << 1) | s >> 4),
}
"""Of each order: positions in an item -> (quad, byte of it)."""


def quad_order(type_name: str) -> str:
    """Return the name of the order in which `decode_quads` gives the codes of an item."""
    return {"Q2_0": "strided", "IQ4_NL": "interleaved", "IQ4_XS": "interleaved"}.get(type_name, "consecutive")


def quad_positions(order: str) -> list[list[int]]:
    """Return the positions in an item of the four bytes of each quad."""
    position = {tuple(_ORDERS[order](s)): s for s in range(ITEM)}
    return [[position[quad, byte] for byte in range(4)] for quad in range(QUADS)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedItems:
    """Items of 32 values in whole numbers.

    Attributes:
        words: for each order and limb u32[..., 8], quad by quad; limb 0 is the highest.
        scale: f32[...], of the items: value = scale * (limb 0 * 2^16 + limb 1 * 2^8 + limb 2). NaN where a value is
            not finite.
        sum: f32[...], of the items' values.
    """

    words: tuple[jax.Array, ...]
    scale: jax.Array
    sum: jax.Array


def pack_vector(x: jax.Array, orders: Sequence[str]) -> PackedItems:
    """Pack items ``x: f32[..., 32]`` for codes in some orders."""
    largest, total = jnp.max(jnp.abs(x), axis=-1), jnp.sum(x, axis=-1)
    scale = jnp.maximum(largest, _SMALLEST) / _LARGEST
    finite = jnp.abs(total) < jnp.inf
    # divided, not multiplied by an inverse: whatever the scale was rounded to, its multiples are right
    whole = _nearest(jnp.where(finite[..., None], x / scale[..., None], 0.0))
    whole = jnp.clip(whole, -_LARGEST, _LARGEST)
    limbs: list[jax.Array] = []
    for _ in range(LIMBS):
        limbs.insert(0, ((whole + 128) & 255) - 128)
        whole = (whole - limbs[0]) >> 8
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    words = []
    for order in orders:
        quad, byte = _ORDERS[order](place)
        mine = quad[..., None, :] == jnp.arange(QUADS, dtype=jnp.int32)[:, None]
        for limb in limbs:
            moved = (limb & 255) << (8 * byte)
            words.append(jnp.sum(jnp.where(mine, moved[..., None, :], 0), axis=-1, dtype=jnp.int32).astype(jnp.uint32))
    return PackedItems(tuple(words), jnp.where(finite, scale, jnp.nan), total)


def _nearest(x: jax.Array) -> jax.Array:
    """Round to the nearest whole number: |x| < 2^23."""
    return (x + jnp.where(x < 0, -0.5, 0.5)).astype(jnp.int32)


def _signed_byte(word: jax.Array, index: int) -> jax.Array:
    moved = jax.lax.bitcast_convert_type(word << np.uint32(24 - 8 * index), jnp.int32)
    return moved >> np.int32(24)
