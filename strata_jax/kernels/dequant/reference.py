"""Decoders from packed GGUF blocks to float32 in plain jnp: one function per format.

Every decoder takes `b`: u8[N, block_bytes] (N blocks) and returns f32[N, ...] whose trailing dimensions are the block's
own structure and multiply to the block length. They keep ggml's order of operations, so results are equal to the bit,
signs of zero, infinities and NaN of arbitrary scale bits included. Products of a format's scales and codes need at most
24 significant bits, hence are exact; the formats with a minimum round once, in the subtraction, with or without fused
multiply-add.

Runs of 16 or 32 weights that share all but their code are split once more, as 4 x 4, 8 x 2 or 8 x 4. That is a matter
of speed: LLVM vectorises such short constant loops far better (2026-08, XLA-CPU, two cores: Q8_0 12.2 weights/ns as
8 x 4 and 2.2 as 32; Q6_K 12.1 as 4 x 4 and 2.0 as 16). Formats for which another shape was faster keep that shape.

Source of the layouts: ggml's blocks, as `gguf.quants` (the tests' oracle) decodes them. Q2_0: 64 weights in 18 bytes,
an f16 scale and 2-bit codes.

Shapes: N blocks. Names: `d` block scale, `dl` scale of a group, `q` integer codes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.kernels.dequant import grids
from strata_jax.kernels.dequant.isolate import isolated

_NIBBLES = np.array([[0], [4]], np.uint8)


# Fields of a block ----------------------------------------------------------------------------------------------------


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _i32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32)


def _u16(b: jax.Array) -> jax.Array:
    """u8[..., 2 n] -> u16[..., n], little endian."""
    return b[..., 0::2].astype(jnp.uint16) | (b[..., 1::2].astype(jnp.uint16) << np.uint16(8))


def _u32(b: jax.Array) -> jax.Array:
    """u8[..., 4 n] -> u32[..., n], little endian."""
    part = b.reshape(*b.shape[:-1], -1, 4).astype(jnp.uint32)
    return part[..., 0] | (part[..., 1] << 8) | (part[..., 2] << 16) | (part[..., 3] << 24)


def _f16(b: jax.Array) -> jax.Array:
    """u8[N, 2] -> f32[N, 1]: the float16 stored there."""
    return _f32(jax.lax.bitcast_convert_type(_u16(b), jnp.float16))


def _i8(b: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(b, jnp.int8)


def _fields(b: jax.Array, bits: int) -> jax.Array:
    """u8[N, n] -> u8[N, n * 8 / bits]: the bit fields of each byte, lowest first."""
    parts = (b[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
    return parts.reshape(*b.shape[:-1], -1)


def _nibbles(b: jax.Array) -> jax.Array:
    """u8[..., n] -> u8[..., 2, n]: all low halves, then all high halves."""
    return (b[..., None, :] >> _NIBBLES) & np.uint8(15)


# Plain numbers --------------------------------------------------------------------------------------------------------


def f32(b: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(_u32(b), jnp.float32)


def f16(b: jax.Array) -> jax.Array:
    return _f16(b)


def bf16(b: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(_u16(b).astype(jnp.uint32) << 16, jnp.float32)


# Blocks of 32 (Q2_0: 64) ----------------------------------------------------------------------------------------------


def q8_0(b: jax.Array) -> jax.Array:
    return _f32(_i8(b[:, 2:]).reshape(-1, 8, 4)) * _f16(b[:, :2])[..., None]


def q4_0(b: jax.Array) -> jax.Array:
    q = _nibbles(b[:, 2:]).reshape(-1, 2, 4, 4)
    return _f32(_i32(q) - 8) * _f16(b[:, :2])[..., None, None]


def _five_bits(low: jax.Array, high: jax.Array) -> jax.Array:
    """u8[N, 16] (low four bits, two codes a byte) and u8[N, 4] (fifth bits) -> i32[N, 2, 8, 2] codes."""
    word = _i32(isolated(_u32, high))
    fifth = (word >> np.arange(32)).reshape(-1, 2, 8, 2) & 1
    return _i32(_nibbles(low).reshape(-1, 2, 8, 2)) | (fifth << 4)


def q5_0(b: jax.Array) -> jax.Array:
    q = _five_bits(b[:, 6:], b[:, 2:6])
    return _f32(q - 16) * _f16(b[:, :2])[..., None, None]


def q5_1(b: jax.Array) -> jax.Array:
    q = _five_bits(b[:, 8:], b[:, 4:8])
    return _f32(q) * _f16(b[:, :2])[..., None, None] + _f16(b[:, 2:4])[..., None, None]


def q2_0(b: jax.Array) -> jax.Array:
    return _f32(_i32(_fields(b[:, 2:], 2)) - 1) * _f16(b[:, :2])


def _iq4_value(code: jax.Array) -> jax.Array:
    """Map 4-bit codes to codebook values by four levels of selection (IQ4_XS: 2.4 weights/ns a core, by gather 2.1)."""
    level: list[jax.Array] = [jnp.float32(v) for v in grids.iq4_values()]
    for bit in range(4):
        is_set = ((code >> np.uint8(bit)) & np.uint8(1)) != 0
        level = [jnp.where(is_set, high, low) for low, high in zip(level[0::2], level[1::2])]
    return level[0]


def iq4_nl(b: jax.Array) -> jax.Array:
    return _iq4_value(_nibbles(b[:, 2:])) * _f16(b[:, :2])[..., None]


# Blocks of 256 with group scales --------------------------------------------------------------------------------------


def _k_scales(b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """u8[N, 16] (two f16 and twelve bytes of 6-bit fields) -> f32[N, 8] group scales and f32[N, 8] group minima."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]

    def six_bits(first: jax.Array, rest: jax.Array) -> jax.Array:
        return _f32(jnp.concatenate([first & np.uint8(63), rest | ((first >> np.uint8(2)) & np.uint8(48))], -1))

    scale = six_bits(low, high & np.uint8(15))
    minimum = six_bits(mid, high >> np.uint8(4))
    return scale * _f16(b[:, :2]), minimum * _f16(b[:, 2:4])


