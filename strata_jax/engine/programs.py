"""The programs of the engine: which there are, and which arrays each uses up. How they are compiled: `compiled.py`.

A prompt chunk runs block by block (blocks of one signature share a program, so depth costs no compile time); a decode
round is a few programs per window size.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine import ple
from strata_jax.engine.arena import Segments, Tables
from strata_jax.engine.compiled import CompiledPrograms
from strata_jax.engine.decode import Keys, Round, feed_draft, first_drafts, round_end, round_part
from strata_jax.engine.expert_kernels import ExpertRows, add_rows, count_left, start_rows
from strata_jax.engine.experts import ExpertCounts, LayerBank, OpenExperts
from strata_jax.engine.joined import Joined
from strata_jax.engine.layers import MixerWeights
from strata_jax.engine.matrix import Matrix
from strata_jax.engine.model import (
    BlocksRead,
    BlockWeights,
    ModelSpec,
    OpenBlock,
    SequenceState,
    State,
    Weights,
    advance_block,
    block,
    close_block,
    logits,
    start_streams,
)
from strata_jax.engine.replacement import Kept
from strata_jax.engine.round_words import WindowForm
from strata_jax.engine.sampler import SamplingArrays, sample
from strata_jax.geometry import Geometry
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.kernels.page_fetch import fetch_pages
from strata_jax.sampling import Sampling


@dataclass
class Programs(CompiledPrograms):
    """The engine's programs by name; arguments and results as their functions have them.

    Attributes:
        sampling: by which the rounds that are compiled beforehand choose tokens.
        layouts: of banks, by the numbers that keys have for them.
    """

    spec: ModelSpec
    sampling: Sampling = field(default_factory=Sampling)
    layouts: list[ExpertLayout] = field(default_factory=list)

    def embed(self, embedding: Matrix, tokens: np.ndarray) -> jax.Array:
        """The streams f32[T, C, E] of tokens."""
        return self.call(("embed", len(tokens)), partial(start_streams, g=self.spec.geometry), (embedding, tokens))

    def ple_chunk(self, *args: Any) -> tuple[jax.Array, jax.Array]:
        """(streams, rows, weights, history, count) -> streams, history."""
        return self.call(
            ("ple", args[0].shape[0]), partial(_ple_chunk, g=self.spec.geometry), args, ("streams", "history")
        )

    def gdn_chunk(self, kind: int, *args: Any) -> tuple[jax.Array, SequenceState, ExpertCounts]:
        """(weights, bank, arena, segments, tables, layer, streams, state, start, count) -> streams, state, counts."""
        key = _key("gdn", kind, args[6].shape[0], segments=args[3])
        return self.call(key, partial(_gdn_chunk, spec=self.spec), args, ("streams", "state"))

    def attention_chunk(self, kind: int, *args: Any) -> tuple[jax.Array, jax.Array, SequenceState, ExpertCounts]:
        """(weights, bank, arena, segments, tables, layer, row, streams, state, start, count) ->
        streams, arena, state, counts."""
        key = _key("attention", kind, args[7].shape[0], segments=args[3])
        return self.call(key, partial(_attention_chunk, spec=self.spec), args, ("arena", "streams", "state"))

    def start_experts(
        self, layout: ExpertLayout, arena: jax.Array, segments: Segments, asked: OpenExperts, bank: jax.Array | None
    ) -> ExpertRows:
        """The rows of a chunk's experts, those of the arena computed and, given the bank's words, the others."""
        kind = "experts" if bank is None else "experts in place"
        key = _key(kind, *self._experts_key(layout, asked), segments=segments)
        return self.call(key, partial(_start_experts, layout=layout), (arena, segments, asked, bank))

    def add_experts(
        self, layout: ExpertLayout, rows: ExpertRows, asked: OpenExperts, words: jax.Array, lines: Any
    ) -> tuple[ExpertRows, jax.Array]:
        """Compute the experts of a group: the rows, and i32[], how many that are asked for are still left."""
        key = ("experts of a group", *self._experts_key(layout, asked), words.shape)
        return self.call(key, partial(_add_experts, layout=layout), (rows, asked, words, lines), ("rows",))

    def close_block(self, opened: OpenBlock, rows: ExpertRows) -> tuple[jax.Array, jax.Array]:
        """The streams f32[T, C, E] after a block of a chunk, and i32[], experts that it asked for and did not get."""
        args = (opened.streams, opened.inject, opened.experts, rows)
        return self.call(("experts summed", *rows.h.shape, opened.streams.shape[0]), _close_block, args, ("streams",))

    def _experts_key(self, layout: ExpertLayout, asked: OpenExperts) -> tuple[int, int]:
        """Tokens, and the number of the layout."""
        if layout not in self.layouts:
            self.layouts.append(layout)
        return asked.ids.shape[0], self.layouts.index(layout)

    def draft_chunk(self, *args: Any) -> tuple[jax.Array, jax.Array, SequenceState, jax.Array, ExpertCounts]:
        """(weights, bank, tables, arena, segments, index, tokens, streams, hidden, start, count) ->
        the MTP block's streams, arena, index state, hidden row of the last token, counts."""
        key = _key("draft", args[6].shape[0], segments=args[4])
        return self.call(key, partial(_draft_chunk, spec=self.spec), args, ("arena", "index", "hidden"))

    def chunk_counts(self, counts: list[ExpertCounts], lost: list[jax.Array]) -> jax.Array:
        """The counts of a chunk's blocks in one array i32[blocks, 3 + X]: look-ups, hits, experts that no block got
        (``lost: i32[]`` each, summed in every row), uses of each expert."""
        return self.call(("counts", len(counts), len(lost)), _chunk_counts, (counts, lost))

    def last_hidden(self, streams: jax.Array, count: Any) -> jax.Array:
        """The flattened streams f32[C*E] of row ``count - 1``."""
        return self.call(("hidden", streams.shape[0]), _last_hidden, (streams, count))

    def head(self, mixer: Joined[MixerWeights], head: Matrix, streams: jax.Array) -> jax.Array:
        """Logits f32[1, V] of one row of streams f32[1, C, E]."""
        return self.call(("head",), partial(logits, g=self.spec.geometry), (streams, mixer, head))

    def all_heads(self, mixer: Joined[MixerWeights], head: Matrix, streams: jax.Array) -> jax.Array:
        """Logits f32[T, V]."""
        args = (streams, mixer, head)
        # trunk and MTP block have mixers of their own, whose types may differ
        key = ("heads", streams.shape[0], mixer.parts.down.type_name, mixer.parts.up.type_name)
        return self.call(key, partial(logits, g=self.spec.geometry), args)

    def sample(self, scores: jax.Array, position: Any, how: SamplingArrays) -> jax.Array:
        """The first token i32[1], from the prompt's last logits f32[1, V]."""
        return self.call(("sample", _choice(how)), _sample, (scores, position, how))

    def first_window(self, num_drafts: int, *args: Any) -> tuple[jax.Array, State, jax.Array, Kept | None]:
        """`first_drafts`; what replacement has changed is the last argument, with the segments."""
        f = partial(first_drafts, num_drafts=num_drafts, spec=self.spec)
        kept = args[-1]
        key = _key("first_window", num_drafts, segments=args[4] if kept is None else kept.segments)
        donate = ("arena", "state") if kept is None else ("arena", "state", "kept")
        return self.call(key, f, args, donate)

    def round_part(
        self, form: WindowForm, first: int, *args: Any
    ) -> tuple[jax.Array, jax.Array, BlocksRead, Keys, Kept | None, jax.Array | None]:
        """`decode.round_part`; what replacement has changed is the last argument, with the segments."""
        f = partial(round_part, first=first, form=form, spec=self.spec)
        kept = args[-1]
        segments = args[5] if kept is None else kept.segments
        part = ("decode", form.num_rows, first, len(args[1]))
        donate = ("arena", "keys") if kept is None else ("arena", "keys", "kept")
        return self.in_place(
            part, _key(*part, segments=segments), f, args, donate, lambda out: (out[0], out[2], out[5])
        )

    def round_end(
        self, form: WindowForm, num_drafts: int, *args: Any
    ) -> tuple[jax.Array, State, Round, jax.Array, Kept | None]:
        """`decode.round_end`; what replacement has changed is the last argument, with the segments."""
        f = partial(round_end, num_drafts=num_drafts, form=form, spec=self.spec)
        kept = args[-1]
        segments = args[4] if kept is None else kept.segments
        sizes = tuple(len(part.after) for part in args[8])
        part = ("decode end", form.num_rows, num_drafts, sizes)
        key = _key(*part, _choice(args[10]), segments=segments)
        donate = ("arena", "state", "turn") if kept is None else ("arena", "state", "turn", "kept")
        # the report lies in host memory, the rest stays on the device
        return self.in_place(part, key, f, args, donate, lambda out: replace(out[2], report=None))

    def fill(self, array: jax.Array, bank: LayerBank, experts: list[int], pages: list[int]) -> jax.Array:
        """Copy experts of one block from the bank to runs of pages of one array, in place."""
        num_experts = bank.blobs.shape[0]
        padded = np.zeros((2, num_experts), np.int32)
        padded[:, : len(experts)] = experts, pages
        key = ("fill", array.shape[0], bank.blobs.shape[1], num_experts)
        return self.call(key, _fill, (array, bank.bare(), *padded, np.int32(len(experts))), ("array",))

    def copy_run(self, array: jax.Array, page: int, source: jax.Array, first: int, num_pages: int) -> jax.Array:
        """Copy a run of pages of an array, which may be the same, to ``page`` of this one, in place."""
        args: tuple = (array, np.int32(page), np.int32(first))
        if source is array:
            return self.call(
                ("move", num_pages, array.shape[0]), partial(_move_run, num_pages=num_pages), args, ("array",)
            )
        key = ("copy", num_pages, array.shape[0], source.shape[0])
        return self.call(key, partial(_copy_run, num_pages=num_pages), (*args, source), ("array",))

    def move_pages(self, array: jax.Array, sources: np.ndarray, targets: np.ndarray) -> jax.Array:
        """Copy pages i32[n] to other pages i32[n] of the same array, in place; targets past its end are dropped.

        No target is a source."""
        key = ("pages", len(sources), array.shape[0])
        return self.call(key, _move_pages, (array, sources, targets), ("array",))

    def second(self, x: jax.Array) -> jax.Array:
        """A second buffer with the same values: one array cannot be donated twice in a call."""
        return self.call(("second", x.shape), jnp.copy, (x,))


