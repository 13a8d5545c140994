"""Block sizes of the dense quantised products. Not yet tuned per GPU: they are those of the experts' products."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks
from strata_jax.kernels.planes import PlaneLayout

MIN_TILE_ROWS = 16  # of weights, on tensor cores
_MANY_PROGRAMS = 256


@dataclass(frozen=True, slots=True)
class MatmulBlocks:
    """How a product of many rows is cut: ``rows`` of x by those of the weights in ``launch``."""

    rows: int
    launch: LaunchBlocks


def choose_matmul_blocks(num_rows: int, layout: PlaneLayout) -> MatmulBlocks:
    """Return the blocks for ``num_rows`` rows of x."""
    weight_rows = min(64, layout.tile_rows)
    return (
        MatmulBlocks(64, LaunchBlocks(weight_rows, 4))
        if num_rows <= 64
        else MatmulBlocks(128, LaunchBlocks(weight_rows, 8))
    )


def choose_gemv_blocks(layout: PlaneLayout) -> LaunchBlocks:
    """Return the blocks of a product of few rows of x: enough programs to fill a GPU, if the matrix has the rows."""
    if layout.rows >= 32 * _MANY_PROGRAMS:
        return LaunchBlocks(min(32, layout.tile_rows), 4)
    return LaunchBlocks(min(16, layout.tile_rows), 2)
