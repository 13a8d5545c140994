"""One decode round on the device: verify a window in a few parts, then accept, commit, and draft the next window.

A window is the last sampled token followed by drafts. The trunk's choice after each row is compared with the next
draft; the longest agreeing prefix is committed, so the text is that of plain decoding. Tokens are chosen per position
(see `sampler`), so this holds for sampling as well. The MTP block is fed every chosen token with the trunk's hidden
row before it, which both keeps its cache made of trunk rows only and gives the first draft; later drafts feed on the
block's own output, and what they write is overwritten by the next round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from strata_jax.engine import ple
from strata_jax.engine.arena import Segments, Tables
from strata_jax.engine.attention import IndexState
from strata_jax.engine.experts import ExpertCounts, LayerBank, no_counts
from strata_jax.engine.joined import Joined
from strata_jax.engine.matrix import Matrix
from strata_jax.engine.model import (
    BlocksRead,
    BlockWeights,
    ModelSpec,
    SequenceState,
    State,
    Weights,
    advance_block,
    block,
    draft_inputs,
    expert_places,
    logits,
    start_streams,
    trunk,
)
from strata_jax.engine.replacement import Kept
from strata_jax.engine.round_words import WindowForm, asked, report_words
from strata_jax.engine.sampler import SamplingArrays, sample
from strata_jax.kernels import backend
from strata_jax.kernels.await_words import await_words

Keys = tuple[jax.Array | None, ...]
"""Index keys f32[B, d_index] of some blocks, None of those that have none."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Round:
    """What a step leaves for the host.

    Attributes:
        report: i32[4 + T + D], for `read_report`, in host memory: a copy that the host starts comes 0.2 ms later.
        logits: f32[T, V].
        uses: i32[L', X], how many of the committed and the rejected rows used each expert of each block.
    """

    report: jax.Array
    logits: jax.Array
    uses: jax.Array


def round_part(
    embedding: Matrix | None,
    blocks: tuple[Joined[BlockWeights], ...],
    banks: tuple[LayerBank, ...],
    tables: Tables,
    arena: jax.Array,
    segments: Segments,
    states: tuple[SequenceState, ...],
    keys: Keys,
    streams: jax.Array | None,
    words: jax.Array,
    turn: jax.Array | None,
    ple_history: jax.Array | None,
    kept: Kept | None = None,
    *,
    first: int,
    form: WindowForm,
    spec: ModelSpec,
) -> tuple[jax.Array, jax.Array, BlocksRead, Keys, Kept | None, jax.Array | None]:
    """Run some trunk blocks of a round, from the ``first`` on: `trunk`; the index keys of blocks are written in place,
    for those of rejected tokens are written again, and come apart from the rest. The first part waits for the window's
    words, and also returns them for the other ones.

    Args:
        embedding: starts the streams, in the first part. streams: f32[T, C, E], of the part before in the others.
        states: without index keys. keys: of each block, None where it has none.
        words: i32[form.num_words], the window; in the first part the mailbox's box of them, with their number.
        turn: i32[1], in the first part: the number to wait for.
        kept: what replacement has changed so far, in place of the segments and of the table of slots.
    """
    found = None
    if streams is None:
        assert turn is not None
        words = found = await_words(words, turn, backend="reference" if backend.interprets() else "triton")
    window = asked(words, form)
    if streams is None:
        assert embedding is not None
        streams = start_streams(embedding, window.tokens, spec.geometry)
    ple_rows = None
    if any(w.parts.ple is not None for w in blocks):
        ple_rows = ple.rows_of(form.table_part(words), spec.geometry)
    streams, arena, read, kept = trunk(
        blocks, banks, tables, arena, segments, with_keys(states, keys), streams, ple_rows, ple_history, window.start,
        window.num_real, spec, kept, first=first,
    )  # fmt: skip
    after, keys = without_keys(read.after)
    return streams, arena, replace(read, after=after), keys, kept, found


def without_keys(states: tuple[Any, ...]) -> tuple[tuple[Any, ...], Keys]:
    """States of blocks without their index keys, and these."""
    bare = tuple(replace(s, keys=cast("Any", None)) if isinstance(s, IndexState) else s for s in states)
    return bare, tuple(s.keys if isinstance(s, IndexState) else None for s in states)


def with_keys(states: tuple[Any, ...], keys: Keys) -> tuple[Any, ...]:
    """Undo `without_keys`."""
    return tuple(s if k is None else replace(s, keys=k) for s, k in zip(states, keys, strict=True))


