"""Which dense matrices are held in planes for the GPU kernels (`kernels/quant_matmul`): a question of type and size.

Planes take the place of the packed blocks, so they must have their bytes. No JAX here: the planner asks, too.
"""

from __future__ import annotations

from strata_jax.errors import FormatError
from strata_jax.gguf.planes import PlaneLayout, plane_layout

MIN_TILE_ROWS = 4  # 16 bytes of a line: what a thread loads
MAX_KERNEL_ROWS = 1024  # of an input; beyond, the matrix is decoded once instead of once for every 128 rows
MAX_DECODED_WEIGHTS = 32 * 2**20  # 64 MiB in bfloat16; larger matrices (heads) are always multiplied by the kernel


def dense_planes(type_name: str, rows: int, cols: int) -> PlaneLayout | None:
    """Return the planes of a dense matrix; None: it stays as stored."""
    try:
        layout = plane_layout(type_name, rows, cols)
    except (FormatError, ValueError):
        return None
    exact = layout.row_words * 4 == layout.row_bytes
    return layout if exact and layout.tile_rows >= MIN_TILE_ROWS else None
