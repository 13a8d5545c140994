"""K/V cells in host memory: one row of a page for every group of cells of every attention layer, and copies of rows.

Programs read the rows where they lie (`kernels.cell_gather`). Rows are copied one after the other inside a program,
since XLA refuses gathers from host memory beside a GPU; on a CPU the store is ordinary memory and the same code runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from strata_jax.engine.row_copies import read_rows, write_rows

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine
    from strata_jax.engine.programs import Programs

Rows = NDArray[np.int32]
ROWS_PER_CALL = 64  # rows that one program copies at most


def new_store(num_rows: int, page_bytes: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """The rows u32[num_rows, page_words] of groups that are not on the device, row ``layer * groups + group``."""
    return jax.device_put(np.zeros((num_rows, page_bytes // 4), np.uint32), sharding, may_alias=False)


def spill_pages(programs: Programs, store: jax.Array, arena: jax.Array, pages: Rows, rows: Rows) -> Iterator[jax.Array]:
    """Copy pages i32[n] of the arena to rows i32[n] of the store, in place; yields the store after each block.

    Each array is donated for the next: whoever holds the array takes over every one, so that a failure loses none.
    """
    for count, some, into in _blocks(pages, rows):
        args = (store, arena, some, into, np.int32(count))
        f = partial(_copy_rows, memory=_space(store))
        key = ("spill", store.shape, arena.shape[0], len(some))
        store = programs.call(key, f, args, ("target",), out_shardings=store.sharding)
        yield store


def fetch_pages(programs: Programs, store: jax.Array, arena: jax.Array, pages: Rows, rows: Rows) -> Iterator[jax.Array]:
    """Copy rows of the store to pages of the arena, in place; yields the arena after each block, as `spill_pages`."""
    for count, some, into in _blocks(rows, pages):
        args = (arena, store, some, into, np.int32(count))
        f = partial(_copy_rows, memory=jax.memory.Space.Device)
        arena = programs.call(("fetch", store.shape, arena.shape[0], len(some)), f, args, ("target",))
        yield arena


def read_cells_of(engine: Engine, layer: int, pages: np.ndarray) -> np.ndarray:
    """Copy the first groups of an attention layer to host memory of their own: u32[n, page_words].

    pages: i32[n], the arena page of each of them, -1 = it is in the store.
    """
    if engine.cell_store is None:
        return read_rows(engine.programs, engine.arena, pages)
    out = np.empty((len(pages), engine.arena.shape[1]), np.uint32)
    away = pages < 0
    out[~away] = read_rows(engine.programs, engine.arena, pages[~away])
    places, rows = np.flatnonzero(away), engine.residency.store_rows(layer, np.flatnonzero(away))
    stage = jnp.zeros((ROWS_PER_CALL, out.shape[1]), jnp.uint32)
    for first in range(0, len(rows), ROWS_PER_CALL):
        some = rows[first : first + ROWS_PER_CALL]
        (stage,) = fetch_pages(engine.programs, engine.cell_store, stage, _first(some), some)
        out[places[first : first + len(some)]] = np.asarray(stage)[: len(some)]
    return out


def write_cells_of(engine: Engine, layer: int, pages: np.ndarray, values: np.ndarray) -> None:
    """Put ``values: u32[n, page_words]`` where the first groups of an attention layer are: see `read_cells_of`."""
    away = pages < 0
    for arena in write_rows(engine.programs, engine.arena, pages[~away], values[~away]):
        engine.arena = arena
    if engine.cell_store is None:
        return
    groups = np.flatnonzero(away)
    rows = engine.residency.store_rows(layer, groups)
    for first in range(0, len(rows), ROWS_PER_CALL):
        some = rows[first : first + ROWS_PER_CALL]
        part = np.zeros((ROWS_PER_CALL, values.shape[1]), np.uint32)
        part[: len(some)] = values[groups[first : first + len(some)]]
        copy = spill_pages(engine.programs, engine.cell_store, jnp.asarray(part), _first(some), some)
        (engine.cell_store,) = copy


def compile_copies(engine: Engine) -> None:
    """Compile what the moves of cells run, from shapes alone."""
    if engine.cell_store is not None:
        one = np.zeros(1, np.int32)
        list(spill_pages(engine.programs, engine.cell_store, engine.arena, one, one))
        list(fetch_pages(engine.programs, engine.cell_store, engine.arena, one, one))


def _blocks(sources: Rows, targets: Rows) -> Iterator[tuple[int, Rows, Rows]]:
    """Yield (count, sources i32[`ROWS_PER_CALL`], targets i32[`ROWS_PER_CALL`]), of which ``count`` are meant."""
    for first in range(0, len(sources), ROWS_PER_CALL):
        padded = np.zeros((2, ROWS_PER_CALL), np.int32)
        some = np.stack([sources[first : first + ROWS_PER_CALL], targets[first : first + ROWS_PER_CALL]])
        padded[:, : some.shape[1]] = some
        yield some.shape[1], padded[0], padded[1]


def _first(rows: Rows) -> Rows:
    """As many rows from 0 on."""
    return np.arange(len(rows), dtype=np.int32)


def _space(array: jax.Array) -> Any:
    return jax.memory.Space.Host if array.sharding.memory_kind == "pinned_host" else jax.memory.Space.Device


def _copy_rows(
    target: jax.Array, source: jax.Array, rows: jax.Array, into: jax.Array, count: jax.Array, *, memory: Any
) -> jax.Array:
    def step(i: jax.Array, target: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice(source, (rows[i], 0), (1, source.shape[1]))
        return jax.lax.dynamic_update_slice(target, jax.device_put(row, memory), (into[i], 0))

    return jax.lax.fori_loop(0, count, step, target)
