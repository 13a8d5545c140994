"""The forward pass: weights and state as pytrees, one function per kind of block.

A block function reads its state and returns what `advance` needs to move the state past the first ``count`` tokens, so
that the same code serves prompt chunks (count known before) and decode windows (count known after verification).
Shapes: T tokens, C streams, E model width, L blocks (MTP block last), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.engine import attention, gdn, ple
from strata_jax.engine.arena import CellLayout, CellStore, Segments, Tables
from strata_jax.engine.expert_kernels import ExpertRows
from strata_jax.engine.experts import (
    ExpertCounts,
    ExpertWeights,
    LayerBank,
    OpenExperts,
    ask_experts,
    mixture,
    no_counts,
    sum_experts,
)
from strata_jax.engine.joined import Joined
from strata_jax.engine.layers import (
    MixerWeights,
    add_to_streams,
    inject_weights,
    read_streams,
    rms_norm,
    write_and_read,
    write_streams,
)
from strata_jax.engine.matrix import Matrix, linear, take_rows
from strata_jax.engine.replacement import Kept, Turn
from strata_jax.geometry import Geometry
from strata_jax.kernels.gdn_window import WindowRows

SequenceState = gdn.GdnState | attention.IndexState | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeights:
    """One block: two mixers around a token mixer (GDN or attention) and the experts; PLE where the model has it, whose
    matrices are apart."""

    attn_mixer: MixerWeights
    ffn_mixer: MixerWeights
    token_mixer: gdn.GdnWeights | attention.AttentionWeights
    experts: ExpertWeights
    ple: Joined[ple.PleWeights] | None


def without_table(w: Joined[BlockWeights]) -> Joined[BlockWeights]:
    """A block's weights but for those of the n-gram table, which only one block has."""
    return replace(w, parts=replace(w.parts, ple=None))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftWeights:
    """The MTP block: a whole attention block plus its input projection and output mixer."""

    block: Joined[BlockWeights]
    embed_norm: jax.Array
    hidden_norm: jax.Array
    project: Matrix
    out_mixer: Joined[MixerWeights]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Everything but the routed experts.

    Attributes:
        head: the embedding itself when the file ties them; None while it is unloaded.
    """

    embed: Matrix
    head: Matrix | None
    out_mixer: Joined[MixerWeights]
    blocks: tuple[Joined[BlockWeights], ...]
    draft: DraftWeights | None

    def without_head(self) -> Weights:
        """The weights that a prompt is read with."""
        return replace(self, head=None)

    def without_blocks(self) -> Weights:
        """The weights of all but the trunk's blocks: each array that a program is given takes the host's time."""
        return replace(self, blocks=())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What a sequence carries from step to step besides its K/V cells; donated and updated in place.

    Attributes:
        blocks: recurrent or index state of each trunk block.
        draft: index state of the MTP block, past the token that was chosen last but is not yet committed.
        draft_tail: that state's tail at the last committed token, from which a further prompt goes on.
        ple_history: f32[history_rows, C*E], None without a table.
        hidden: f32[C*E], the trunk's final streams at the last committed token (zeros before the first).
    """

    blocks: tuple[SequenceState, ...]
    draft: SequenceState
    draft_tail: jax.Array | None
    ple_history: jax.Array | None
    hidden: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlocksRead:
    """What blocks of a window leave until it is known how many tokens are kept.

    Attributes:
        after: per block what `advance_block` needs. ple_inputs: of the convolution of the n-gram table, if it was read.
        counts: expert look-ups and hits. uses: i32[blocks, X], uses of each expert.
    """

    after: tuple[Any, ...]
    ple_inputs: jax.Array | None
    counts: ExpertCounts
    uses: jax.Array


@dataclass(frozen=True)
class ModelSpec:
    """What the compiled programs are specialised to besides array shapes.

    replacement_decay: factor of use counts each round where rounds keep residency up (`engine/replacement.py`).
    kernels: the gated delta net runs by kernels, where these can compute it.
    """

    geometry: Geometry
    cells: CellLayout
    replacement_decay: float = 0.0
    kernels: bool = False

    def attention_index(self, layer: int) -> int:
        """Row of `Tables.kv_pages` of an attention block."""
        return self.geometry.attention_layers.index(layer)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OpenBlock:
    """A block of a chunk whose experts are only asked; `close_block` takes what they give.

    Attributes:
        streams: f32[T, C, E], as the experts read them. inject: f32[T, C], weights of their output in each stream.
    """

    streams: jax.Array
    inject: jax.Array
    experts: OpenExperts


def start_streams(embedding: Matrix, tokens: jax.Array, g: Geometry) -> jax.Array:
    """Start the streams: every stream holds the token's embedding row, f32[T, C, E]."""
    rows = take_rows(embedding, tokens)
    return jnp.broadcast_to(rows[:, None, :], (rows.shape[0], g.num_streams, rows.shape[1]))