def round_end(
    weights: Weights,
    banks: tuple[LayerBank, ...],
    tables: Tables,
    arena: jax.Array,
    segments: Segments,
    state: State,
    streams: jax.Array,
    words: jax.Array,
    parts: tuple[BlocksRead, ...],
    turn: jax.Array,
    how: SamplingArrays,
    kept: Kept | None = None,
    *,
    num_drafts: int,
    form: WindowForm,
    spec: ModelSpec,
) -> tuple[jax.Array, State, Round, jax.Array, Kept | None]:
    """Choose tokens, accept drafts, move the state on and draft again; returns the arena, the state after the kept
    tokens, what is for the host, the number that the next round waits for, and what replacement has changed.

    A window without a real row keeps no token, and leaves all as it was.

    Args:
        weights: without the trunk's blocks. banks: the draft block's, if there is one.
        state: its blocks without index keys, as is what is returned of it.
        streams: f32[T, C, E] after the trunk. parts: what its blocks have left, in order.
        turn: i32[1], the number that this round has waited for.
        num_drafts: drafts to make for the next window (0 where the MTP block is not used).
    """
    window, forced, count, start, min_p = asked(words, form)
    assert weights.head is not None
    scores = logits(streams, weights.out_mixer, weights.head, spec.geometry)
    rows = jnp.arange(window.shape[0])
    chosen = jnp.where(forced >= 0, forced, sample(scores, start + 1 + rows, how))
    agrees = (window[1:] == chosen[:-1]) & (rows[1:] < count)
    num_kept = jnp.minimum(1 + jnp.sum(jnp.cumprod(agrees.astype(jnp.int32))), count)
    hidden = streams.reshape(window.shape[0], -1)
    after = [rows for part in parts for rows in part.after]
    ple_inputs = next((part.ple_inputs for part in parts if part.ple_inputs is not None), None)
    state = replace(
        state,
        blocks=tuple(advance_block(b, a, num_kept) for b, a in zip(state.blocks, after, strict=True)),
        ple_history=None if ple_inputs is None else ple.advance(ple_inputs, num_kept, spec.geometry),
        hidden=jnp.where(num_kept > 0, hidden[num_kept - 1], state.hidden),
    )
    drafts, num_good = jnp.zeros(num_drafts, jnp.int32), jnp.int32(0)
    counts, uses = parts[0].counts, [part.uses for part in parts]
    for part in parts[1:]:
        counts = counts + part.counts
    if num_drafts:
        tail = state.draft_tail
        arena, state, drafts, num_good, draft_counts, kept = draft(
            weights, banks, tables, arena, segments, state, chosen, hidden, start + 1, num_kept, min_p, kept,
            num_drafts=num_drafts, spec=spec,
        )  # fmt: skip
        if tail is not None and state.draft_tail is not None:
            state = replace(state, draft_tail=jnp.where(num_kept > 0, state.draft_tail, tail))
        counts = counts + draft_counts
        assert draft_counts.uses is not None
        uses.append(draft_counts.uses[None])
    elif weights.draft is not None:
        uses.append(jnp.zeros_like(uses[-1][:1]))
    kept = None if kept is None else kept.next_round(count)
    report = jax.device_put(report_words(chosen, num_kept, drafts, num_good, counts), jax.memory.Space.Host)
    return arena, state, Round(report, scores, jnp.concatenate(uses)), turn + 1, kept


def first_drafts(
    weights: Weights,
    banks: tuple[LayerBank, ...],
    tables: Tables,
    arena: jax.Array,
    segments: Segments,
    state: State,
    words: jax.Array,
    kept: Kept | None = None,
    *,
    num_drafts: int,
    spec: ModelSpec,
) -> tuple[jax.Array, State, jax.Array, Kept | None]:
    """Draft on from the one token of a window that follows the committed ones; its words are those of a round.

    Returns:
        arena, state, a report i32[4 + D] that keeps no token, what replacement has changed.
    """
    window, _, count, start, min_p = asked(words, WindowForm(1))
    arena, state, drafts, num_good, counts, kept = draft(
        weights, banks, tables, arena, segments, state, window, state.hidden[None], start, count, min_p, kept,
        num_drafts=num_drafts, spec=spec,
    )  # fmt: skip
    nothing = jnp.zeros(0, jnp.int32)
    return arena, state, report_words(nothing, jnp.int32(0), drafts, num_good, counts), kept


