"""Copy rows between a device array and host memory, block by block.

Rows are the pages of the arena or the index keys of a layer. A few compiled programs serve every number of rows: blocks
have one of two sizes and the last one is padded.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from strata_jax.engine.programs import Programs
from strata_jax.memory.layout import STAGE_BYTES, stage_rows

SMALL_SHARE = 16  # a small block has this part of a large one


def block_rows(num_rows: int, row_bytes: int) -> tuple[int, int]:
    """The rows of a large and of a small block, for an array of ``num_rows`` rows."""
    large = stage_rows(num_rows, row_bytes, STAGE_BYTES)
    return large, max(1, large // SMALL_SHARE)


def read_rows(programs: Programs, array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Copy ``rows: i32[n]`` of the array to the host, in memory of their own."""
    out = np.empty((len(rows), *array.shape[1:]), array.dtype)
    waiting: list[tuple[int, int, jax.Array]] = []
    for first, count, idx in _blocks(array, rows):
        part = programs.call(("rows out", array.shape, str(array.dtype), len(idx)), _gather, (array, idx))
        part.copy_to_host_async()
        waiting.append((first, count, part))
        if len(waiting) == 2:
            _land(out, *waiting.pop(0))
    for block in waiting:
        _land(out, *block)
    return out


def write_rows(programs: Programs, array: jax.Array, rows: np.ndarray, values: np.ndarray) -> Iterator[jax.Array]:
    """Put ``values: [n, ...]`` into ``rows: i32[n]`` of the array; yields it after each block.

    Each array is donated for the next: whoever holds the array takes over every one, so that a failure loses none.
    """
    for first, count, idx in _blocks(array, rows):
        part = np.zeros((len(idx), *array.shape[1:]), array.dtype)
        part[:count] = values[first : first + count]
        key = ("rows in", array.shape, str(array.dtype), len(idx))
        array = programs.call(key, _scatter, (array, idx, part), ("array",))
        jax.block_until_ready(array)  # blocks of their own for all that wait would have no end
        yield array


def _blocks(array: jax.Array, rows: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first, count, i32[size]): rows past ``count`` are outside the array."""
    large, small = block_rows(array.shape[0], array.nbytes // array.shape[0])
    first = 0
    while first < len(rows):
        left = len(rows) - first
        size = large if 2 * left >= large else small
        count = min(size, left)
        idx = np.arange(array.shape[0], array.shape[0] + size, dtype=np.int32)  # no row twice
        idx[:count] = rows[first : first + count]
        yield first, count, idx
        first += count


def _land(out: np.ndarray, first: int, count: int, part: jax.Array) -> None:
    out[first : first + count] = np.asarray(part)[:count]


def _gather(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array.at[rows].get(mode="clip")


def _scatter(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[rows].set(values, mode="drop", unique_indices=True)
