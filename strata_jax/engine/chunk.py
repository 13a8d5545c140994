"""A prompt chunk, block by block, and which programs prompts and rounds need in all.

A chunk runs as a sequence of programs that the host starts without reading anything in between, so it can also be run
on shapes alone (`Programs.shapes_only`): that compiles the programs before their arrays take any memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.attention import IndexState
from strata_jax.engine.cell_store import compile_copies
from strata_jax.engine.decode import tail_of
from strata_jax.engine.experts import ExpertCounts, LayerBank
from strata_jax.engine.mailbox import Mailbox
from strata_jax.engine.model import OpenBlock, State, without_table
from strata_jax.engine.round_words import window_words
from strata_jax.engine.rounds import start_drafts, start_round
from strata_jax.engine.sampler import sampling_arrays
from strata_jax.engine.staging import Stage, StageShapes, next_staged
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.memory.staging import buffer_lines

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine


@dataclass(frozen=True)
class ChunkRead:
    """What is left of a chunk: streams f32[T, C, E] of trunk and draft block, and counts of every block i32[L', 3 + X].

    Counts are look-ups, hits, experts that were not computed (of the whole chunk, 0) and the uses of each expert:
    together, for each array that the host reads takes its time.
    """

    streams: jax.Array
    draft_streams: jax.Array | None
    counts: jax.Array


def read_chunk(
    engine: Engine,
    state: State,
    ids: np.ndarray,
    ple_rows: np.ndarray | None,
    start: int,
    count: int,
    stage: Stage | None = None,
    next_count: int = 0,
) -> tuple[jax.Array, State, ChunkRead]:
    """Read ``count`` of the tokens i32[T] from position ``start`` on.

    Args:
        stage: where missing experts come from ahead of the blocks; None: from nowhere.
        next_count: tokens of the next chunk, where that takes staged experts too.

    Returns:
        the arena's core with the new cells (the old one is used up), the state after them, and the rest.
    """
    programs, weights, segments = engine.programs, engine.weights.without_head(), engine.segments
    tables, staging = engine.program_tables, _Blocks(engine, stage, count, next_count)
    first, num = jax.device_put((np.int32(start), np.int32(count)))
    blocks, counts = list(state.blocks), list[ExpertCounts]()
    draft_state, tail = state.draft, state.draft_tail
    if isinstance(draft_state, IndexState) and tail is not None:
        draft_state = IndexState(draft_state.keys, tail)  # forget a token that was chosen but never committed
    streams, arena, history = programs.embed(weights.embed, ids), engine.arena, state.ple_history
    attention_row = 0
    for layer, w in enumerate(weights.blocks):
        bank, number = staging.bank(layer), np.int32(layer)
        if w.parts.ple is not None:
            streams, history = programs.ple_chunk(streams, ple_rows, w.parts.ple, history, num)
        kind, w = engine.block_kind[layer], without_table(w)
        if engine.geometry.recurrent[layer]:
            found, blocks[layer], used = programs.gdn_chunk(
                kind, w, bank, arena, segments, tables, number, streams, blocks[layer], first, num
            )
        else:
            found, arena, blocks[layer], used = programs.attention_chunk(
                kind, w, bank, arena, segments, tables, number, np.int32(attention_row), streams, blocks[layer], first,
                num,
            )  # fmt: skip
            attention_row += 1
        streams = staging.streams(layer, found, arena, used)
        del found  # what was asked of experts would stay beside the next block's temporaries
        counts.append(used)
    draft_streams = None
    if engine.plan.with_draft:
        layer = len(engine.banks) - 1
        found, arena, draft_state, hidden, used = programs.draft_chunk(
            weights.without_blocks(), staging.bank(layer), tables, arena, segments, draft_state, ids, streams,
            state.hidden, first, num,
        )  # fmt: skip
        draft_streams = staging.streams(layer, found, arena, used)
        counts.append(used)
    else:
        hidden = programs.last_hidden(streams, num)
    tail = tail_of(draft_state)
    if tail is not None:
        tail = programs.second(tail)
    read = ChunkRead(streams, draft_streams, programs.chunk_counts(counts, staging.lost))
    return arena, State(tuple(blocks), draft_state, tail, history, hidden), read


class _Blocks:
    """The banks of a chunk's blocks as its programs take them, and the programs for experts that are brought.

    Attributes:
        lost: i32[] of each block that asks for experts, how many of them it did not get.
    """

    def __init__(self, engine: Engine, stage: Stage | None, count: int, next_count: int) -> None:
        self.engine, self.stage, self.count, self.next_count = engine, stage, count, next_count
        self.order = next_staged(engine.banks)
        self.lost = list[jax.Array]()

    def bank(self, layer: int) -> LayerBank:
        in_passes = self.stage is not None and layer in self.order
        return replace(self.engine.banks[layer], in_chunks=True, in_passes=in_passes)

    def streams(self, layer: int, found: Any, arena: jax.Array, used: ExpertCounts) -> jax.Array:
        """The streams after a block: its program's, or those that experts computed in passes have been added to."""
        if not isinstance(found, OpenBlock):
            return found
        assert self.stage is not None
        assert used.uses is not None
        programs, bank, stage, asked = self.engine.programs, self.engine.banks[layer], self.stage, found.experts
        assert isinstance(bank.layout, ExpertLayout)
        stage.go_on()
        blobs = bank.blobs if stage.in_place(layer, self.count) else None
        rows = programs.start_experts(bank.layout, arena, self.engine.segments, asked, blobs)
        for words, lines in stage.groups(layer, self.count, used.uses, self._following(layer)):
            rows, left = programs.add_experts(bank.layout, rows, asked, words, lines)
            stage.started(left)
        streams, lost = programs.close_block(found, rows)
        self.lost.append(lost)
        stage.go_on()
        return streams

    def _following(self, layer: int) -> tuple[int, int] | None:
        """The block after this one and its tokens; the last block of a chunk is followed by the first of the next."""
        following = self.order[layer]
        if following is not None:
            return following, self.count
        return (min(self.order), self.next_count) if self.next_count else None


def window_rows(num_tokens: int, spec_window: int, num_drafts: int, min_p: float) -> int:
    """Return the rows of the program for a window.

    There are two at most: the full window with unused rows masked, and a lone token where that is the rule.
    """
    return 1 if num_tokens == 1 and (num_drafts == 0 or min_p > 0) else spec_window


def compile_programs(
    engine: Engine, loans: Collection[tuple[int, int]], min_p: float = 0.0, segments_given: int = 0
) -> None:
    """Compile what prompts, rounds (greedy or sampled, as `Programs.sampling` says) and moves will run, from shapes
    alone.

    Args:
        loans: (bucket, segments that are away while a chunk of it is read); a bucket that is not there borrows none.
        min_p: as for `Session.decode`.
        segments_given: segments that are away for good.
    """
    others = {(bucket, segments_given) for bucket in engine.plan.prefill_buckets if bucket not in dict(loans)}
    with engine.programs.shapes_only():
        for bucket, lent in sorted({*loans, *others}):
            _compile_chunk(with_shapes(engine, lent), bucket)
        compile_rounds(with_shapes(engine, segments_given), min_p)
        _compile_fills(with_shapes(engine))
        compile_copies(with_shapes(engine))


def with_shapes(engine: Engine, num_lent: int = 0) -> Engine:
    """The engine with shapes in place of the arena's arrays, the last segments missing; it starts no real round."""
    words = engine.plan.page_bytes // 4
    pages = engine.residency.layout.array_pages
    arrays: Any = [jax.ShapeDtypeStruct((num, words), jnp.uint32) for num in pages[: len(pages) - num_lent]]
    return replace(engine, arena=arrays[0], segments=tuple(arrays[1:]), mailbox=Mailbox())


def _compile_chunk(engine: Engine, bucket: int) -> None:
    state: Any = jax.eval_shape(engine.empty_state)
    ids = np.zeros(bucket, np.int32)
    stages: list[Stage | None] = [None]
    if bucket in engine.plan.staged_buckets:
        lines = buffer_lines(engine.plan.stage_bytes)
        stages = [StageShapes(lines, engine.banks, all_in_place) for all_in_place in (False, True)]
    for stage in stages:
        read_chunk(engine, state, ids, engine.ple_rows([], [0], bucket), 0, 1, stage)


def compile_rounds(engine: Engine, min_p: float = 0.0) -> None:
    """Compile what rounds run, from the shapes of `with_shapes`."""
    programs, plan, g = engine.programs, engine.plan, engine.geometry
    state: Any = jax.eval_shape(engine.empty_state)
    streams: Any = jax.ShapeDtypeStruct((1, g.num_streams, g.embed_width), jnp.float32)
    how = sampling_arrays(programs.sampling)
    scores = programs.head(engine.weights.out_mixer, engine.head(), streams)
    programs.sample(scores, np.int32(0), how)
    num_drafts = plan.spec_window - 1 if plan.with_draft else 0
    if num_drafts:
        start_drafts(engine, state, window_words([0], [], 0, 0.0, 1), num_drafts)
    for num_tokens in {1, plan.spec_window}:
        size = window_rows(num_tokens, plan.spec_window, num_drafts, min_p)
        start_round(engine, state, size, how, num_drafts)


def _compile_fills(engine: Engine) -> None:
    for array in engine.arrays:
        for bank in engine.banks:
            engine.programs.fill(array, bank, [0], [0])
