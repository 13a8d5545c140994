"""Products with matrices that are held as floats, for a GPU: by tensor cores where there are many rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.split_dot import cut
from strata_jax.memory.layout import MAX_WINDOW_TOKENS

CACHED_WEIGHTS = 4 * 2**20  # 16 MiB of float32: rows of x after the first find the matrix in the cache
_NUM_PARTS = 3  # bfloat16 numbers that hold a float32
_WEIGHT_PARTS = {jnp.dtype(jnp.bfloat16): 1, jnp.dtype(jnp.float16): 2, jnp.dtype(jnp.float32): 3}
_TILE_ROWS = 32  # of x: cut into its parts it still fills one tile of tensor cores
_TRANSPOSED = (((1,), (1,)), ((), ()))


def float_matmul(x: jax.Array, w: jax.Array, *, rounded: bool) -> jax.Array:
    """Multiply ``x: f32[T, n]`` by the transpose of ``w: f32/f16/bf16[m, n]``: f32[T, m], all finite.

    Operands are cut into bfloat16 parts, as many as hold them; products of parts that are smaller than float32 can tell
    are left out. So the error is that of a product in float32: three products for a matrix in bfloat16, six for a small
    one in float32. Few rows take one pass over a small matrix, without tensor cores. A large one in float16 or float32
    is not cut, for its parts would take more memory than it does.

    Args:
        rounded: operands of more than 32 rows count with 8 bits: one product.
    """
    num_rows, small = x.shape[0], w.size <= CACHED_WEIGHTS
    if num_rows <= MAX_WINDOW_TOKENS and small:
        return jnp.sum(x[:, None, :] * w.astype(jnp.float32), axis=-1)
    if rounded and num_rows > _TILE_ROWS:
        return _dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    if w.dtype == jnp.bfloat16:
        return _sum_parts(_dot(jnp.concatenate(cut(x, _NUM_PARTS)), w).reshape(_NUM_PARTS, num_rows, -1))
    if small:
        return _by_parts(x, w)
    return jax.lax.dot_general(x, w.astype(jnp.float32), _TRANSPOSED, precision=jax.lax.Precision.HIGHEST)


def _by_parts(x: jax.Array, w: jax.Array) -> jax.Array:
    """One product for each part of ``x``, with those parts of ``w`` that count beside it."""
    num_rows, w_parts = x.shape[0], cut(w.astype(jnp.float32), _WEIGHT_PARTS[w.dtype])
    by_size: list[list[jax.Array]] = [[] for _ in range(_NUM_PARTS)]
    for i, part in enumerate(cut(x, _NUM_PARTS)):
        beside = w_parts[: _NUM_PARTS - i]
        products = _dot(part, jnp.concatenate(beside)).reshape(num_rows, len(beside), -1)
        for j in range(len(beside)):
            by_size[i + j].append(products[:, j])
    return _sum_parts([sum(products[1:], products[0]) for products in by_size])


def _sum_parts(parts: jax.Array | list[jax.Array]) -> jax.Array:
    """The sum of parts that become smaller, from the smallest on."""
    return parts[0] + (parts[1] + parts[2])


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, _TRANSPOSED, preferred_element_type=jnp.float32)
