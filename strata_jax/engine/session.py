"""One sequence on the engine: read a prompt in chunks, then decode round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.attention import IndexState
from strata_jax.engine.decode import tail_of
from strata_jax.engine.engine import Engine
from strata_jax.engine.experts import ExpertCounts, no_counts
from strata_jax.engine.model import State
from strata_jax.engine.sampler import SamplingArrays, sampling_arrays
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.sampling import Sampling


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One prompt chunk: its place, its size, its time (compilation apart) and its experts."""

    start: int
    num_tokens: int
    padded_tokens: int
    seconds: float
    lookups: int
    hits: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One decode round: tokens verified and emitted, its time (compilation apart) and its experts."""

    position: int
    window_tokens: int
    emitted: tuple[int, ...]
    seconds: float
    lookups: int
    hits: int

    @property
    def num_drafted(self) -> int:
        return self.window_tokens - 1

    @property
    def num_accepted(self) -> int:
        return len(self.emitted) - 1


@dataclass
class Session:
    """Tokens in the cache and the device state after them.

    Attributes:
        tokens: what the state has seen, in order; ``len(tokens)`` is the next position.
    """

    engine: Engine
    on_chunk: Callable[[ChunkRecord], None] = lambda record: None
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.engine.empty_state()
        self.drafts_usable = self.engine.plan.with_draft
        self.engine.owner = self

    @property
    def num_cells_left(self) -> int:
        return self.engine.plan.context_cells - len(self.tokens)

    def prefill(self, tokens: Sequence[int], *, want: str = "last") -> np.ndarray:
        """Read tokens in chunks.

        Args:
            want: ``"last"`` returns f32[1, V] of the last token, ``"all"`` f32[T, V], ``"draft"`` the MTP block's
                f32[T, V] (its prediction from each token and the trunk's state before it).

        Raises:
            ConfigError: no tokens, or ids outside the vocabulary.
            DoesNotFit: more tokens than cells are left.
        """
        self._check_tokens(tokens)
        if want == "draft" and not self.drafts_usable:
            raise ConfigError("draft logits: the draft block is not loaded (spec.window=1) or has not seen all tokens")
        rows: list[np.ndarray] = []
        chunk = self.engine.plan.chunk_tokens
        for first in range(0, len(tokens), chunk):
            part = list(tokens[first : first + chunk])
            is_last = first + len(part) == len(tokens)
            rows += self._read_chunk(part, want if want != "last" or is_last else "none")
        return np.concatenate(rows)

    def decode(
        self,
        first_logits: np.ndarray,
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] = frozenset(),
        min_p: float = 0.0,
        draft: bool = True,
    ) -> Iterator[RoundRecord]:
        """Generate at most ``max_tokens`` tokens after the prompt whose last logits are ``first_logits``.

        The first record holds the token chosen from ``first_logits``. Ends after a stop id, at ``max_tokens`` or at the
        end of the context.
        """
        self._check_owner()
        engine, how = self.engine, sampling_arrays(sampling or Sampling())
        num_drafts = engine.plan.spec_window - 1 if draft and self.drafts_usable else 0
        self.drafts_usable = num_drafts > 0  # tokens decoded without drafts are missing in the MTP block's cache
        started = engine.programs.clock_s()
        token = int(engine.programs.sample(jnp.asarray(first_logits[-1:]), np.int32(len(self.tokens)), how)[0])
        yield RoundRecord(len(self.tokens), 1, (token,), engine.programs.clock_s() - started, 0, 0)
        left = max_tokens - 1
        drafts, counts = [], no_counts()
        if num_drafts and left > 0 and token not in stop_ids and self.num_cells_left > 0:
            self._check_owner()
            engine.arena, self.state, proposed, good, counts = engine.programs.first_window(
                num_drafts, engine.weights, engine.banks, engine.tables, engine.arena, self.state,
                np.array([token], np.int32), self.state.hidden[None], np.int32(len(self.tokens)), np.int32(1),
                np.float32(min_p),
            )  # fmt: skip
            drafts = np.asarray(proposed)[: int(good)].tolist()
        while left > 0 and token not in stop_ids and self.num_cells_left > 0:
            window = [token, *drafts][: min(left, self.num_cells_left)]
            record, drafts, _ = self._round(window, [], how, min_p, num_drafts, counts)
            counts = no_counts()
            yield record
            left -= len(record.emitted)
            if stop_ids.intersection(record.emitted):
                return
            token = record.emitted[-1]

    def force(self, tokens: Sequence[int]) -> Iterator[tuple[RoundRecord, np.ndarray]]:
        """Continue with given tokens, one verify row per token, without drafts; yields logits f32[V] after each."""
        self._check_tokens(tokens)
        self.drafts_usable = False  # the MTP block does not see these tokens
        how = sampling_arrays(Sampling())
        for i, token in enumerate(tokens):
            record, _, scores = self._round([token], list(tokens[i + 1 : i + 2]), how, 0.0, 0, no_counts())
            yield record, np.asarray(scores[0])

    def _check_owner(self) -> None:
        if self.engine.owner is not self:
            raise RuntimeError("the K/V cells of this sequence were taken over by a later one")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        self._check_owner()
        self.engine.geometry.check_token_ids(tokens)
        if len(tokens) > self.num_cells_left:
            raise DoesNotFit(
                f"{len(tokens)} tokens do not fit: the context has {self.engine.plan.context_cells} cells, "
                f"{len(self.tokens)} are used; set model.max_context={len(self.tokens) + len(tokens)} or more"
            )

    def _read_chunk(self, part: list[int], want: str) -> list[np.ndarray]:
        engine, programs, started = self.engine, self.engine.programs, self.engine.programs.clock_s()
        weights, tables, count, start = engine.weights, engine.tables, np.int32(len(part)), np.int32(len(self.tokens))
        padded = next(size for size in engine.plan.prefill_buckets if size >= len(part))
        ids = np.zeros(padded, np.int32)
        ids[: len(part)] = part
        rows = engine.ple_rows(self.tokens, part, padded)
        state, blocks, totals = self.state, list(self.state.blocks), []
        draft_state, tail = state.draft, state.draft_tail
        if isinstance(draft_state, IndexState) and tail is not None:
            draft_state = IndexState(draft_state.keys, tail)  # forget a token that was chosen but never committed
        streams, arena, history = programs.embed(weights, ids), engine.arena, state.ple_history
        attention_row = 0
        for layer, w in enumerate(weights.blocks):
            bank, number = engine.banks[layer], np.int32(layer)
            if w.ple is not None:
                streams, history = programs.ple_chunk(streams, rows, w.ple, history, count)
            kind, w = engine.block_kind[layer], replace(w, ple=None)
            if engine.geometry.recurrent[layer]:
                streams, blocks[layer], counts = programs.gdn_chunk(
                    kind, w, bank, arena, tables, number, streams, blocks[layer], start, count
                )
            else:
                streams, arena, blocks[layer], counts = programs.attention_chunk(
                    kind, w, bank, arena, tables, number, np.int32(attention_row), streams, blocks[layer], start, count
                )
                attention_row += 1
            totals.append(counts)
        draft_streams = None
        if engine.plan.with_draft:
            draft_streams, arena, draft_state, hidden, counts = programs.draft_chunk(
                weights, engine.banks[-1], tables, arena, draft_state, ids, streams, state.hidden, start, count
            )
            totals.append(counts)
        else:
            hidden = programs.last_hidden(streams, count)
        engine.arena = arena
        self.state = State(tuple(blocks), draft_state, _copy(tail_of(draft_state)), history, hidden)
        self.tokens += part
        out = self._chunk_logits(want, streams, draft_streams, len(part))
        lookups, hits = _totals(totals)
        self.on_chunk(ChunkRecord(int(start), len(part), padded, engine.programs.clock_s() - started, lookups, hits))
        return out

    def _chunk_logits(self, want: str, streams: jax.Array, draft_streams: jax.Array | None, n: int) -> list[np.ndarray]:
        weights, programs = self.engine.weights, self.engine.programs
        if want == "last":
            return [np.asarray(programs.head(weights.out_mixer, weights.head, streams, np.int32(n - 1)))]
        if want == "all":
            return [np.asarray(programs.all_heads(weights.out_mixer, weights.head, streams))[:n]]
        if want == "draft":
            assert weights.draft is not None
            assert draft_streams is not None
            return [np.asarray(programs.all_heads(weights.draft.out_mixer, weights.head, draft_streams))[:n]]
        return []

    def _round(
        self,
        window: list[int],
        forced: list[int],
        how: SamplingArrays,
        min_p: float,
        num_drafts: int,
        earlier: ExpertCounts,
    ) -> tuple[RoundRecord, list[int], jax.Array]:
        """Verify a window; returns the record, the drafts worth verifying next, and the logits f32[T, V]."""
        self._check_owner()
        engine, started, start = self.engine, self.engine.programs.clock_s(), len(self.tokens)
        # two programs at most: the full window with unused rows masked, and a lone token where that is the rule
        lone = len(window) == 1 and (num_drafts == 0 or min_p > 0)
        size = 1 if lone else engine.plan.spec_window
        ids, wanted = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        ids[: len(window)] = window
        wanted[: len(forced)] = forced
        rows = engine.ple_rows(self.tokens, window, size)
        engine.arena, self.state, out = engine.programs.decode(
            num_drafts, engine.weights, engine.banks, engine.tables, engine.arena, self.state, ids,
            np.int32(len(window)), np.int32(start), rows, wanted, how, np.float32(min_p),
        )  # fmt: skip
        kept = int(out.num_tokens)
        emitted = tuple(np.asarray(out.tokens)[:kept].tolist())
        drafts = np.asarray(out.next_drafts)[: int(out.num_drafts)].tolist()
        self.tokens += window[:kept]
        lookups, hits = _totals([earlier, out.counts])
        seconds = engine.programs.clock_s() - started
        return RoundRecord(start, len(window), emitted, seconds, lookups, hits), drafts, out.logits


def _copy(x: jax.Array | None) -> jax.Array | None:
    """A second buffer: one array cannot be donated twice in a call."""
    return None if x is None else jnp.copy(x)


def _totals(counts: list[ExpertCounts]) -> tuple[int, int]:
    return sum(int(c.lookups) for c in counts), sum(int(c.hits) for c in counts)
