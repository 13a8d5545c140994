"""Packed matrices: how a weight is held and multiplied. Shapes are row-major (out, in).

As stored: the file's blocks, decoded to float32 inside the program that multiplies by them, in row tiles, so that no
float copy of a large quantised matrix ever exists; for a GPU many rows are multiplied on tensor cores
(`kernels/float_matmul`). In planes, for kernels: the same bits in another order (`gguf/planes.py`), multiplied by
`kernels/quant_matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.kernels import backend
from strata_jax.kernels.dequant import dequantize
from strata_jax.kernels.float_matmul import float_matmul
from strata_jax.kernels.planes import decode_plane_rows
from strata_jax.kernels.quant_matmul import PlanePart, own_words, quant_matmuls
from strata_jax.memory.layout import MATRIX_TILE_WEIGHTS

ManyRows = Literal["float32", "exact", "rounded"]
NATIVE_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Matrix:
    """A weight of shape (rows, cols).

    Attributes:
        data: f32/f16/bf16[rows, cols] for the native float types, else u8[rows, row_bytes] of packed blocks, or
            u32[n] that has planes.
        type_name: ggml type, e.g. ``"IQ3_S"``.
        cols: number of weights in a row.
        planes: what of ``data`` holds the matrix in planes, beside others (`engine/joined.py`); None: as stored.
        many_rows: how a matrix as stored is multiplied: in float32 as everywhere, or, for a GPU, by `float_matmul`, as
            exact as float32 or many rows with operands rounded to bfloat16.
    """

    data: jax.Array
    type_name: str = field(metadata={"static": True})
    cols: int = field(metadata={"static": True})
    planes: PlanePart | None = field(default=None, metadata={"static": True})
    many_rows: ManyRows = field(default="float32", metadata={"static": True})

    @property
    def rows(self) -> int:
        return self.data.shape[0] if self.planes is None else self.planes.layout.rows


def from_bytes(raw: np.ndarray, type_name: str, cols: int, many_rows: ManyRows = "float32") -> Matrix:
    """Hold ``raw: u8[rows, row_bytes]`` (a view on the mapped file) as a device matrix of the same packed bytes."""
    if type_name in NATIVE_DTYPES:
        raw = np.ascontiguousarray(raw).view(NATIVE_DTYPES[type_name])
    return Matrix(jnp.array(raw), type_name, cols, many_rows=many_rows)


def decode_rows(data: jax.Array, type_name: str) -> jax.Array:
    """Decode packed rows to f32[..., cols]."""
    return data.astype(jnp.float32) if type_name in NATIVE_DTYPES else dequantize(data, type_name)


def linears(x: jax.Array, matrices: Sequence[Matrix]) -> tuple[jax.Array, ...]:
    """Multiply ``x: f32[T, cols]`` by the transpose of each matrix: f32[T, rows] each; those in planes in one array
    together."""
    joined = dict[int, list[Matrix]]()
    for w in matrices:
        if w.planes is not None:
            joined.setdefault(id(w.data), []).append(w)
    found = {words: iter(_by_kernels(x, some)) for words, some in joined.items()}
    return tuple(_as_stored(x, w) if w.planes is None else next(found[id(w.data)]) for w in matrices)


def linear(x: jax.Array, w: Matrix) -> jax.Array:
    """Multiply ``x: f32[T, cols]`` by the transpose of ``w``: f32[T, rows]."""
    return linears(x, (w,))[0]


def _by_kernels(x: jax.Array, matrices: Sequence[Matrix]) -> tuple[jax.Array, ...]:
    parts = tuple(w.planes for w in matrices if w.planes is not None)
    return _products(x, matrices[0].data, parts=parts, interpret=backend.interprets())


@partial(jax.jit, static_argnames=("parts", "interpret"))
def _products(
    x: jax.Array, words: jax.Array, *, parts: tuple[PlanePart, ...], interpret: bool
) -> tuple[jax.Array, ...]:
    """Jitted inside the programs that call it, so that blocks of one layout are traced and lowered once."""
    return quant_matmuls(x, words, parts, backend="triton", interpret=interpret)


def _as_stored(x: jax.Array, w: Matrix) -> jax.Array:
    """Decode and multiply, a large matrix tile by tile unless it is multiplied as it is."""
    as_it_is = w.type_name == "F32" or (w.type_name == "BF16" and w.many_rows != "float32")
    if w.rows * w.cols <= MATRIX_TILE_WEIGHTS or as_it_is:
        return _multiply(x, w.data, w)
    tile_rows = max(1, MATRIX_TILE_WEIGHTS // w.cols)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(i * tile_rows, w.rows - tile_rows)  # the last tile may repeat rows of the one before
        tile = jax.lax.dynamic_slice_in_dim(w.data, first, tile_rows)
        return jax.lax.dynamic_update_slice_in_dim(out, _multiply(x, tile, w), first, 1)

    return jax.lax.fori_loop(0, -(-w.rows // tile_rows), step, jnp.zeros((x.shape[0], w.rows), jnp.float32))


def _multiply(x: jax.Array, data: jax.Array, w: Matrix) -> jax.Array:
    """Multiply by some rows of a matrix, ``data``."""
    if w.many_rows == "float32":
        return matmul_t(x, decode_rows(data, w.type_name))
    weights = data if w.type_name in NATIVE_DTYPES else decode_rows(data, w.type_name)
    return float_matmul(x, weights, rounded=w.many_rows == "rounded")


def take_rows(w: Matrix, ids: jax.Array) -> jax.Array:
    """Decode only the rows ``ids: i32[T]``: f32[T, cols]."""
    if w.planes is not None:
        return decode_plane_rows(own_words(w.data, w.planes), w.planes.layout, ids)
    return decode_rows(w.data[ids], w.type_name)


def matmul_t(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x: f32[T, n]`` times the transpose of ``w: f32[m, n]``, in full float32."""
    return jax.lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
