"""Block sizes of the expert kernels: a table per GPU, a default for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strata_jax.memory.layout import MAX_WINDOW_TOKENS

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


# E 2560, F 640, IQ2_XS and Q2_0 (`bench/kernels_expert_gemv.py`): with 8 warps for gate and up the window of one token
# takes 8 % less than with 4 where all experts are resident and a quarter less where one of ten is not; windows of
# several tokens take up to 11 % more.
_ONE = Blocks(gate_up=LaunchBlocks(rows=32, warps=8), down=LaunchBlocks(rows=128, warps=4))
_MORE = replace(_ONE, gate_up=LaunchBlocks(rows=32, warps=4))

Table = tuple[tuple[int, Blocks], ...]
"""(up to which number of tokens, blocks), ascending."""

TABLE: Mapping[str, Table] = {"NVIDIA H200": ((1, _ONE), (MAX_WINDOW_TOKENS, _MORE))}
DEFAULT: Table = TABLE["NVIDIA H200"]
"""For GPUs that nobody has measured."""


def blocks_for(device_kind: str, tile_rows: int, num_tokens: int) -> Blocks:
    """Return the block sizes for a GPU and a window; programs have no more rows than a tile of the planes."""
    found = next(blocks for most, blocks in TABLE.get(device_kind, DEFAULT) if num_tokens <= most)
    return Blocks(_at_most(found.gate_up, tile_rows), _at_most(found.down, tile_rows))


def _at_most(blocks: LaunchBlocks, tile_rows: int) -> LaunchBlocks:
    rows = min(blocks.rows, tile_rows)
    return LaunchBlocks(rows, blocks.warps)
