"""Products of one input with dense matrices in planes: ``x`` times their transposes.

Up to `MAX_GEMV_ROWS` rows of x: products and sums in float32, matrices of one type in one launch, nothing decoded
outside of it. More: operands in bfloat16 (weights decoded in float32, rounded once), sums in float32; beyond
`MAX_KERNEL_ROWS` a matrix is decoded once, to bfloat16, for XLA's own product.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.planes import PlaneLayout, decode_planes
from strata_jax.kernels.quant_matmul import reference
from strata_jax.kernels.quant_matmul.blocks import (
    MIN_TILE_ROWS,
    MatmulBlocks,
    choose_decode_blocks,
    choose_gemv_launch,
    choose_matmul_blocks,
)
from strata_jax.kernels.quant_matmul.tiles import PlanePart
from strata_jax.memory.dense_planes import MAX_DECODED_WEIGHTS, MAX_KERNEL_ROWS

__all__ = ["MAX_GEMV_ROWS", "MatmulBlocks", "PlanePart", "quant_matmul", "quant_matmuls"]

MAX_GEMV_ROWS = 8


def quant_matmul(
    x: jax.Array, words: jax.Array, layout: PlaneLayout, *, backend: str | None = None, interpret: bool = False
) -> jax.Array:
    """Multiply by one matrix: f32[T, rows]. As `quant_matmuls`."""
    return quant_matmuls(x, (words,), (layout,), backend=backend, interpret=interpret)[0]


def quant_matmuls(
    x: jax.Array,
    words: Sequence[jax.Array],
    layouts: Sequence[PlaneLayout],
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Multiply ``x: f32[T, cols]`` by the transposes of matrices of ``cols`` columns: f32[T, rows] each.

    Args:
        words: u32[layout.num_words] of each matrix.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the kernels in Pallas' interpreter, on any device.

    Raises:
        ValueError: `x` or `words` do not fit the layouts, or `backend` is unknown.
    """
    for array, layout in zip(words, layouts, strict=True):
        _check(x, array, layout)
    few = x.shape[0] <= MAX_GEMV_ROWS

    def plain(x: jax.Array, *words: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(reference.matmul(x, w, layout, rounded=not few) for w, layout in zip(words, layouts))

    def kernel(x: jax.Array, *words: jax.Array) -> tuple[jax.Array, ...]:
        from strata_jax.kernels.quant_matmul import triton

        if few:
            return triton.gemv(x, words, layouts, choose_gemv_launch(x.shape[0], layouts), interpret=interpret)
        rounded = x.astype(jnp.bfloat16)
        return tuple(_multiply_many(rounded, w, layout, interpret) for w, layout in zip(words, layouts))

    return on_backend(backend, kernel, plain, x, *words)


def _multiply_many(x: jax.Array, words: jax.Array, layout: PlaneLayout, interpret: bool) -> jax.Array:
    """``x: bf16[T, cols]`` times the transpose of the matrix: f32[T, rows]."""
    from strata_jax.kernels.quant_matmul import triton

    num_rows = x.shape[0]
    if layout.tile_rows < MIN_TILE_ROWS:
        return _multiply_decoded(x, decode_planes(words, layout).astype(jnp.bfloat16))
    if num_rows > MAX_KERNEL_ROWS and layout.rows * layout.cols <= MAX_DECODED_WEIGHTS:
        return _multiply_decoded(x, triton.decode(words, layout, choose_decode_blocks(layout), interpret))
    blocks = choose_matmul_blocks(num_rows, layout)
    padded = jnp.pad(x, ((0, -num_rows % blocks.rows), (0, 0)))
    line = jnp.zeros(1, jnp.int32)
    return triton.matmul(padded, words[None], line, PlanePart(layout), blocks, interpret=interpret)[:num_rows]


def _multiply_decoded(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _check(x: jax.Array, words: jax.Array, layout: PlaneLayout) -> None:
    if x.ndim != 2 or x.shape[-1] != layout.cols or words.shape != (layout.num_words,):
        raise ValueError(
            f"x{list(x.shape)} times {layout.type_name} {layout.rows} x {layout.cols} in {layout.num_words} words: "
            f"got {words.shape[0] if words.ndim == 1 else list(words.shape)} words"
        )
