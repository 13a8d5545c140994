"""A decode round, part by part: the host starts one program after the other and reads nothing in between.

A program of many blocks has hundreds of arrays to be told of before the GPU begins, milliseconds for 48 blocks; told of
them in parts, the GPU computes one part while the host starts the next. A round that is sure to follow can be started
while the one before runs (`RoundAhead`): then the GPU only waits for what the host tells it to read.
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
from strata_jax.engine.round_words import WindowForm
from strata_jax.engine.sampler import SamplingArrays
from strata_jax.kernels import backend
from strata_jax.memory.sizes import model_sizes

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine
    from strata_jax.engine.session import Session

# Blocks of the trunk in a program at most, and in the first of several. The GPU waits while the host starts that one,
# and has to have work for as long as starting the next one takes (about 0.1 ms a block each, one H200): each has up to
# twice the blocks of the one before.
PART_BLOCKS = 16
FIRST_BLOCKS = 4


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


@dataclass(frozen=True)
class RoundAhead:
    """A round that is to follow the one that runs, before it is told what to read.

    Attributes:
        session: whose round it is; its state is already the one that this round leaves, the one before where it is told
            to read nothing. num_rows, how, num_drafts: as of `start_round`.
        found: what it finds.
    """

    session: Session
    num_rows: int
    how: SamplingArrays
    num_drafts: int
    found: Round

    def fits(self, session: Session, num_rows: int, how: SamplingArrays, num_drafts: int) -> bool:
        """Whether it is this round."""
        same = self.session is session and self.how is how
        return same and (self.num_rows, self.num_drafts) == (num_rows, num_drafts)


def parts_of(num_layers: int) -> list[tuple[int, int]]:
    """The first block of each part and the one after its last; a small model is one part."""
    size = num_layers if num_layers <= PART_BLOCKS else min(FIRST_BLOCKS, PART_BLOCKS)
    ends = [0]
    while ends[-1] < num_layers:
        ends.append(min(ends[-1] + size, num_layers))
        size = min(2 * size, PART_BLOCKS)
    return list(itertools.pairwise(ends))


def start_round(engine: Engine, state: State, num_rows: int, how: SamplingArrays, num_drafts: int) -> StartedRound:
    """Start a round of ``num_rows`` rows; it reads what the mailbox tells it, before or, on a GPU, after this.

    Arena, state and what replacement has are used up.
    """
    programs, weights, g, mailbox = engine.programs, engine.weights, engine.geometry, engine.mailbox
    form = WindowForm.of(num_rows, model_sizes(g).table_row_bytes)
    arena, streams, words = engine.arena, None, mailbox.box(form.num_words)
    tables, segments, kept = engine.round_tables()
    states, written, parts = list[Any](), list[jax.Array | None](), list[BlocksRead]()
    for first, end in parts_of(g.num_layers):
        here = slice(first, end)
        reads_table = g.ple_layer is not None and first <= g.ple_layer < end
        bare, keys = without_keys(state.blocks[here])
        streams, arena, read, new_keys, kept, found = programs.round_part(
            form, first, None if first else weights.embed, weights.blocks[here], engine.banks[here], tables, arena,
            segments, bare, keys, streams, words, None if first else mailbox.turn,
            state.ple_history if reads_table else None, kept,
        )  # fmt: skip
        words = words if found is None else found
        parts.append(read)
        states += bare
        written += new_keys
    arena, state, out, turn, kept = programs.round_end(
        form, num_drafts, weights.without_blocks(), engine.banks[g.num_layers :], tables, arena, segments,
        replace(state, blocks=tuple(states)), streams, words, tuple(parts), mailbox.turn, how, kept,
    )  # fmt: skip
    mailbox.started(turn, form.num_words, out.report)
    state = replace(state, blocks=with_keys(state.blocks, tuple(written)))
    return StartedRound(arena, state, out, kept)


def next_round(
    session: Session, words: np.ndarray, num_rows: int, how: SamplingArrays, num_drafts: int
) -> tuple[Round, bool]:
    """Tell the session's next round its words, and start it if it has not been; says whether it had waited."""
    engine, ahead = session.engine, session.engine.ahead
    if ahead is None or not ahead.fits(session, num_rows, how, num_drafts):
        withdraw(engine)
        engine.mailbox.tell(words)
        return _go_on(session, num_rows, how, num_drafts), False
    engine.ahead = None
    engine.mailbox.tell(words)
    return ahead.found, True


def start_ahead(session: Session, num_rows: int, how: SamplingArrays, num_drafts: int) -> None:
    """Start the round after the one that was started last, for it is sure to follow; on a CPU, whose programs cannot
    wait, it is started when it is told."""
    if not backend.interprets():
        found = _go_on(session, num_rows, how, num_drafts)
        session.engine.ahead = RoundAhead(session, num_rows, how, num_drafts, found)


def _go_on(session: Session, num_rows: int, how: SamplingArrays, num_drafts: int) -> Round:
    """Start the session's next round, and go on from what it leaves."""
    engine = session.engine
    started = start_round(engine, session.state, num_rows, how, num_drafts)
    engine.arena, session.state = started.arena, started.state
    engine.after_turns(started.kept)
    return started.found


def withdraw(engine: Engine) -> None:
    """Before anything but the round that was started ahead: it is told to read nothing, and leaves all as it was.

    Without this, what follows would be right, too, but wait until that round gives up. Returns when it is done: what is
    written by other means than JAX's programs (`host_copies`) counts on that.
    """
    engine.ahead = None
    engine.mailbox.withdraw()


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
