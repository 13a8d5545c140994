"""Products of float32 tiles on tensor cores, in the bodies of kernels, as exact as is asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp

DotDimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def split_dot(a: jax.Array, b: jax.Array, dimensions: DotDimensions, num_parts: int) -> jax.Array:
    """As `jax.lax.dot_general` of finite float32 operands, which count with about ``9 num_parts`` bits: f32.

    Values are cut into bfloat16: with 2, a product is off by 2^-16 of its magnitude at most, with 3 by no more than in
    float32; the product of two third parts is left out. Cutting takes bit operations, because a GPU does few
    conversions a clock.
    """
    if num_parts == 1:
        return _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dimensions)
    a_parts, b_parts = cut(a, num_parts), cut(b, num_parts)
    pairs = [(i, j) for i in range(num_parts) for j in range(num_parts) if i + j <= num_parts]
    total, *smallest_first = (_dot(a_parts[i], b_parts[j], dimensions) for i, j in sorted(pairs, key=sum, reverse=True))
    for product in smallest_first:
        total = total + product
    return total


def _dot(a: jax.Array, b: jax.Array, dimensions: DotDimensions) -> jax.Array:
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def cut(x: jax.Array, num_parts: int) -> list[jax.Array]:
    """Cut finite ``x: f32[...]`` into bfloat16 parts, largest first, together about ``9 num_parts`` bits of it."""
    parts = []
    for _ in range(num_parts):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)  # to the nearest
        parts.append(jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16))
        x = x - jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return parts
