"""Packed GGUF blocks to numbers: `dequantize` from bytes, `dequantize_words` from 32-bit words.

Not here: encoding (files come quantised; K/V cells have `kernels/kv_codec`) and matmuls on packed weights.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import BlockType, block_type
from strata_jax.kernels.dequant.isolate import isolated
from strata_jax.kernels.dequant.reference import DECODERS

__all__ = ["dequantize", "dequantize_words", "isolated"]

_FLAT = frozenset({"F32", "F16", "BF16"})
"""Formats without blocks, which need no isolation: XLA may fuse them into their consumer."""


def dequantize(blocks: jax.Array, type_name: str, *, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Decode rows of packed blocks, equal to ggml's decoders to the bit.

    Args:
        blocks: u8[..., row_bytes], rows of whole blocks, any leading dimensions.
        type_name: a GGUF type name such as ``"IQ3_S"``; static under `jax.jit`.
        dtype: of the result; values are computed in float32 and rounded once.

    Returns:
        dtype[..., n] with ``n = row_bytes / block_bytes * block_len``.

    Raises:
        FormatError: no decoder for `type_name`. ValueError: `blocks` is not u8 or its rows are not whole blocks.
    """
    block = _known(type_name)
    if blocks.dtype != jnp.uint8:
        raise ValueError(f"{type_name} blocks are uint8, got {blocks.dtype}; 32-bit words go to dequantize_words")
    *lead, row_bytes = blocks.shape
    if row_bytes % block.block_bytes:
        raise ValueError(
            f"a {type_name} row of {row_bytes} bytes is not whole blocks of {block.block_bytes} bytes: "
            f"{row_bytes % block.block_bytes} left over; {row_bytes - row_bytes % block.block_bytes} bytes would work"
        )
    num_blocks = math.prod(lead) * (row_bytes // block.block_bytes)
    shape = (*lead, row_bytes // block.block_bytes * block.block_len)
    if num_blocks == 0:
        return jnp.zeros(shape, dtype)

    def decode(b: jax.Array) -> jax.Array:
        return DECODERS[type_name](b).astype(dtype)

    packed = blocks.reshape(num_blocks, block.block_bytes)
    return (decode(packed) if type_name in _FLAT else isolated(decode, packed)).reshape(shape)


def dequantize_words(words: jax.Array, type_name: str, num_bytes: int, *, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Decode packed bytes that are held as little-endian 32-bit words.

    Args:
        words: u32[..., num_words]; the last word may be part padding, further words are ignored.
        type_name: as for `dequantize`; static.
        num_bytes: packed bytes in each row of words, whole blocks; static.
        dtype: of the result.

    Returns:
        dtype[..., n], all weights of the `num_bytes` in order. A matrix of whole-block rows can be reshaped freely.

    Raises:
        FormatError, ValueError: as `dequantize`; ValueError also when `num_bytes` do not fit the words.
    """
    _known(type_name)
    *lead, num_words = words.shape
    if words.dtype != jnp.uint32:
        raise ValueError(f"packed words are uint32, got {words.dtype}; bytes go to dequantize")
    if num_bytes > 4 * num_words:
        raise ValueError(f"{num_bytes} bytes of {type_name} do not fit {num_words} words ({4 * num_words} bytes)")
    if type_name == "F32" and num_bytes % 4 == 0:
        return jax.lax.bitcast_convert_type(words[..., : num_bytes // 4], jnp.float32).astype(dtype)

    def to_bytes(words: jax.Array) -> jax.Array:
        used = words[..., : -(-num_bytes // 4)]
        return jax.lax.bitcast_convert_type(used, jnp.uint8).reshape(*lead, -1)[..., :num_bytes]

    return dequantize(isolated(to_bytes, words), type_name, dtype=dtype)


def _known(type_name: str) -> BlockType:
    if type_name not in DECODERS:
        raise FormatError(f"no decoder for type {type_name!r}; there is one for {', '.join(DECODERS)}")
    return block_type(type_name)
