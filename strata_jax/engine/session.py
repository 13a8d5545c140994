"""One sequence on the engine: read a prompt in chunks, then decode round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.attention import IndexState
from strata_jax.engine.chunk import read_chunk, window_rows
from strata_jax.engine.engine import Engine
from strata_jax.engine.round_words import Lookups, Report, read_report, window_words
from strata_jax.engine.rounds import next_round, start_ahead, start_drafts, withdraw
from strata_jax.engine.sampler import SamplingArrays, sampling_arrays
from strata_jax.engine.staging import Stage, staged_prompt, stages
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
    """One decode round: tokens verified and emitted, its time (compilation apart) and its experts.

    uses: i32[L', X], how many tokens of the window used each expert of each block; None where it is not counted.
    """

    position: int
    window_tokens: int
    emitted: tuple[int, ...]
    seconds: float
    lookups: int
    hits: int
    uses: np.ndarray | None = None

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
        count_uses: whether rounds say which experts they used.
        lost_from: cells from here on were given up although tokens lie in them, or a step that began here was broken
            off; going back to a state up to here goes on.
    """

    engine: Engine
    on_chunk: Callable[[ChunkRecord], None] = lambda record: None
    tokens: list[int] = field(default_factory=list)
    count_uses: bool = False
    lost_from: int | None = None
    _broken_off: str | None = None

    def __post_init__(self) -> None:
        withdraw(self.engine)
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
        if want == "draft" and not self.drafts_usable:
            raise ConfigError("draft logits: the draft block is not loaded (spec.window=1) or has not seen all tokens")
        rows = [chunk for chunk in self.chunks(tokens, want) if chunk is not None]
        return self.last_logits() if want == "last" else np.concatenate(rows)

    def chunks(self, tokens: Sequence[int], want: str = "last") -> Iterator[np.ndarray | None]:
        """Read tokens, one chunk for each step of the iterator; memory may be moved between the steps.

        Yields the chunk's logits as `prefill` gives them; with ``"last"`` None, and `last_logits` follows.
        """
        self._check_tokens(tokens)
        chunk, engine = self.engine.plan.chunk_tokens, self.engine
        parts = [list(tokens[first : first + chunk]) for first in range(0, len(tokens), chunk)]
        with staged_prompt(engine, [len(part) for part in parts]) as stage:
            rows = self._ple_rows(parts[0])
            for part, following in zip(parts, [*parts[1:], []]):
                self._check_owner()
                out, rows = self._read_chunk(part, rows, want, stage if stages(engine, len(part)) else None, following)
                yield out

    def last_logits(self) -> np.ndarray:
        """The logits f32[1, V] after the last token; the head must be loaded."""
        self._check_owner()
        weights, g = self.engine.weights, self.engine.geometry
        streams = self.state.hidden.reshape(1, g.num_streams, g.embed_width)
        return np.asarray(self.engine.programs.head(weights.out_mixer, self.engine.head(), streams))

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
        drafts: list[int] = []
        used = Lookups()
        if num_drafts and left > 0 and token not in stop_ids and self.num_cells_left > 0:
            self._check_owner()
            drafts, used = self._first_window(token, num_drafts, min_p)
        with engine.rounds():
            while left > 0 and token not in stop_ids and self.num_cells_left > 0:
                window = [token, *drafts][: min(left, self.num_cells_left)]
                sure = left > len(window) and (num_drafts == 0 or min_p == 0)
                following = 1 + num_drafts if sure else 0
                record, drafts = self._round(window, [], how, min_p, num_drafts, used, following)[:2]
                used = Lookups()
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
        with self.engine.rounds():
            for i, token in enumerate(tokens):
                record, _, scores = self._round([token], list(tokens[i + 1 : i + 2]), how, 0.0, 0)
                yield record, np.asarray(scores)[0]

    def read_windows(self, tokens: Sequence[int]) -> None:
        """Read tokens through decode windows, as many at a time as a window has; `last_logits` or more may follow.

        The MTP block reads them too, so that drafts stay usable where they were.
        """
        self._check_tokens(tokens)
        engine = self.engine
        num_drafts = engine.plan.spec_window - 1 if self.drafts_usable else 0
        how, left = sampling_arrays(Sampling()), list(tokens)
        if num_drafts and left:
            self._forget_chosen()
            self._first_window(left[0], num_drafts, 0.0)
        most = engine.plan.spec_window if engine.plan.with_draft else 1
        with engine.rounds():
            while left:
                window, left = left[:most], left[most:]
                forced, following = [*window[1:], *left[:1]], min(most, len(left))
                self._round(window, forced, how, 0.0, num_drafts, following=following)
        self._forget_chosen()

    def _forget_chosen(self) -> None:
        """Bring the MTP block's state back to the last committed token: it has also seen the one chosen after it."""
        index, tail = self.state.draft, self.state.draft_tail
        if isinstance(index, IndexState) and tail is not None:
            self.state = replace(self.state, draft=IndexState(index.keys, self.engine.programs.second(tail)))

    def _first_window(self, token: int, num_drafts: int, min_p: float) -> tuple[list[int], Lookups]:
        """Give the MTP block a token that follows the committed ones; returns the drafts worth verifying after it."""
        engine = self.engine
        self._require_cells(len(self.tokens) + num_drafts)
        engine.head()
        window = window_words([token], [], len(self.tokens), min_p, 1)
        with self._moving_on("a first window"):
            engine.arena, self.state, words, kept = start_drafts(engine, self.state, window, num_drafts)
            engine.after_turns(kept)
            report = read_report(words, 0)
        return report.drafts, report.used

    def _has_cells(self, start: int, num_rows: int) -> bool:
        """Whether a round from a position on can write its cells as they are now."""
        engine, end = self.engine, min(start + num_rows, self.engine.plan.context_cells)
        return engine.cell_store is None and start < end <= engine.known.mapped_cells

    def _require_cells(self, end: int) -> None:
        """What a program would write to cells without a page would be lost.

        Where the device has a window of the cells it is moved to those from the next position to ``end``.
        """
        engine, end = self.engine, min(end, self.engine.plan.context_cells)
        if engine.cell_store is not None:
            from strata_jax.engine.moves import Mover  # moves know sessions, too

            (engine.mover or Mover(engine)).slide_cells(len(self.tokens), end)
        elif engine.known.mapped_cells < end:
            raise RuntimeError(f"{end:,} K/V cells are needed; {engine.known.mapped_cells:,} are mapped")

    def _check_owner(self) -> None:
        """Before the device is asked for anything but a round."""
        withdraw(self.engine)
        self._check_mine()

    def _check_mine(self) -> None:
        self.engine.check_running()
        if self.engine.owner is not self:
            raise RuntimeError("the K/V cells of this sequence were taken over by a later one")
        self.check_cells()

    @contextmanager
    def _moving_on(self, what: str) -> Iterator[None]:
        """Within the context programs move the state on, and then the tokens; broken off, it may be past them."""
        start = len(self.tokens)
        try:
            yield
        except BaseException as error:
            self.lost_from, self._broken_off = start, what
            self.engine.stop_if_lost(what, error)
            raise

    def check_cells(self) -> None:
        """Raise RuntimeError if cells with tokens of this sequence were given up, or a step was broken off."""
        if self.lost_from is not None:
            if self._broken_off is not None:
                raise RuntimeError(
                    f"this sequence cannot go on: {self._broken_off} was broken off after {self.lost_from:,} tokens"
                )
            raise RuntimeError(
                f"the K/V cells of this sequence of {len(self.tokens):,} tokens were given up from"
                f" {self.lost_from:,} on"
            )

    def now_at(self, tokens: list[int], *, drafts_usable: bool) -> None:
        """Note that the state is the one after these tokens."""
        self.tokens, self.drafts_usable = tokens, drafts_usable
        self.lost_from = self._broken_off = None

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        self._check_owner()
        self.engine.geometry.check_token_ids(tokens)
        if len(tokens) > self.num_cells_left:
            raise DoesNotFit(
                f"{len(tokens)} tokens do not fit: the context has {self.engine.plan.context_cells} cells, "
                f"{len(self.tokens)} are used; set model.max_context={len(self.tokens) + len(tokens)} or more"
            )

    def _read_chunk(
        self, part: list[int], rows: np.ndarray | None, want: str, stage: Stage | None, following: list[int]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Read tokens with their n-gram rows; returns their logits and the rows of the tokens after them."""
        engine, started, start = self.engine, self.engine.programs.clock_s(), len(self.tokens)
        self._require_cells(start + len(part))
        padded = engine.plan.bucket(len(part))
        ids = np.zeros(padded, np.int32)
        ids[: len(part)] = part
        next_count = len(following) if stages(engine, len(following)) else 0
        with self._moving_on("a chunk"):
            engine.arena, self.state, read = read_chunk(
                engine, self.state, ids, rows, start, len(part), stage, next_count
            )
            self.tokens += part
            rows = self._ple_rows(following) if following else None  # looked up while the device reads this chunk
            out = self._chunk_logits(want, read.streams, read.draft_streams, len(part))
            counts = np.asarray(read.counts)
            if lost := counts[0, 2]:
                raise RuntimeError(f"{lost} experts that a chunk asked for were not copied: its results are wrong")
        if engine.staging is not None:
            engine.staging.count(counts[:, 3:], len(part))
        lookups, hits = counts[:, :2].sum(axis=0).tolist()
        self.on_chunk(ChunkRecord(start, len(part), padded, engine.programs.clock_s() - started, lookups, hits))
        return out, rows

    def _ple_rows(self, part: list[int]) -> np.ndarray | None:
        """N-gram rows of a chunk that follows the tokens read so far."""
        return self.engine.ple_rows(self.tokens, part, self.engine.plan.bucket(len(part)))

    def _chunk_logits(self, want: str, streams: jax.Array, draft_streams: jax.Array | None, n: int
                      ) -> np.ndarray | None:  # fmt: skip
        engine = self.engine
        if want == "last":
            return None
        mixer = engine.weights.out_mixer
        if want == "draft":
            assert engine.weights.draft is not None
            assert draft_streams is not None
            mixer, streams = engine.weights.draft.out_mixer, draft_streams
        return np.asarray(engine.programs.all_heads(mixer, engine.head(), streams))[:n]

    def _round(
        self,
        window: list[int],
        forced: list[int],
        how: SamplingArrays,
        min_p: float,
        num_drafts: int,
        earlier: Lookups = Lookups(),  # noqa: B008 (immutable)
        following: int = 0,
    ) -> tuple[RoundRecord, list[int], jax.Array]:
        """Verify a window; returns the record, the drafts worth verifying next, and the logits f32[T, V], over which
        the next round writes.

        Args:
            following: tokens of the window that is sure to follow: its round may be started ahead, and then writes over
                the logits.
        """
        self._check_mine()
        engine, started, start = self.engine, self.engine.programs.clock_s(), len(self.tokens)
        size = window_rows(len(window), engine.plan.spec_window, num_drafts, min_p)
        self._require_cells(start + size + num_drafts)
        engine.head()
        rows = engine.ple_rows(self.tokens, window, size)
        words = window_words(window, forced, start, min_p, size, rows)
        with self._moving_on("a round"):
            report = Report((), [], Lookups())
            while not report.emitted:
                out, waited = next_round(self, words, size, how, num_drafts)
                if self.count_uses:
                    out.uses.copy_to_host_async()
                elif following:
                    rows_after = window_rows(following, engine.plan.spec_window, num_drafts, min_p)
                    if self._has_cells(start + len(window), rows_after + num_drafts):
                        start_ahead(self, rows_after, how, num_drafts)
                report = read_report(out.report, size)
                if not report.emitted:  # it has waited, and was told too late
                    if not waited:
                        raise RuntimeError("a round that was told what to read has kept no token")
                    withdraw(engine)
                    following = 0
            self.tokens += window[: len(report.emitted)]
        uses = np.asarray(out.uses) if self.count_uses else None
        seconds, used = engine.programs.clock_s() - started, report.used
        record = RoundRecord(
            start, len(window), report.emitted, seconds, earlier.lookups + used.lookups, earlier.hits + used.hits, uses
        )
        return record, report.drafts, out.logits


def fresh_session(engine: Engine, **settings: Any) -> Session:
    """A session before its first token; the one before gives its memory back first, there is none for two."""
    before = engine.owner
    withdraw(engine)
    if isinstance(before, Session):
        for array in jax.tree.leaves(before.state):
            array.delete()
    return Session(engine, **settings)
