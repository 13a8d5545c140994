"""Packed matrices: how a weight is held (as stored in the file) and multiplied.

A matrix stays in its file's block format; it is decoded to float32 inside the program that multiplies by it, in
row tiles, so that no float copy of a large quantised matrix ever exists. Shapes are row-major (out, in).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.kernels.dequant import dequantize
from strata_jax.memory.layout import MATRIX_TILE_WEIGHTS

NATIVE_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matrix:
    """A weight of shape (rows, cols).

    Attributes:
        data: f32/f16/bf16[rows, cols] for the native float types, else u8[rows, row_bytes] of packed blocks.
        type_name: ggml type, e.g. ``"IQ3_S"``.
        cols: number of weights in a row.
    """

    data: jax.Array
    type_name: str = field(metadata={"static": True})
    cols: int = field(metadata={"static": True})

    @property
    def rows(self) -> int:
        return self.data.shape[0]


def from_bytes(raw: np.ndarray, type_name: str, cols: int) -> Matrix:
    """Hold ``raw: u8[rows, row_bytes]`` (a view on the mapped file) as a device matrix of the same packed bytes."""
    if type_name in NATIVE_DTYPES:
        raw = np.ascontiguousarray(raw).view(NATIVE_DTYPES[type_name])
    return Matrix(jnp.array(raw), type_name, cols)


def decode_rows(data: jax.Array, type_name: str) -> jax.Array:
    """Decode packed rows to f32[..., cols]."""
    return data.astype(jnp.float32) if type_name in NATIVE_DTYPES else dequantize(data, type_name)


def linear(x: jax.Array, w: Matrix) -> jax.Array:
    """Multiply ``x: f32[T, cols]`` by the transpose of ``w``: f32[T, rows]."""
    if w.rows * w.cols <= MATRIX_TILE_WEIGHTS or w.type_name == "F32":
        return matmul_t(x, decode_rows(w.data, w.type_name))
    tile_rows = max(1, MATRIX_TILE_WEIGHTS // w.cols)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(i * tile_rows, w.rows - tile_rows)  # the last tile may repeat rows of the one before
        tile = jax.lax.dynamic_slice_in_dim(w.data, first, tile_rows)
        return jax.lax.dynamic_update_slice_in_dim(out, matmul_t(x, decode_rows(tile, w.type_name)), first, 1)

    return jax.lax.fori_loop(0, -(-w.rows // tile_rows), step, jnp.zeros((x.shape[0], w.rows), jnp.float32))


def take_rows(w: Matrix, ids: jax.Array) -> jax.Array:
    """Decode only the rows ``ids: i32[T]``: f32[T, cols]."""
    return decode_rows(w.data[ids], w.type_name)


def matmul_t(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x: f32[T, n]`` times the transpose of ``w: f32[m, n]``, in full float32."""
    return jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
