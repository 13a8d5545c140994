"""The compiled programs of the engine: which there are, when they are compiled, what compiling cost.

Programs are compiled ahead of their first call and kept by a key (kind, number of rows, signature of the block). A
prompt chunk runs block by block (blocks of one signature share a program, so depth costs no compile time); a decode
round is one program per window size.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine import ple
from strata_jax.engine.arena import Tables
from strata_jax.engine.decode import Round, decode_step, draft, feed_draft
from strata_jax.engine.experts import ExpertCounts, LayerBank
from strata_jax.engine.layers import MixerWeights
from strata_jax.engine.matrix import Matrix
from strata_jax.engine.model import (
    BlockWeights,
    ModelSpec,
    SequenceState,
    State,
    Weights,
    advance_block,
    block,
    embed,
    logits,
)
from strata_jax.engine.sampler import SamplingArrays, sample
from strata_jax.geometry import Geometry

Watch = Callable[[str], AbstractContextManager[None]]


@dataclass
class Programs:
    """Compiles on demand.

    Attributes:
        watch: a context that each compilation runs in, made from the program's name.
        compile_s: seconds spent compiling so far.
    """

    spec: ModelSpec
    watch: Watch = lambda name: nullcontext()
    compiled: dict[Hashable, Any] = field(default_factory=dict)
    compile_s: float = 0.0

    def clock_s(self) -> float:
        """Seconds on a clock that stands still while a program is compiled."""
        return time.perf_counter() - self.compile_s

    def embed(self, weights: Weights, tokens: np.ndarray) -> jax.Array:
        return self._call(("embed", len(tokens)), partial(embed, g=self.spec.geometry), (weights, tokens))

    def ple_chunk(self, *args: Any) -> tuple[jax.Array, jax.Array]:
        """(streams, rows, weights, history, count) -> streams, history."""
        return self._call(("ple", args[0].shape[0]), partial(_ple_chunk, g=self.spec.geometry), args, donate=(0, 3))

    def gdn_chunk(self, kind: int, *args: Any) -> tuple[jax.Array, SequenceState, ExpertCounts]:
        """(weights, bank, arena, tables, layer, streams, state, start, count) -> streams, state, counts."""
        return self._call(("gdn", kind, args[5].shape[0]), partial(_gdn_chunk, spec=self.spec), args, donate=(5, 6))

    def attention_chunk(self, kind: int, *args: Any) -> tuple[jax.Array, jax.Array, SequenceState, ExpertCounts]:
        """(weights, bank, arena, tables, layer, row, streams, state, start, count) -> streams, arena, state, counts."""
        key = ("attention", kind, args[6].shape[0])
        return self._call(key, partial(_attention_chunk, spec=self.spec), args, donate=(2, 6, 7))

    def draft_chunk(self, *args: Any) -> tuple[jax.Array, jax.Array, SequenceState, jax.Array, ExpertCounts]:
        """(weights, bank, tables, arena, index, tokens, streams, hidden, start, count) ->
        the MTP block's streams, arena, index state, hidden row of the last token, counts."""
        key = ("draft", args[5].shape[0])
        return self._call(key, partial(_draft_chunk, spec=self.spec), args, donate=(3, 4, 7))

    def last_hidden(self, streams: jax.Array, count: Any) -> jax.Array:
        """The flattened streams f32[C*E] of row ``count - 1``."""
        return self._call(("hidden", streams.shape[0]), _last_hidden, (streams, count))

    def head(self, mixer: MixerWeights, head: Matrix, streams: jax.Array, row: Any) -> jax.Array:
        """Logits f32[1, V] of one row of the streams."""
        return self._call(("head", streams.shape[0]), partial(_head, g=self.spec.geometry), (mixer, head, streams, row))

    def all_heads(self, mixer: MixerWeights, head: Matrix, streams: jax.Array) -> jax.Array:
        """Logits f32[T, V]."""
        args = (streams, mixer, head)
        # trunk and MTP block have mixers of their own, whose types may differ
        key = ("heads", streams.shape[0], mixer.down.type_name, mixer.up.type_name)
        return self._call(key, partial(logits, g=self.spec.geometry), args)

    def sample(self, scores: jax.Array, position: Any, how: SamplingArrays) -> jax.Array:
        """The first token i32[1], from the prompt's last logits f32[1, V]."""
        return self._call(("sample",), _sample, (scores, position, how))

    def first_window(self, num_drafts: int, *args: Any) -> tuple[jax.Array, State, jax.Array, jax.Array, ExpertCounts]:
        """(weights, banks, tables, arena, state, tokens, hidden, start, count, min_p) ->
        arena, state, drafts, good, counts."""
        f = partial(draft, num_drafts=num_drafts, spec=self.spec)
        return self._call(("first_window", num_drafts), f, args, donate=(3, 4))

    def decode(self, num_drafts: int, *args: Any) -> tuple[jax.Array, State, Round]:
        """`decode_step`; the window is the sixth argument."""
        f = partial(decode_step, num_drafts=num_drafts, spec=self.spec)
        return self._call(("decode", args[5].shape[0], num_drafts), f, args, donate=(3, 4))

    def fill_slot(self, arena: jax.Array, bank: LayerBank, expert: Any, page: Any) -> jax.Array:
        """Copy one expert from the bank into the arena, in place."""
        key = ("fill", bank.layout.num_words, bank.blobs.shape[0])
        return self._call(key, _fill_slot, (arena, bank.bare(), expert, page), donate=(0,))

    def _call(self, key: Hashable, f: Callable, args: tuple, donate: tuple[int, ...] = ()) -> Any:
        program = self.compiled.get(key)
        if program is None:
            program = self.compiled[key] = self._compile(key, f, args, donate)
        return program(*args)

    def _compile(self, key: Hashable, f: Callable, args: tuple, donate: tuple[int, ...]) -> Any:
        name = " ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
        started = time.perf_counter()
        with self.watch(name), warnings.catch_warnings():
            # a donation that cannot be used means a second copy of the state
            warnings.filterwarnings("error", message=".*donated buffers were not usable.*")
            program = jax.jit(f, donate_argnums=donate).lower(*args).compile()
        self.compile_s += time.perf_counter() - started
        return program


