"""A decode round, part by part: the host starts one program after the other and reads nothing in between.

A program of many blocks has hundreds of arrays to be told of before the GPU begins, milliseconds for 48 blocks; told of
them in parts, the GPU computes one part while the host starts the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from strata_jax.engine.decode import Round, with_keys, without_keys
from strata_jax.engine.model import BlocksRead, State
from strata_jax.engine.replacement import Kept, UseValues
from strata_jax.engine.sampler import SamplingArrays

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine

PART_BLOCKS = 12  # of the trunk, in a program: four parts of the published depth


def run_round(
    engine: Engine, state: State, words: np.ndarray, ple_rows: np.ndarray | None, how: SamplingArrays, num_drafts: int
) -> tuple[jax.Array, State, Round, Kept | None]:
    """Start a round of the window in ``words`` (see `window_words`); arena, state and what replacement has are used up.

    Returns:
        the arena's core, the state after the kept tokens, what is for the host, what replacement has changed.
    """
    programs, weights, tables, g = engine.programs, engine.weights, engine.program_tables, engine.geometry
    window = jax.device_put(words)  # once for all parts
    arena, segments, streams = engine.arena, engine.segments, None
    before: UseValues | Kept | None = engine.values
    states, keys = without_keys(state.blocks)
    parts, written = list[BlocksRead](), list[jax.Array | None]()
    for first in range(0, g.num_layers, PART_BLOCKS):
        here = slice(first, min(first + PART_BLOCKS, g.num_layers))
        reads_table = g.ple_layer is not None and here.start <= g.ple_layer < here.stop
        table: tuple[Any, Any] = (ple_rows, state.ple_history) if reads_table else (None, None)
        streams, arena, read, new_keys, before = programs.round_part(
            first, None if first else weights.embed, weights.blocks[here], engine.banks[here], tables, arena, segments,
            states[here], keys[here], streams, window, *table, before,
        )  # fmt: skip
        segments = segments if before is None else ()
        parts.append(read)
        written += new_keys
    assert not isinstance(before, UseValues)
    arena, state, found, kept = programs.round_end(
        num_drafts, weights.without_blocks(), engine.banks[g.num_layers :], tables, arena, segments,
        replace(state, blocks=states), streams, window, tuple(parts), how, before,
    )  # fmt: skip
    return arena, replace(state, blocks=with_keys(state.blocks, tuple(written))), found, kept


def start_drafts(
    engine: Engine, state: State, words: np.ndarray, num_drafts: int
) -> tuple[jax.Array, State, jax.Array, Kept | None]:
    """Start the drafts that follow a prompt, from its next token in ``words``: see `first_drafts`, whose results these
    are; arena, state and what replacement has are used up.
    """
    return engine.programs.first_window(
        num_drafts, engine.weights.without_blocks(), engine.banks[engine.geometry.num_layers :], engine.program_tables,
        engine.arena, engine.segments, state, words, engine.values,
    )  # fmt: skip
