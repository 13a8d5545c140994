"""Encoders and decoders of one side (K or V) of a cell in plain jnp. Layouts: `strata_jax.kv_types`.

Encoders take f32[..., H, d] and return u32[..., words]; decoders take the words, H and d and return f32[..., H * d].
`q4_0` makes ggml's own blocks of the rotated head (`quantize_row_q4_0_ref`): the value of largest magnitude maps to
code 0, that is -8 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.kernels.dequant import dequantize_words, isolated
from strata_jax.kv_types import Q4_BLOCK, Q4_BLOCK_BYTES, int8_group

_F16_MAX = 65504.0


def hadamard(x: jax.Array) -> jax.Array:
    """Rotate f32[..., d] by the normalised Hadamard matrix of order d (Sylvester's order); d is a power of two.

    The matrix is symmetric and orthogonal: applying it twice returns `x` up to rounding. Four-way butterflies, that is
    sums in a fixed order: unlike a product with the matrix, a head's result cannot depend on how many heads are rotated
    together (XLA-CPU picks its matmul by the number of rows), and it is three times as fast there (2026-08).
    """
    head_dim = x.shape[-1]
    if head_dim & (head_dim - 1) or head_dim == 0:
        raise ValueError(f"a Hadamard rotation needs a power of two, got {head_dim} values")
    rows, stride = x.reshape(-1, head_dim), 1
    while stride < head_dim:
        order = min(4, head_dim // stride)
        rows = isolated(partial(_butterfly, order=order, stride=stride), rows).reshape(-1, head_dim)
        stride *= order
    return (rows * np.float32(head_dim**-0.5)).reshape(x.shape)


def _butterfly(rows: jax.Array, *, order: int, stride: int) -> jax.Array:
    """Apply the matrix of order 2 or 4 to the values that lie `stride` apart: f32[N, d] -> f32[N, ., order, stride]."""
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], np.float32)[:order, :order, None]
    parts = rows.reshape(len(rows), -1, order, stride)
    total = parts[:, :, 0:1] * signs[:, 0]
    for idx in range(1, order):
        total = total + parts[:, :, idx : idx + 1] * signs[:, idx]
    return total


# Words ----------------------------------------------------------------------------------------------------------------


def _words_from_bytes(b: jax.Array) -> jax.Array:
    """u8[..., n] -> u32[..., ceil(n / 4)], little endian, zero padded."""
    padding = -b.shape[-1] % 4
    b = jnp.pad(b, [(0, 0)] * (b.ndim - 1) + [(0, padding)])
    part = b.reshape(*b.shape[:-1], -1, 4).astype(jnp.uint32)
    return part[..., 0] | (part[..., 1] << 8) | (part[..., 2] << 16) | (part[..., 3] << 24)


def _words_from_halves(h: jax.Array) -> jax.Array:
    """u16[..., n] -> u32[..., ceil(n / 2)], little endian, zero padded."""
    h = jnp.pad(h, [(0, 0)] * (h.ndim - 1) + [(0, h.shape[-1] % 2)])
    part = h.reshape(*h.shape[:-1], -1, 2).astype(jnp.uint32)
    return part[..., 0] | (part[..., 1] << 16)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1)


def _halves(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _bytes_of_halves(h: jax.Array) -> jax.Array:
    """u16[...] -> u8[..., 2], little endian."""
    return jnp.stack([h & np.uint16(255), h >> np.uint16(8)], -1).astype(jnp.uint8)


# Floats ---------------------------------------------------------------------------------------------------------------


def encode_f32(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(_flat(x), jnp.uint32)


def encode_f16(x: jax.Array) -> jax.Array:
    """Round to f16; magnitudes above its largest value, 65504, are clamped to it rather than stored as infinity."""
    return _words_from_halves(_halves(_flat(jnp.clip(x, -_F16_MAX, _F16_MAX)).astype(jnp.float16)))


def encode_bf16(x: jax.Array) -> jax.Array:
    return _words_from_halves(_halves(_flat(x).astype(jnp.bfloat16)))


def decode_f32(words: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    return dequantize_words(words, "F32", 4 * num_kv_heads * head_dim)


def decode_f16(words: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    return dequantize_words(words, "F16", 2 * num_kv_heads * head_dim)


def decode_bf16(words: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    return dequantize_words(words, "BF16", 2 * num_kv_heads * head_dim)


# int8 -----------------------------------------------------------------------------------------------------------------


def encode_int8(x: jax.Array) -> jax.Array:
    """Round each group to 255 levels of its stored scale; error <= scale / 2 (scale = largest magnitude / 127)."""
    grouped = _flat(x).reshape(*x.shape[:-2], -1, int8_group(x.shape[-1]))
    largest = jnp.max(jnp.abs(grouped), -1)
    stored = jnp.minimum(largest / 127, _F16_MAX).astype(jnp.float16)
    stored = jax.lax.optimization_barrier(stored)  # XLA may drop the rounding otherwise
    scale = stored.astype(jnp.float32)[..., None]
    codes = jnp.where(scale > 0, jnp.clip(jnp.round(grouped / scale), -127, 127), 0).astype(jnp.int8)
    code_bytes = jax.lax.bitcast_convert_type(_flat(codes), jnp.uint8)
    scale_bytes = _flat(_bytes_of_halves(_halves(stored)))
    return _words_from_bytes(jnp.concatenate([code_bytes, scale_bytes], -1))


def decode_int8(words: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    num_values, group = num_kv_heads * head_dim, int8_group(head_dim)
    num_groups, lanes = num_values // group, 4 if group % 4 == 0 else 1  # lanes: see kernels/dequant/reference.py

    def decode(rows: jax.Array) -> jax.Array:
        b = jax.lax.bitcast_convert_type(rows, jnp.uint8).reshape(len(rows), -1)
        halves = b[:, num_values : num_values + 2 * num_groups].reshape(-1, num_groups, 2).astype(jnp.uint16)
        bits = halves[..., 0] | (halves[..., 1] << np.uint16(8))
        scale = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
        codes = jax.lax.bitcast_convert_type(b[:, :num_values], jnp.int8).astype(jnp.float32)
        return codes.reshape(-1, num_groups, group // lanes, lanes) * scale[..., None, None]

    return isolated(decode, words.reshape(-1, words.shape[-1]))


# q4_0 -----------------------------------------------------------------------------------------------------------------


def q4_0_blocks(rows: jax.Array) -> jax.Array:
    """Encode f32[..., n] as ggml Q4_0: u8[..., n / 32 * 18], equal to ggml's own encoder for finite input."""
    x = rows.reshape(*rows.shape[:-1], -1, Q4_BLOCK)
    at_largest = jnp.argmax(jnp.abs(x), -1, keepdims=True)
    d = jnp.take_along_axis(x, at_largest, -1) * np.float32(-0.125)
    inverse = jnp.where(d == 0, np.float32(0), 1 / jnp.where(d == 0, np.float32(1), d))
    steps = jnp.clip(x * inverse, -16, 16)  # never clips; keeps the product and the sum below two roundings, as in ggml
    codes = jnp.clip((steps + np.float32(8.5)).astype(jnp.int32), 0, 15).astype(jnp.uint8)
    packed = codes[..., :16] | (codes[..., 16:] << np.uint8(4))
    scale = _bytes_of_halves(_halves(d[..., 0].astype(jnp.float16)))
    return _flat(jnp.concatenate([scale, packed], -1))


def encode_q4_0(x: jax.Array) -> jax.Array:
    return _words_from_bytes(q4_0_blocks(_flat(hadamard(x))))


def decode_q4_0(words: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    num_values = num_kv_heads * head_dim
    rotated = dequantize_words(words, "Q4_0", num_values // Q4_BLOCK * Q4_BLOCK_BYTES)
    return hadamard(rotated.reshape(*words.shape[:-1], num_kv_heads, head_dim))


ENCODERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "f32": encode_f32,
    "f16": encode_f16,
    "bf16": encode_bf16,
    "int8": encode_int8,
    "q4_0": encode_q4_0,
}

DECODERS: dict[str, Callable[[jax.Array, int, int], jax.Array]] = {
    "f32": decode_f32,
    "f16": decode_f16,
    "bf16": decode_bf16,
    "int8": decode_int8,
    "q4_0": decode_q4_0,
}