def q4_k(b: jax.Array) -> jax.Array:
    dl, ml = _k_scales(b[:, :16])
    q = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _f32(q) * dl[..., None] - ml[..., None]


def q5_k(b: jax.Array) -> jax.Array:
    dl, ml = _k_scales(b[:, :16])
    q = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _f32(q | (high << np.uint8(4))) * dl[..., None] - ml[..., None]


def q6_k(b: jax.Array) -> jax.Array:
    dl = _f16(b[:, 208:]) * _f32(_i8(b[:, 192:208]))
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)) & np.uint8(3)
    q = (low | (high << np.uint8(4))).reshape(-1, 2, 4, 2, 4, 4)
    return _f32(_i32(q) - 32) * dl.reshape(-1, 2, 4, 2, 1, 1)


def iq4_xs(b: jax.Array) -> jax.Array:
    def scales(b: jax.Array) -> jax.Array:
        high = (_i32(_u16(b[:, 2:4])) >> np.arange(0, 16, 2)) & 3
        return _f16(b[:, :2]) * _f32((_i32(_fields(b[:, 4:8], 4)) | (high << 4)) - 32)

    dl = isolated(scales, b)
    return _iq4_value(_nibbles(b[:, 8:].reshape(-1, 8, 16))) * dl[..., None, None]


# Codebooks: eight weights are one 32-bit word of codes and sign bits, looked up once, unpacked by shifts -------------