# blocks of one signature are traced and lowered once in a program; XLA sees what it would see without
@partial(jax.jit, static_argnames=("spec",))
def block(
    streams: jax.Array,
    weights: Joined[BlockWeights],
    bank: LayerBank,
    arena: jax.Array,
    segments: Segments,
    expert_pages: jax.Array | Turn,
    cell_pages: jax.Array | None,
    state: SequenceState,
    start: jax.Array,
    count: jax.Array,
    spec: ModelSpec,
    cell_store: CellStore | None = None,
) -> tuple[Any, jax.Array, Any, ExpertCounts, Kept | None]:
    """Run one block (without PLE) on T tokens at positions ``start + i`` of which ``count`` are real.

    Args:
        arena: the core of the arena, where the K/V cells are.
        expert_pages: i32[X], the first page of each expert, or the block's turn to change them.
        cell_pages: i32[N], page table of this attention block; None for a GDN block.
        cell_store: where its groups of cells without a page are.

    Returns:
        streams, arena, what `advance_block` needs, expert counts, what else a turn has changed. Where the bank's
        experts are computed in passes an `OpenBlock` in place of the streams.
    """
    g, w = spec.geometry, weights.whole()
    after: Any
    read = read_streams(streams, w.attn_mixer, g.rms_eps)
    u = read.mixed
    if isinstance(w.token_mixer, gdn.GdnWeights):
        assert isinstance(state, gdn.GdnState)
        if streams.shape[0] <= gdn.CHUNK:
            y, after = gdn.window(u, w.token_mixer, state, g, kernels=spec.kernels)
        else:
            y, after = gdn.prefill(u, w.token_mixer, state, count, g, kernels=spec.kernels)
    else:
        assert cell_pages is not None
        assert not isinstance(state, gdn.GdnState)
        y, arena, after = attention.attend(
            u, w.token_mixer, arena, cell_pages, state, start, count, g, spec.cells, cell_store
        )
    read = write_and_read(read, y, w.attn_mixer, w.ffn_mixer, g.rms_eps)
    if bank.in_passes:
        assert not isinstance(expert_pages, Turn)
        asked, counts = ask_experts(read.mixed, w.experts, bank, expert_pages, count, g)
        return OpenBlock(read.streams, inject_weights(read, w.ffn_mixer), asked), arena, after, counts, None
    y, counts, turned = mixture(read.mixed, w.experts, bank, (arena, *segments), expert_pages, count, g)
    arena, kept = turned or (arena, None)
    return write_streams(read, y, w.ffn_mixer), arena, after, counts, kept


def close_block(opened: OpenBlock, rows: ExpertRows) -> jax.Array:
    """The streams f32[T, C, E] after a block, once all of its experts are in ``rows``."""
    return add_to_streams(opened.streams, opened.inject, sum_experts(rows, opened.experts))


def advance_block(before: SequenceState, after: Any, count: jax.Array) -> SequenceState:
    """The block's state once the first ``count`` tokens are kept."""
    if isinstance(after, gdn.GdnRows | WindowRows):
        assert isinstance(before, gdn.GdnState)
        return gdn.advance(before, after, count)
    if isinstance(after, gdn.GdnState):
        return after  # a long prompt chunk has advanced itself
    assert not isinstance(before, gdn.GdnState)
    return attention.advance(before, after, count)


def trunk(
    blocks: tuple[Joined[BlockWeights], ...],
    banks: tuple[LayerBank, ...],
    tables: Tables,
    arena: jax.Array,
    segments: Segments,
    states: tuple[SequenceState, ...],
    streams: jax.Array,
    ple_rows: jax.Array | None,
    ple_history: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
    spec: ModelSpec,
    kept: Kept | None = None,
    *,
    first: int = 0,
) -> tuple[jax.Array, jax.Array, BlocksRead, Kept | None]:
    """Run trunk blocks from the ``first`` on, on a window of T tokens whose streams are f32[T, C, E].

    Args:
        kept: what turns have changed so far in this round, in place of the segments; None: residents do not change.

    Returns:
        streams, arena, what the blocks leave, what turns have changed besides the arena.
    """
    g = spec.geometry
    after, uses, counts, ple_inputs = [], list[jax.Array](), no_counts(), None
    for layer, (w, bank, state) in enumerate(zip(blocks, banks, states, strict=True), start=first):
        if w.parts.ple is not None:
            assert ple_rows is not None
            assert ple_history is not None
            streams, ple_inputs = ple.apply(streams, ple_rows, w.parts.ple.whole(), ple_history, g)
        cell_pages = cell_store = None
        if not g.recurrent[layer]:
            row = spec.attention_index(layer)
            cell_pages, cell_store = tables.kv_pages[row], tables.store_of(row)
        where = expert_places(tables, layer, kept, spec)
        streams, arena, rows, block_counts, kept = block(
            streams, w, bank, arena, segments if kept is None else kept.segments, where, cell_pages, state, start,
            count, spec, cell_store,
        )  # fmt: skip
        after.append(rows)
        counts = counts + block_counts
        assert block_counts.uses is not None
        uses.append(block_counts.uses)
    return streams, arena, BlocksRead(tuple(after), ple_inputs, counts, jnp.stack(uses)), kept


def expert_places(tables: Tables, layer: int, kept: Kept | None, spec: ModelSpec) -> jax.Array | Turn:
    """The pages of a block's experts, or with replacement its turn."""
    if kept is None:
        return tables.expert_pages(layer)
    return Turn(kept.tables, tables.slot_page, layer, spec.replacement_decay)


def logits(streams: jax.Array, mixer: Joined[MixerWeights], head: Matrix, g: Geometry) -> jax.Array:
    """Output mixer and head: f32[T, C, E] -> f32[T, V]."""
    return linear(read_streams(streams, mixer.whole(), g.rms_eps).mixed, head)


def draft_inputs(weights: Weights, tokens: jax.Array, hidden: jax.Array, g: Geometry) -> jax.Array:
    """The MTP block's streams f32[T, C, E] from i32[T] tokens and f32[T, C*E] hidden rows of the positions before."""
    draft = weights.draft
    assert draft is not None
    shape = (g.num_streams, g.embed_width)
    h = rms_norm(hidden.reshape(-1, *shape), draft.hidden_norm.reshape(shape), g.rms_eps)
    e = rms_norm(take_rows(weights.embed, tokens), draft.embed_norm, g.rms_eps)
    joined = jnp.concatenate([jnp.broadcast_to(e[:, None, :], h.shape), h], axis=-1)
    return linear(joined.reshape(-1, 2 * g.embed_width), draft.project).reshape(h.shape)
