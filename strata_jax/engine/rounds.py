"""A decode round, part by part: the host starts one program after the other and reads nothing in between.

A program of many blocks has hundreds of arrays to be told of before the GPU begins, milliseconds for 48 blocks; told of
them in parts, the GPU computes one part while the host starts the next.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from strata_jax.engine.decode import Round, with_keys, without_keys
from strata_jax.engine.model import BlocksRead, State
from strata_jax.engine.replacement import Kept
from strata_jax.engine.sampler import SamplingArrays

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine

# Blocks of the trunk in a program at most, and in the first of several. The GPU waits while the host starts that one,
# and has to have work for as long as starting the next one takes (about 0.1 ms a block each, one H200): each has up to
# twice the blocks of the one before.
PART_BLOCKS = 12
FIRST_BLOCKS = 2


@dataclass(frozen=True)
class StartedRound:
    """A round that has been started.

    Attributes:
        arena: its core. state: after the kept tokens. kept: what replacement has changed.
    """

    arena: jax.Array
    state: State
    found: Round
    kept: Kept | None


def parts_of(num_layers: int) -> list[tuple[int, int]]:
    """The first block of each part and the one after its last; a small model is one part."""
    size = num_layers if num_layers <= PART_BLOCKS else min(FIRST_BLOCKS, PART_BLOCKS)
    ends = [0]
    while ends[-1] < num_layers:
        ends.append(min(ends[-1] + size, num_layers))
        size = min(2 * size, PART_BLOCKS)
    return list(itertools.pairwise(ends))


def run_round(
    engine: Engine, state: State, words: np.ndarray, ple_rows: np.ndarray | None, how: SamplingArrays, num_drafts: int
) -> StartedRound:
    """Start a round of the window in ``words`` (see `window_words`), once the report of the one before is there.

    Arena, state and what replacement has are used up.
    """
    programs, weights, g = engine.programs, engine.weights, engine.geometry
    window = engine.mailbox.put("window", words)
    rows = None if ple_rows is None else engine.mailbox.put("n-gram rows", ple_rows)
    arena, streams = engine.arena, None
    tables, segments, kept = engine.round_tables()
    states, written, parts = list[Any](), list[jax.Array | None](), list[BlocksRead]()
    for first, end in parts_of(g.num_layers):
        here = slice(first, end)
        reads_table = g.ple_layer is not None and first <= g.ple_layer < end
        table: tuple[Any, Any] = (rows, state.ple_history) if reads_table else (None, None)
        bare, keys = without_keys(state.blocks[here])
        streams, arena, read, new_keys, kept, copied = programs.round_part(
            first, None if first else weights.embed, weights.blocks[here], engine.banks[here], tables, arena, segments,
            bare, keys, streams, window, *table, kept,
        )  # fmt: skip
        window = window if copied is None else copied
        parts.append(read)
        states += bare
        written += new_keys
    arena, state, found, kept = programs.round_end(
        num_drafts, weights.without_blocks(), engine.banks[g.num_layers :], tables, arena, segments,
        replace(state, blocks=tuple(states)), streams, window, tuple(parts), how, kept,
    )  # fmt: skip
    engine.mailbox.read_before(found.report)
    state = replace(state, blocks=with_keys(state.blocks, tuple(written)))
    return StartedRound(arena, state, found, kept)


def start_drafts(
    engine: Engine, state: State, words: np.ndarray, num_drafts: int
) -> tuple[jax.Array, State, jax.Array, Kept | None]:
    """Start the drafts that follow a prompt, from its next token in ``words``: see `first_drafts`, whose results these
    are; arena, state and what replacement has are used up. Once a request: the words take the usual way.
    """
    tables, segments, kept = engine.round_tables()
    return engine.programs.first_window(
        num_drafts, engine.weights.without_blocks(), engine.banks[engine.geometry.num_layers :], tables, engine.arena,
        segments, state, words, kept,
    )  # fmt: skip