def _choice(how: SamplingArrays) -> str:
    return "greedy" if how.greedy else "sampled"


def _key(*parts: Hashable, segments: Segments) -> tuple[Hashable, ...]:
    """The key of a program that reads experts: it also depends on which segments there are."""
    return (*parts, f"+{len(segments)}") if segments else parts


def _ple_chunk(
    streams: jax.Array, rows: jax.Array, w: Joined[ple.PleWeights], history: jax.Array, count: jax.Array, *, g: Geometry
) -> tuple[jax.Array, jax.Array]:
    streams, inputs = ple.apply(streams, rows, w.whole(), history, g)
    return streams, ple.advance(inputs, count, g)


def _gdn_chunk(
    w: Joined[BlockWeights],
    bank: LayerBank,
    arena: jax.Array,
    segments: Segments,
    tables: Tables,
    layer: jax.Array,
    streams: jax.Array,
    state: SequenceState,
    start: jax.Array,
    count: jax.Array,
    *,
    spec: ModelSpec,
) -> tuple[jax.Array, SequenceState, ExpertCounts]:
    streams, _, after, counts, _ = block(
        streams, w, bank, arena, segments, tables.expert_pages(layer), None, state, start, count, spec
    )
    return streams, advance_block(state, after, count), counts


def _attention_chunk(
    w: Joined[BlockWeights],
    bank: LayerBank,
    arena: jax.Array,
    segments: Segments,
    tables: Tables,
    layer: jax.Array,
    row: jax.Array,
    streams: jax.Array,
    state: SequenceState,
    start: jax.Array,
    count: jax.Array,
    *,
    spec: ModelSpec,
) -> tuple[jax.Array, jax.Array, SequenceState, ExpertCounts]:
    streams, arena, after, counts, _ = block(
        streams, w, bank, arena, segments, tables.expert_pages(layer), tables.kv_pages[row], state, start, count, spec,
        tables.store_of(row),
    )  # fmt: skip
    return streams, arena, advance_block(state, after, count), counts


