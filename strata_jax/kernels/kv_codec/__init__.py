"""K/V cells to packed 32-bit words and back. Layouts and sizes: `strata_jax.kv_types`.

Values must be finite. Arithmetic is float32. Leading dimensions are free (tokens, or pages x cells).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.kv_codec.reference import DECODERS, ENCODERS, hadamard
from strata_jax.kv_types import KV_TYPES, cell_bytes, sides

__all__ = ["KV_TYPES", "cell_bytes", "decode_k", "decode_v", "encode_k", "encode_v", "hadamard"]


def encode_k(x: jax.Array, kv_type: str) -> jax.Array:
    """Pack keys.

    Args:
        x: float[..., num_kv_heads, head_dim], finite.
        kv_type: one of `KV_TYPES`; static under `jax.jit`.

    Returns:
        u32[..., k_words] with ``4 * k_words == cell_bytes(...)[0]``.

    Raises:
        ConfigError: the type is unknown or does not fit `head_dim`.
    """
    return _encode(x, kv_type, 0)


def encode_v(x: jax.Array, kv_type: str) -> jax.Array:
    """Pack values: as `encode_k`, with the V format and ``cell_bytes(...)[1]``."""
    return _encode(x, kv_type, 1)


def decode_k(words: jax.Array, kv_type: str, num_kv_heads: int, head_dim: int) -> jax.Array:
    """Unpack keys.

    ``q4_0`` is stored in a rotated basis; the result is rotated back, so that no caller needs to know. A kernel can
    save that by rotating each query once instead (`hadamard` is orthogonal and its own inverse).

    Args:
        words: u32[..., k_words], as `encode_k` made them.
        kv_type, num_kv_heads, head_dim: static.

    Returns:
        f32[..., num_kv_heads, head_dim].

    Raises:
        ConfigError: as `encode_k`. ValueError: `words` is not u32 or has another length than the type needs.
    """
    return _decode(words, kv_type, num_kv_heads, head_dim, 0)


def decode_v(words: jax.Array, kv_type: str, num_kv_heads: int, head_dim: int) -> jax.Array:
    """Unpack values: as `decode_k`, with the V format."""
    return _decode(words, kv_type, num_kv_heads, head_dim, 1)


def _encode(x: jax.Array, kv_type: str, side: int) -> jax.Array:
    *_, num_kv_heads, head_dim = x.shape
    num_bytes = cell_bytes(kv_type, num_kv_heads, head_dim)[side]
    words = ENCODERS[sides(kv_type)[side]](x.astype(jnp.float32))
    assert words.shape[-1] * 4 == num_bytes
    return words


def _decode(words: jax.Array, kv_type: str, num_kv_heads: int, head_dim: int, side: int) -> jax.Array:
    num_bytes = cell_bytes(kv_type, num_kv_heads, head_dim)[side]
    if words.dtype != jnp.uint32 or words.shape[-1] * 4 != num_bytes:
        raise ValueError(
            f"{'KV'[side]} of a kv.type={kv_type} cell with {num_kv_heads} heads of {head_dim} is "
            f"uint32[{num_bytes // 4}] ({num_bytes} bytes), got {words.dtype}[{words.shape[-1]}]"
        )
    values = DECODERS[sides(kv_type)[side]](words, num_kv_heads, head_dim)
    return values.reshape(*words.shape[:-1], num_kv_heads, head_dim)
