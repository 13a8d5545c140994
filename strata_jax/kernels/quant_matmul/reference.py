"""The product with a dense matrix in planes in plain `jnp`: the whole matrix decoded to float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.planes import PlaneLayout, decode_planes


def matmul(x: jax.Array, words: jax.Array, layout: PlaneLayout, *, rounded: bool) -> jax.Array:
    """``x: f32[T, cols]`` times the transpose of the matrix, f32[T, rows]; ``rounded``: operands to bfloat16 first."""
    matrix = decode_planes(words, layout)
    if rounded:
        x, matrix = (operand.astype(jnp.bfloat16).astype(jnp.float32) for operand in (x, matrix))
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, matrix, dims, precision=jax.lax.Precision.HIGHEST)