def _start_experts(
    arena: jax.Array, segments: Segments, asked: OpenExperts, bank: jax.Array | None, *, layout: ExpertLayout
) -> ExpertRows:
    return start_rows(asked.u, asked.ids, (arena, *segments), asked.pages, layout, bank)


def _add_experts(
    rows: ExpertRows, asked: OpenExperts, words: jax.Array, lines: jax.Array, *, layout: ExpertLayout
) -> tuple[ExpertRows, jax.Array]:
    rows = add_rows(rows, asked.u, words, lines, layout)
    return rows, count_left(rows)


def _close_block(
    streams: jax.Array, inject: jax.Array, asked: OpenExperts, rows: ExpertRows
) -> tuple[jax.Array, jax.Array]:
    return close_block(OpenBlock(streams, inject, asked), rows), count_left(rows)


def _draft_chunk(
    weights: Weights,
    bank: LayerBank,
    tables: Tables,
    arena: jax.Array,
    segments: Segments,
    index: SequenceState,
    tokens: jax.Array,
    streams: jax.Array,
    hidden: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    spec: ModelSpec,
) -> tuple[jax.Array, jax.Array, SequenceState, jax.Array, ExpertCounts]:
    flat = streams.reshape(streams.shape[0], -1)
    before = jnp.concatenate([hidden[None], flat[:-1]])
    out, arena, after, counts, _ = feed_draft(
        weights, bank, tables, arena, segments, index, tokens, before, start, count, spec
    )
    return out, arena, advance_block(index, after, count), flat[count - 1], counts


