"""Decoding planes: functions of plain arrays [J, R] that work in a kernel and outside alike.

Items J (32 weights each) by rows R. Weights come out one position at a time: position s of every item is one [J, R]
tile, so that no lane ever needs a value of another lane. Generators, so that a consumer uses a tile before the next one
is made. Codebook entries are looked up as four magnitude bytes (IQ3: one word, IQ2: two), the 4-bit codebook as two
bfloat16 values for both nibbles of a byte.

Names: `d` block scale, `f` the fields of an item by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.gguf.planes import ITEM, PlaneLayout
from strata_jax.kernels.dequant import grids

Load = Callable[[jax.Array], jax.Array]
"""i32[J], words of the row string -> u32[J, R]."""
Lookup = Callable[[jax.Array], jax.Array]
"""u32[J, R] -> u32[J, R], entries of `lookup_table`."""
Fields = Mapping[str, tuple[jax.Array, ...]]

_WORD = 32
_SIGN_BIT = np.uint32(1 << 31)
_WHOLE = 1 << 23  # float32 from here on to twice as much are the whole numbers, in order of their bits
_WHOLE_BITS = np.float32(_WHOLE).view(np.uint32)


def load_fields(load: Load, layout: PlaneLayout, items: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
    """Load all fields of the items ``items: i32[J]``: whole words, or one value in the low bits of a u32[J, R]."""
    found: dict[str, tuple[jax.Array, ...]] = {}
    for field in layout.fields:
        if field.bits >= _WORD:
            first = range(field.first, field.first + field.num_words, layout.num_items)
            found[field.name] = tuple(load(items + at) for at in first)
            continue
        bit = jax.lax.div(items, jnp.int32(field.share)) * field.bits  # items are not negative: no floor needed
        word = load(field.first + jax.lax.div(bit, jnp.int32(_WORD)))
        value = word >> jax.lax.rem(bit, jnp.int32(_WORD)).astype(jnp.uint32)[:, None]
        found[field.name] = (value & np.uint32((1 << field.bits) - 1),)
    return found


def raw_words(load: Load, layout: PlaneLayout, items: jax.Array) -> tuple[jax.Array, ...]:
    """Load what `load_fields` does; nothing is done with the words, so they may still be on their way (`fields_of`)."""
    words: list[jax.Array] = []

    def keep(word: jax.Array) -> jax.Array:
        words.append(load(word))
        return words[-1]

    load_fields(keep, layout, items)
    return tuple(words)


def fields_of(words: Sequence[jax.Array], layout: PlaneLayout, items: jax.Array) -> Fields:
    """Return the fields of the items whose words have been loaded."""
    replay = iter(words)
    return load_fields(lambda word: next(replay), layout, items)


def decode_tile(fields: Fields, type_name: str, lookup: Lookup) -> Iterator[jax.Array]:
    """Yield the 32 weights of every item, position by position: f32[J, R] each, equal to `dequantize` to the bit."""
    scales, offset = decode_scales(fields, type_name), decode_offset(fields, type_name)
    for s, code in enumerate(decode_codes(fields, type_name, lookup)):
        weight = code * scales[s * len(scales) // ITEM]
        yield weight if offset is None else weight + offset


def decode_codes(fields: Fields, type_name: str, lookup: Lookup) -> Iterator[jax.Array]:
    """Yield 32 tiles f32[J, R] of weights before scaling: whole numbers from -128 to 127."""
    return _CODES[type_name](fields, lookup)


def decode_scales(fields: Fields, type_name: str) -> tuple[jax.Array, ...]:
    """Return the scale of each item, or two: of its first and its last 16 weights. f32[J, R] each."""
    (d,) = fields["d"]
    return _SCALES[type_name](_half(d), fields)


def decode_offset(fields: Fields, type_name: str) -> jax.Array | None:
    """Return what is added to each weight of an item, f32[J, R], or None."""
    if "m" not in fields:
        return None
    minimum = _half(fields["m"][0])
    return minimum if type_name == "Q5_1" else -(_k_scale(fields, 1) * minimum)


def decode_planes(words: jax.Array, layout: PlaneLayout) -> jax.Array:
    """Decode a whole matrix: u32[layout.num_words] -> f32[rows, cols]. The reference of every kernel on planes.

    Raises:
        ValueError: `words` are not u32 or of another number.
    """
    if words.dtype != jnp.uint32 or words.shape != (layout.num_words,):
        raise ValueError(
            f"{layout.type_name} {layout.rows} x {layout.cols} in planes is uint32[{layout.num_words}], "
            f"got {words.dtype}{list(words.shape)}"
        )
    tiles = words.reshape(-1, layout.row_words, layout.tile_rows)
    return _decode_strings(tiles.swapaxes(0, 1).reshape(layout.row_words, layout.rows), layout)


def decode_plane_rows(words: jax.Array, layout: PlaneLayout, rows: jax.Array) -> jax.Array:
    """Decode some rows of a matrix in planes, ``rows: i32[N]``: f32[N, cols]."""
    tiles = words.reshape(-1, layout.row_words, layout.tile_rows)
    return _decode_strings(tiles[rows // layout.tile_rows, :, rows % layout.tile_rows].T, layout)


def _decode_strings(row_words: jax.Array, layout: PlaneLayout) -> jax.Array:
    """Decode whole row strings u32[row_words, N]: f32[N, cols]."""
    table = jnp.asarray(lookup_table(layout.type_name))
    items = jnp.arange(layout.num_items, dtype=jnp.int32)
    fields = load_fields(lambda word: row_words[word], layout, items)
    weights = jnp.stack(list(decode_tile(fields, layout.type_name, lambda index: table[index])))  # [32, J, N]
    return weights.transpose(2, 1, 0).reshape(-1, layout.cols)


@cache
def lookup_table(type_name: str) -> np.ndarray:
    """Return the table that a decoder of this type looks up: u32[n], a single 0 where it needs none."""
    if type_name.startswith("IQ4"):
        bits = grids.iq4_values().astype(np.float32).view(np.uint32)
        byte = np.arange(256)
        table = (bits[byte & 15] >> 16) | bits[byte >> 4]  # these values have at most 8 significant bits
    elif type_name.startswith("IQ"):
        magnitudes = grids.magnitudes(type_name).astype(np.uint8)
        table = magnitudes.view("<u4").reshape(-1).astype(np.uint32)
    else:
        table = np.zeros(1, np.uint32)
    table.flags.writeable = False
    return table


# Bits ----------------------------------------------------------------------------------------------------------------


def _half(bits: jax.Array) -> jax.Array:
    """The float16 in the low 16 bits, as f32."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def _take(word: jax.Array, first: int, bits: int) -> jax.Array:
    return (word >> np.uint32(first)) & np.uint32((1 << bits) - 1)