def _ple_chunk(
    streams: jax.Array, rows: jax.Array, w: ple.PleWeights, history: jax.Array, count: jax.Array, *, g: Geometry
) -> tuple[jax.Array, jax.Array]:
    streams, inputs = ple.apply(streams, rows, w, history, g)
    return streams, ple.advance(inputs, count, g)


def _gdn_chunk(
    w: BlockWeights,
    bank: LayerBank,
    arena: jax.Array,
    tables: Tables,
    layer: jax.Array,
    streams: jax.Array,
    state: SequenceState,
    start: jax.Array,
    count: jax.Array,
    *,
    spec: ModelSpec,
) -> tuple[jax.Array, SequenceState, ExpertCounts]:
    streams, _, after, counts = block(
        streams, w, bank, arena, tables.expert_pages(layer), None, state, start, count, spec
    )
    return streams, advance_block(state, after, count), counts


def _attention_chunk(
    w: BlockWeights,
    bank: LayerBank,
    arena: jax.Array,
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
    streams, arena, after, counts = block(
        streams, w, bank, arena, tables.expert_pages(layer), tables.kv_pages[row], state, start, count, spec
    )
    return streams, arena, advance_block(state, after, count), counts


def _draft_chunk(
    weights: Weights,
    bank: LayerBank,
    tables: Tables,
    arena: jax.Array,
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
    out, arena, after, counts = feed_draft(weights, bank, tables, arena, index, tokens, before, start, count, spec)
    return out, arena, advance_block(index, after, count), flat[count - 1], counts


def _last_hidden(streams: jax.Array, count: jax.Array) -> jax.Array:
    return streams[count - 1].reshape(-1)


def _head(mixer: MixerWeights, head: Matrix, streams: jax.Array, row: jax.Array, *, g: Geometry) -> jax.Array:
    return logits(jax.lax.dynamic_slice_in_dim(streams, row, 1), mixer, head, g)


def _sample(scores: jax.Array, position: jax.Array, how: SamplingArrays) -> jax.Array:
    return sample(scores, position[None], how)


def _fill_slot(arena: jax.Array, bank: LayerBank, expert: jax.Array, page: jax.Array) -> jax.Array:
    words = arena.shape[1] * bank.layout.num_pages
    blob = jnp.pad(bank.fetch(expert), (0, words - bank.layout.num_words))
    return jax.lax.dynamic_update_slice(arena, blob.reshape(bank.layout.num_pages, -1), (page, 0))
