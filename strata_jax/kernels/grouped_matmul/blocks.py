"""Block sizes of the grouped products: a table per GPU, a default for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks


@dataclass(frozen=True, slots=True)
class Blocks:
    """How both products of a chunk are cut.

    Attributes:
        rows: sorted rows of a tile.
        swiglu, down: rows of the weight matrix of a program, and its warps.
        swap: whether the tensor cores see the products transposed, weights first.
    """

    rows: int
    swiglu: LaunchBlocks
    down: LaunchBlocks
    swap: bool


_SMALL = Blocks(32, LaunchBlocks(64, 4), LaunchBlocks(64, 4), swap=True)
_MIDDLE = Blocks(64, LaunchBlocks(64, 4), LaunchBlocks(128, 8), swap=False)
_LARGE = Blocks(128, LaunchBlocks(64, 8), LaunchBlocks(128, 8), swap=False)

Table = tuple[tuple[float, Blocks], ...]
"""(up to which mean number of rows of an expert, blocks), ascending."""

# bench/kernels_grouped.py on an H200 at 10, 40 and 160 rows; the limits lie between, at about the geometric mean.
TABLE: Mapping[str, Table] = {"NVIDIA H200": ((20, _SMALL), (80, _MIDDLE), (math.inf, _LARGE))}
# Elsewhere nothing is measured: no tiles of 128 rows, which need the most registers and shared memory.
DEFAULT: Table = ((20, _SMALL), (math.inf, _MIDDLE))


def choose_blocks(mean_rows: float, tile_rows: int, device_kind: str) -> Blocks:
    """Return the blocks for experts of ``mean_rows`` rows on average (pairs / experts).

    Args:
        tile_rows: rows that the planes interleave; programs have no more rows of weights.
    """
    found = next(blocks for limit, blocks in TABLE.get(device_kind, DEFAULT) if mean_rows <= limit)
    return replace(
        found,
        swiglu=replace(found.swiglu, rows=min(found.swiglu.rows, tile_rows)),
        down=replace(found.down, rows=min(found.down.rows, tile_rows)),
    )