def _chunk_counts(counts: list[ExpertCounts], lost: list[jax.Array]) -> jax.Array:
    total = sum(lost, jnp.int32(0))
    return jnp.stack([jnp.concatenate([jnp.stack([c.lookups, c.hits, total]), jnp.asarray(c.uses)]) for c in counts])


def _last_hidden(streams: jax.Array, count: jax.Array) -> jax.Array:
    return streams[count - 1].reshape(-1)


def _sample(scores: jax.Array, position: jax.Array, how: SamplingArrays) -> jax.Array:
    return sample(scores, position[None], how)


def _fill(array: jax.Array, bank: LayerBank, experts: jax.Array, pages: jax.Array, count: jax.Array) -> jax.Array:
    return fetch_pages((array,), bank.blobs, experts, pages, count[None])[0]


def _move_run(array: jax.Array, page: jax.Array, first: jax.Array, *, num_pages: int) -> jax.Array:
    return _copy_run(array, page, first, array, num_pages=num_pages)


def _copy_run(array: jax.Array, page: jax.Array, first: jax.Array, source: jax.Array, *, num_pages: int) -> jax.Array:
    run = jax.lax.dynamic_slice(source, (first, 0), (num_pages, source.shape[1]))
    return jax.lax.dynamic_update_slice(array, run, (page, 0))


def _move_pages(array: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    return array.at[targets].set(array[sources], mode="drop")