def _moved(word: jax.Array, first: int, bits: int, to: int) -> jax.Array:
    """Bits ``first ... first + bits - 1`` of the word, moved to bit ``to``."""
    shift = first - to
    moved = word >> np.uint32(shift) if shift >= 0 else word << np.uint32(-shift)
    return moved & np.uint32((1 << bits) - 1 << to)


def _f32(code: jax.Array, zero: int = 0) -> jax.Array:
    """``code - zero`` as f32, for codes below 2^23: two cheap instructions, where converting is half as fast."""
    return jax.lax.bitcast_convert_type(code | _WHOLE_BITS, jnp.float32) - np.float32(_WHOLE + zero)


def _signed_byte(word: jax.Array, index: int) -> jax.Array:
    return _f32(_take(word ^ np.uint32(0x80808080), 8 * index, 8), 128)


def _with_sign(magnitude: jax.Array, word: jax.Array, bit: int) -> jax.Array:
    """Make `magnitude` negative where the bit of the word is set."""
    sign = (word << np.uint32(31 - bit)) & _SIGN_BIT
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(magnitude, jnp.uint32) ^ sign, jnp.float32)


def sign_parity(word: jax.Array) -> jax.Array:
    """Bit i: the parity of bits i ... i + 6."""
    two = word ^ (word >> np.uint32(1))
    return two ^ (two >> np.uint32(2)) ^ (two >> np.uint32(4)) ^ (word >> np.uint32(6))


