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
from strata_jax.kernels.quant_matmul.tiles import PlanePart, own_words
from strata_jax.memory.dense_planes import MAX_DECODED_WEIGHTS, MAX_KERNEL_ROWS

__all__ = ["MAX_GEMV_ROWS", "MatmulBlocks", "PlanePart", "own_words", "quant_matmul", "quant_matmuls"]

MAX_GEMV_ROWS = 8


def quant_matmul(
    x: jax.Array, words: jax.Array, layout: PlaneLayout, *, backend: str | None = None, interpret: bool = False
) -> jax.Array:
    """Multiply by one matrix, u32[layout.num_words]: f32[T, rows]. As `quant_matmuls`."""
    return quant_matmuls(x, words, (PlanePart(layout),), backend=backend, interpret=interpret)[0]


def quant_matmuls(
    x: jax.Array,
    words: jax.Array,
    parts: Sequence[PlanePart],
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Multiply ``x: f32[T, cols]`` by the transposes of matrices of ``cols`` columns: f32[T, rows] each.

    Args:
        words: u32[n], which has all of them. parts: where; each begins with a whole run of its tile rows.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the kernels in Pallas' interpreter, on any device.

    Raises:
        ValueError: `x` or `words` do not fit the parts, or `backend` is unknown.
    """
    for part in parts:
        _check(x, words, part)
    few = x.shape[0] <= MAX_GEMV_ROWS

    def plain(x: jax.Array, words: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(reference.matmul(x, own_words(words, p), p.layout, rounded=not few) for p in parts)

    def kernel(x: jax.Array, words: jax.Array) -> tuple[jax.Array, ...]:
        from strata_jax.kernels.quant_matmul import triton

        if few:
            blocks = choose_gemv_launch(x.shape[0], [part.layout for part in parts])
            return triton.gemv(x, words, parts, blocks, interpret=interpret)
        rounded = x.astype(jnp.bfloat16)
        return tuple(_multiply_many(rounded, words, part, interpret) for part in parts)

    return on_backend(backend, kernel, plain, x, words)


def _multiply_many(x: jax.Array, words: jax.Array, part: PlanePart, interpret: bool) -> jax.Array:
    """``x: bf16[T, cols]`` times the transpose of the matrix: f32[T, rows]."""
    from strata_jax.kernels.quant_matmul import triton

    num_rows, layout = x.shape[0], part.layout
    if layout.tile_rows < MIN_TILE_ROWS:
        return _multiply_decoded(x, decode_planes(own_words(words, part), layout).astype(jnp.bfloat16))
    if num_rows > MAX_KERNEL_ROWS and layout.rows * layout.cols <= MAX_DECODED_WEIGHTS:
        return _multiply_decoded(x, triton.decode(words, part, choose_decode_blocks(layout), interpret))
    blocks = choose_matmul_blocks(num_rows, layout)
    padded = jnp.pad(x, ((0, -num_rows % blocks.rows), (0, 0)))
    line = jnp.zeros(1, jnp.int32)
    return triton.matmul(padded, words[None], line, part, blocks, interpret=interpret)[:num_rows]


def _multiply_decoded(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _check(x: jax.Array, words: jax.Array, part: PlanePart) -> None:
    layout, first = part.layout, part.first_word
    fits = words.ndim == 1 and 0 <= first <= words.shape[0] - layout.num_words and first % layout.tile_rows == 0
    if x.ndim != 2 or x.shape[-1] != layout.cols or not fits:
        raise ValueError(
            f"x{list(x.shape)} times {layout.type_name} {layout.rows} x {layout.cols} in {layout.num_words} words from"
            f" {first} on: got {words.shape[0] if words.ndim == 1 else list(words.shape)} words, and runs of"
            f" {layout.tile_rows}"
        )