def _unpack_words(
    words: jax.Array, dl: jax.Array, code_bits: int, value: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Decode i32[N, 32] words (eight codes of `code_bits` from bit 0, then eight sign bits), scaled by f32[N, groups].

    Returns f32[N, 32, 8]. Scales are repeated per word, since a scale per 16 weights would split the loop (1.5 -> 3.2
    weights/ns for IQ2_S, two cores).
    """
    dl = isolated(lambda dl: jnp.repeat(dl, words.shape[1] // dl.shape[1], axis=1), dl)[..., None]
    word = words[..., None]
    magnitude = value((word >> np.arange(0, 8 * code_bits, code_bits)) & ((1 << code_bits) - 1))
    to_bit_31 = 31 - 8 * code_bits - np.arange(8)
    sign = (word << to_bit_31) & np.int32(-(2**31))
    signed = jax.lax.bitcast_convert_type(_f32(magnitude), jnp.int32) | sign
    return jax.lax.bitcast_convert_type(signed, jnp.float32) * dl


def _lookup(type_name: str, idx: jax.Array) -> jax.Array:
    """i32[N, n] -> i32[N, n]: the packed codes of a codebook entry."""
    return jnp.asarray(grids.packed_codes(type_name).astype(np.int32)).at[idx].get(mode="promise_in_bounds")


def _iq3_words(type_name: str, idx: jax.Array, signs: jax.Array) -> jax.Array:
    """idx i32[N, 64] (four weights each), signs i32[N, 32] -> i32[N, 32]."""
    codes = _lookup(type_name, idx).reshape(-1, 32, 2)
    return codes[..., 0] | (codes[..., 1] << 12) | (signs << 24)


def _iq2_words(type_name: str, idx: jax.Array, signs: jax.Array) -> jax.Array:
    """idx i32[N, 32] (eight weights each), signs i32[N, 32] -> i32[N, 32]."""
    return _lookup(type_name, idx) | (signs << 16)


def _packed_signs(aux: jax.Array) -> jax.Array:
    """u32[N, 8] -> i32[N, 32]: four 7-bit sign indices a word, each standing for eight sign bits."""
    idx = (_i32(aux)[..., None] >> np.arange(0, 28, 7)) & 127
    table = jnp.asarray(grids.sign_bytes().astype(np.int32))
    return table.at[idx.reshape(-1, 32)].get(mode="promise_in_bounds")


def _iq2_value(code: jax.Array) -> jax.Array:
    return 8 + 17 * code + (code >> 1)  # 8, 25, 43


def iq3_s(b: jax.Array) -> jax.Array:
    def words(b: jax.Array) -> jax.Array:
        idx = _i32(b[:, 2:66]) | (_i32(_fields(b[:, 66:74], 1)) << 8)
        return _iq3_words("IQ3_S", idx, _i32(b[:, 74:106]))

    def scales(b: jax.Array) -> jax.Array:
        return _f16(b[:, :2]) * (1 + 2 * _f32(_fields(b[:, 106:110], 4)))

    return _unpack_words(isolated(words, b), scales(b), 3, lambda code: 2 * code + 1)


def iq3_xxs(b: jax.Array) -> jax.Array:
    def words(b: jax.Array) -> jax.Array:
        return _iq3_words("IQ3_XXS", _i32(b[:, 2:66]), _packed_signs(_u32(b[:, 66:98])))

    def scales(b: jax.Array) -> jax.Array:
        return _f16(b[:, :2]) * (0.5 + _f32(_u32(b[:, 66:98]) >> 28)) * 0.5

    return _unpack_words(
        isolated(words, b), scales(b), 3, lambda code: 8 * code + 4 + 2 * ((code + 1) >> 3)
    )  # 4 ... 52, 62


def iq2_s(b: jax.Array) -> jax.Array:
    def words(b: jax.Array) -> jax.Array:
        idx = _i32(b[:, 2:34]) | (_i32(_fields(b[:, 66:74], 2)) << 8)
        return _iq2_words("IQ2_S", idx, _i32(b[:, 34:66]))

    def scales(b: jax.Array) -> jax.Array:
        return _f16(b[:, :2]) * (0.5 + _f32(_fields(b[:, 74:82], 4))) * 0.25

    return _unpack_words(isolated(words, b), scales(b), 2, _iq2_value)


def iq2_xs(b: jax.Array) -> jax.Array:
    def words(b: jax.Array) -> jax.Array:
        q = _i32(_u16(b[:, 2:66]))
        signs = jnp.asarray(grids.sign_bytes().astype(np.int32)).at[q >> 9].get(mode="promise_in_bounds")
        return _iq2_words("IQ2_XS", q & 511, signs)

    def scales(b: jax.Array) -> jax.Array:
        return _f16(b[:, :2]) * (0.5 + _f32(_fields(b[:, 66:74], 4))) * 0.25

    return _unpack_words(isolated(words, b), scales(b), 2, _iq2_value)


def iq2_xxs(b: jax.Array) -> jax.Array:
    def words(b: jax.Array) -> jax.Array:
        groups = b[:, 2:].reshape(-1, 8, 8)
        signs = _packed_signs(_u32(groups[..., 4:])[..., 0])
        return _iq2_words("IQ2_XXS", _i32(groups[..., :4]).reshape(-1, 32), signs)

    def scales(b: jax.Array) -> jax.Array:
        aux = _u32(b[:, 2:].reshape(-1, 8, 8)[..., 4:])[..., 0]
        return _f16(b[:, :2]) * (0.5 + _f32(aux >> 28)) * 0.25

    return _unpack_words(isolated(words, b), scales(b), 2, _iq2_value)


DECODERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q6_K": q6_k,
    "Q5_K": q5_k,
    "Q4_K": q4_k,
    "Q4_0": q4_0,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "IQ3_S": iq3_s,
    "IQ3_XXS": iq3_xxs,
    "IQ2_S": iq2_s,
    "IQ2_XS": iq2_xs,
    "IQ2_XXS": iq2_xxs,
    "Q2_0": q2_0,
}