# Codes: 32 tiles -----------------------------------------------------------------------------------------------------


def _nibble(words: tuple[jax.Array, ...], s: int) -> jax.Array:
    """Byte b of 16 holds the codes of weights b (low) and 16 + b (high)."""
    byte = s % 16
    return _take(words[byte // 4], 8 * (byte % 4) + 4 * (s // 16), 4)


def _bytes(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    for s in range(ITEM):
        yield _signed_byte(f["code"][s // 4], s % 4)


def _two_bits(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    for s in range(ITEM):
        yield _f32(_take(f["code"][s // 16], 2 * (s % 16), 2), 1)


def _four_bits(f: Fields, lookup: Lookup, zero: int = 0) -> Iterator[jax.Array]:
    for s in range(ITEM):
        yield _f32(_nibble(f["code"], s), zero)


def _five_bits(f: Fields, lookup: Lookup, zero: int = 0) -> Iterator[jax.Array]:
    (high,) = f["high"]
    for s in range(ITEM):
        yield _f32(_nibble(f["code"], s) | _moved(high, s, 1, 4), zero)


def _six_bits(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    for s in range(ITEM):
        yield _f32(_nibble(f["code"], s) | _moved(f["high"][s // 16], 2 * (s % 16), 2, 4), 32)


def _iq4(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    pairs = [lookup(_take(f["code"][byte // 4], 8 * (byte % 4), 8)) for byte in range(16)]
    for pair in pairs:
        yield jax.lax.bitcast_convert_type(pair << np.uint32(16), jnp.float32)
    for pair in pairs:
        yield jax.lax.bitcast_convert_type(pair & np.uint32(0xFFFF0000), jnp.float32)


def _codebook(
    f: Fields, type_name: str, sign: Callable[[jax.Array, int], jax.Array], lookup: Lookup
) -> Iterator[jax.Array]:
    for group, entry in enumerate(codebook_entries(f, type_name, lookup)):
        for k in range(4):
            yield sign(_f32(_take(entry, 8 * k, 8)), 4 * group + k)


def codebook_entries(f: Fields, type_name: str, lookup: Lookup) -> Iterator[jax.Array]:
    """Yield the magnitudes of each four weights of an item, as bytes of a word: u32[J, R], eight of them."""
    if type_name.startswith("IQ3"):
        for group in range(8):
            index = _take(f["index"][group // 4], 8 * (group % 4), 8)
            if "high" in f:
                index = index | (_take(f["high"][0], group, 1) << np.uint32(8))
            yield lookup(index)
        return
    for group in range(4):
        entry = _IQ2_INDEX[type_name](f, group) << np.uint32(1)
        yield from (lookup(entry | np.uint32(half)) for half in range(2))


def _iq3_s(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    (word,) = f["sign"]
    return _codebook(f, "IQ3_S", lambda magnitude, s: _with_sign(magnitude, word, s), lookup)


def _iq3_xxs(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    return _codebook(f, "IQ3_XXS", _seven_bit_signs(f["sign"][0], 7, 0), lookup)


def _seven_bit_signs(word: jax.Array, stride: int, first: int) -> Callable[[jax.Array, int], jax.Array]:
    """Seven sign bits for each eight weights, the eighth makes the number of minus signs even."""
    parity = sign_parity(word)

    def sign(magnitude: jax.Array, s: int) -> jax.Array:
        start, k = first + s // 8 * stride, s % 8
        return _with_sign(magnitude, word, start + k) if k < 7 else _with_sign(magnitude, parity, start)

    return sign


def _iq2_s(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    (word,) = f["sign"]
    return _codebook(f, "IQ2_S", lambda magnitude, s: _with_sign(magnitude, word, s), lookup)


def _iq2_s_index(f: Fields, group: int) -> jax.Array:
    (low,), (high,) = f["index"], f["high"]
    return _take(low, 8 * group, 8) | (_take(high, 2 * group, 2) << np.uint32(8))


def _iq2_xs(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    """Four times nine bits of index and seven of signs, in two words."""
    signs = [_seven_bit_signs(word, 16, 9) for word in f["index"]]
    return _codebook(f, "IQ2_XS", lambda magnitude, s: signs[s // 16](magnitude, s % 16), lookup)


def _iq2_xs_index(f: Fields, group: int) -> jax.Array:
    return _take(f["index"][group // 2], 16 * (group % 2), 9)


def _iq2_xxs(f: Fields, lookup: Lookup) -> Iterator[jax.Array]:
    return _codebook(f, "IQ2_XXS", _seven_bit_signs(f["sign"][0], 7, 0), lookup)


def _iq2_xxs_index(f: Fields, group: int) -> jax.Array:
    return _take(f["index"][0], 8 * group, 8)


_IQ2_INDEX: Mapping[str, Callable[[Fields, int], jax.Array]] = {
    "IQ2_S": _iq2_s_index,
    "IQ2_XS": _iq2_xs_index,
    "IQ2_XXS": _iq2_xxs_index,
}
_CODES: Mapping[str, Callable[[Fields, Lookup], Iterator[jax.Array]]] = {
    "Q8_0": _bytes,
    "Q6_K": _six_bits,
    "Q5_K": _five_bits,
    "Q4_K": _four_bits,
    "Q5_1": _five_bits,
    "Q5_0": partial(_five_bits, zero=16),
    "Q4_0": partial(_four_bits, zero=8),
    "IQ4_NL": _iq4,
    "IQ4_XS": _iq4,
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ2_S": _iq2_s,
    "IQ2_XS": _iq2_xs,
    "IQ2_XXS": _iq2_xxs,
    "Q2_0": _two_bits,
}


# Scales --------------------------------------------------------------------------------------------------------------


def _k_scale(f: Fields, kind: int) -> jax.Array:
    """Six bits: of the scale (0) or the minimum (1)."""
    low, high = _take(f["scale"][0], 4 * kind, 4), _take(f["scale_high"][0], 2 * kind, 2)
    return _f32(low | (high << np.uint32(4)))


def _scale_d(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return (d,)


def _scale_k(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return (_k_scale(f, 0) * d,)


def _scale_q6_k(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return tuple(d * _signed_byte(f["scale"][0], half) for half in range(2))


def _scale_iq4_xs(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return (d * (_f32(f["scale"][0] | (f["scale_high"][0] << np.uint32(4))) - 32.0),)


def _scale_iq3_s(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return (d * (1.0 + 2.0 * _f32(f["scale"][0])),)


def _scale_iq3_xxs(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return (d * (0.5 + _f32(f["sign"][0] >> np.uint32(28))) * 0.5,)


def _scale_iq2(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return tuple(d * (0.5 + _f32(_take(f["scale"][0], 4 * half, 4))) * 0.25 for half in range(2))


def _scale_iq2_xxs(d: jax.Array, f: Fields) -> tuple[jax.Array, ...]:
    return (d * (0.5 + _f32(f["sign"][0] >> np.uint32(28))) * 0.25,)


_SCALES: Mapping[str, Callable[[jax.Array, Fields], tuple[jax.Array, ...]]] = {
    "Q8_0": _scale_d,
    "Q6_K": _scale_q6_k,
    "Q5_K": _scale_k,
    "Q4_K": _scale_k,
    "Q5_1": _scale_d,
    "Q5_0": _scale_d,
    "Q4_0": _scale_d,
    "IQ4_NL": _scale_d,
    "IQ4_XS": _scale_iq4_xs,
    "IQ3_S": _scale_iq3_s,
    "IQ3_XXS": _scale_iq3_xxs,
    "IQ2_S": _scale_iq2,
    "IQ2_XS": _scale_iq2,
    "IQ2_XXS": _scale_iq2_xxs,
    "Q2_0": _scale_d,
}
