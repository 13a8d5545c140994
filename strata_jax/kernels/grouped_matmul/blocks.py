"""Block sizes of the grouped products: a table per GPU, a default for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax

from strata_jax.kernels.expert_gemv.blocks import LaunchBlocks


@dataclass(frozen=True, slots=True)
class RingBlocks:
    """How the Mosaic kernel is cut.

    Attributes:
        programs: one for each multiprocessor.
        rows: how many rows of a tile a product may have, ascending; the last is a whole tile.
        stages: steps of 128 columns that shared memory holds. batch: steps that are copied at a time.
        copy_registers, product_registers: of a thread that copies, of one that multiplies.
    """

    programs: int
    rows: tuple[int, ...]
    stages: int
    batch: int
    copy_registers: int
    product_registers: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """How both products of a chunk are cut.

    Attributes:
        rows: sorted rows of a tile.
        swiglu, down: rows of the weight matrix of a program, and its warps.
        swap: whether the tensor cores see the products transposed, weights first.
        rings: how Mosaic cuts the same tiles for both products, or None where Triton does the work.
    """

    rows: int
    swiglu: LaunchBlocks
    down: LaunchBlocks
    swap: bool
    rings: tuple[RingBlocks, RingBlocks] | None = None


_SMALL = Blocks(32, LaunchBlocks(64, 4), LaunchBlocks(64, 4), swap=True)
_MIDDLE = Blocks(64, LaunchBlocks(64, 4), LaunchBlocks(128, 8), swap=False)
_LARGE = Blocks(128, LaunchBlocks(64, 8), LaunchBlocks(128, 8), swap=False)

Table = tuple[tuple[float, Blocks], ...]
"""(up to which mean number of rows of an expert, blocks), ascending."""

# bench/kernels_grouped.py on an H200 at 10, 40 and 160 rows; the limits lie between, at about the geometric mean.
TABLE: Mapping[str, Table] = {"NVIDIA H200": ((20, _SMALL), (80, _MIDDLE), (math.inf, _LARGE))}
# Elsewhere nothing is measured: no tiles of 128 rows, which need the most registers and shared memory.
DEFAULT: Table = ((20, _SMALL), (math.inf, _MIDDLE))

# Mosaic is faster than Triton at 10, 40 and 160 rows alike. Its interface changes from one version of JAX to the next:
# only where all types have run. Products of up to 32 rows gain swiglu 5 % at 40 rows and 11 % at 10. With both kinds
# the kernel needs more registers, so threads that copy have few and copy one step at a time; down, which has 5 steps
# and not 20, loses more by that than it gains.
RINGS: Mapping[str, tuple[RingBlocks, RingBlocks]] = {
    "NVIDIA H200": (RingBlocks(132, (32, 64), 4, 1, 32, 112), RingBlocks(132, (64,), 4, 2, 64, 104))
}
_RING_VERSION = (0, 11)
_RING_TILE_ROWS = 128


def choose_blocks(mean_rows: float, tile_rows: int, device_kind: str) -> Blocks:
    """Return the blocks for experts of ``mean_rows`` rows on average (pairs / experts).

    Args:
        tile_rows: rows that the planes interleave; programs have no more rows of weights.
    """
    rings = RINGS.get(device_kind)
    if rings is not None and tile_rows == _RING_TILE_ROWS and jax.__version_info__[:2] == _RING_VERSION:
        return replace(_MIDDLE, rows=rings[0].rows[-1], rings=rings)
    found = next(blocks for limit, blocks in TABLE.get(device_kind, DEFAULT) if mean_rows <= limit)
    return replace(
        found,
        swiglu=replace(found.swiglu, rows=min(found.swiglu.rows, tile_rows)),
        down=replace(found.down, rows=min(found.down.rows, tile_rows)),
    )
