"""Block sizes of the expert kernels: a table per GPU, a default for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_THREAD_WORDS = 4  # 16 bytes of a line


@dataclass(frozen=True, slots=True)
class LaunchBlocks:
    """One launch: programs of ``rows`` rows and ``warps`` warps."""

    rows: int
    warps: int

    def items_at_once(self, num_items: int) -> int:
        """Items of a step: 16 bytes a thread, if that divides the row; a power of two."""
        wanted = max(1, self.warps * 32 * _THREAD_WORDS // self.rows)
        return min(num_items & -num_items, wanted)


@dataclass(frozen=True, slots=True)
class Blocks:
    gate_up: LaunchBlocks
    down: LaunchBlocks


# E 2560, F 640, IQ3_XXS and IQ4_NL. Not measured since products are in whole numbers: 16 bytes a thread and most
# programs, which instruction counts favour. `bench/kernels_expert_gemv.py` times the alternatives.
H200 = Blocks(gate_up=LaunchBlocks(rows=32, warps=4), down=LaunchBlocks(rows=128, warps=4))
TABLE: Mapping[str, Blocks] = {"NVIDIA H200": H200}
DEFAULT = H200
"""For GPUs that nobody has measured."""


def blocks_for(device_kind: str, tile_rows: int) -> Blocks:
    """Return the block sizes for a GPU; programs have no more rows than a tile of the planes."""
    found = TABLE.get(device_kind, DEFAULT)
    return Blocks(_at_most(found.gate_up, tile_rows), _at_most(found.down, tile_rows))


def _at_most(blocks: LaunchBlocks, tile_rows: int) -> LaunchBlocks:
    rows = min(blocks.rows, tile_rows)
    return LaunchBlocks(rows, blocks.warps)
