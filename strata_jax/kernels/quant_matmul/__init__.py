"""Products with one dense matrix in planes: ``x`` times its transpose, without a decoded copy of the matrix.

Up to `MAX_GEMV_ROWS` rows of x: products and sums in float32. More: operands in bfloat16 (weights decoded in float32,
rounded once), sums in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.planes import PlaneLayout, decode_planes
from strata_jax.kernels.quant_matmul import triton
from strata_jax.kernels.quant_matmul.blocks import MIN_TILE_ROWS, MatmulBlocks, choose_gemv_blocks, choose_matmul_blocks
from strata_jax.kernels.quant_matmul.tiles import PlanePart

__all__ = ["MAX_GEMV_ROWS", "MatmulBlocks", "PlanePart", "quant_matmul"]

MAX_GEMV_ROWS = 8


def quant_matmul(x: jax.Array, words: jax.Array, layout: PlaneLayout) -> jax.Array:
    """Multiply ``x: f32[T, cols]`` by the transpose of the matrix in ``words: u32[layout.num_words]``: f32[T, rows].

    Matrices whose planes interleave fewer than 16 rows (those of few rows) are decoded on every device.

    Raises:
        ValueError: `x` or `words` do not fit the layout.
    """
    if x.shape[-1] != layout.cols or words.shape != (layout.num_words,):
        raise ValueError(
            f"x{list(x.shape)} times {layout.type_name} {layout.rows} x {layout.cols} in {layout.num_words} words: "
            f"got {words.shape[0] if words.ndim == 1 else list(words.shape)} words"
        )
    part, num_rows, line = PlanePart(layout), x.shape[0], jnp.zeros(1, jnp.int32)
    few = num_rows <= MAX_GEMV_ROWS
    rounded = x if few else x.astype(jnp.bfloat16)

    def plain() -> jax.Array:
        dims = (((1,), (1,)), ((), ()))
        matrix = decode_planes(words, layout)
        return jax.lax.dot_general(rounded.astype(jnp.float32), matrix, dims, precision=jax.lax.Precision.HIGHEST)

    def kernel() -> jax.Array:
        if few:
            return triton.gemv(x, words[None], line, part, choose_gemv_blocks(layout))
        blocks = choose_matmul_blocks(num_rows, layout)
        padded = jnp.pad(rounded, ((0, -num_rows % blocks.rows), (0, 0)))
        return triton.matmul(padded, words[None], line, part, blocks)[:num_rows]

    if layout.tile_rows < MIN_TILE_ROWS:
        return plain()
    return jax.lax.platform_dependent(cuda=kernel, default=plain)