def draft(
    weights: Weights,
    banks: tuple[LayerBank, ...],
    tables: Tables,
    arena: jax.Array,
    segments: Segments,
    state: State,
    tokens: jax.Array,
    hidden: jax.Array,
    start: jax.Array,
    count: jax.Array,
    min_p: jax.Array,
    kept: Kept | None = None,
    *,
    num_drafts: int,
    spec: ModelSpec,
) -> tuple[jax.Array, State, jax.Array, jax.Array, ExpertCounts, Kept | None]:
    """Feed ``count`` tokens at positions ``start + i`` to the MTP block and draft on from the last of them.

    Args:
        hidden: f32[T, C*E], the trunk's streams at the position before each token.
        kept: what replacement has changed so far in this round; each pass takes a turn.

    Returns:
        arena, state, drafts i32[num_drafts], how many of them in a row reach ``min_p``, expert counts, what replacement
        has changed.
    """
    run = partial(feed_draft, weights, banks[-1], tables, spec=spec)
    streams, arena, after, counts, kept = run(arena, segments, state.draft, tokens, hidden, start, count, kept=kept)
    fed, before_last = advance_block(state.draft, after, count), advance_block(state.draft, after, count - 1)
    last = jax.lax.dynamic_slice_in_dim(streams, count - 1, 1)
    token, prob = _pick(weights, last, spec)

    def step(carry: tuple, i: jax.Array) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        arena, index, token, h, total, kept = carry
        before, one = h.reshape(1, -1), jnp.minimum(count, 1)  # none after a window without a real row
        streams, arena, after, more, kept = run(
            arena, segments, index, token, before, start + count + i, one, kept=kept
        )
        nxt, prob = _pick(weights, streams, spec)
        return (arena, advance_block(index, after, one), nxt, streams, total + more, kept), (nxt[0], prob)

    carry = (arena, fed, token, last, no_counts(spec.geometry.num_experts), kept)
    (arena, drafted, _, _, more, kept), (tokens_after, probs_after) = jax.lax.scan(
        step, carry, jnp.arange(num_drafts - 1)
    )
    drafts = jnp.concatenate([token, tokens_after])
    good = jnp.cumprod((jnp.concatenate([prob[None], probs_after]) >= min_p).astype(jnp.int32))
    # of what the later drafts did only the keys of blocks remain, which the next round overwrites in time
    index = fed
    if isinstance(drafted, IndexState) and isinstance(fed, IndexState):
        index = IndexState(drafted.keys, fed.tail)
    state = replace(state, draft=index, draft_tail=tail_of(before_last))
    return arena, state, drafts, jnp.sum(good), counts + more, kept


def feed_draft(
    weights: Weights,
    bank: LayerBank,
    tables: Tables,
    arena: jax.Array,
    segments: Segments,
    index: SequenceState,
    tokens: jax.Array,
    hidden: jax.Array,
    start: jax.Array,
    count: jax.Array,
    spec: ModelSpec,
    kept: Kept | None = None,
) -> tuple[jax.Array, jax.Array, Any, ExpertCounts, Kept | None]:
    """Run the MTP block on ``count`` of T tokens.

    Returns:
        streams f32[T, C, E], arena, what `advance_block` needs, expert counts, what replacement has changed so far.
    """
    assert weights.draft is not None
    g = spec.geometry
    layer, row = g.num_layers, spec.attention_index(g.num_layers)
    return block(
        draft_inputs(weights, tokens, hidden, g), weights.draft.block, bank, arena,
        segments if kept is None else kept.segments, expert_places(tables, layer, kept, spec), tables.kv_pages[row],
        index, start, count, spec, tables.store_of(row),
    )  # fmt: skip


def tail_of(state: SequenceState) -> jax.Array | None:
    """The raw index keys of an attention block's incomplete blocks; None for dense attention."""
    return state.tail if isinstance(state, IndexState) else None


def _pick(weights: Weights, streams: jax.Array, spec: ModelSpec) -> tuple[jax.Array, jax.Array]:
    """The MTP block's best next token i32[1] and its probability."""
    assert weights.draft is not None
    assert weights.head is not None
    scores = logits(streams, weights.draft.out_mixer, weights.head, spec.geometry)[0]
    best = jnp.argmax(scores)
    return best[None].astype(jnp.int32), jax.nn.softmax(scores)[best]
