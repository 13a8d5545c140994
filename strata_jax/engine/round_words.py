"""What the host tells a decode round and what it reads after it: one array of words each way.

Every further array of the host is a transfer of its own, and a read waits for the device: on an H200 (jax 0.11.2) each
number written took 0.02 ms and each one read 0.28 ms, eight of them longer than the kernels of a model of four layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.experts import ExpertCounts
from strata_jax.memory.layout import WORD_BYTES

NUM_SCALARS = 3  # before the rows of a window: how many are real, start, min_p
NUM_FOUND = 4  # before the tokens of a report: tokens kept, drafts worth verifying, look-ups, hits


class Asked(NamedTuple):
    """A window as the device takes it apart.

    Attributes:
        tokens: i32[T], the last token and its drafts, at positions ``start + i``; ``num_real`` of them are real.
        forced: i32[T], the token to take after each row instead of the model's choice, -1 = the model's.
        min_p: f32[], a draft less probable than this ends the next window.
    """

    tokens: jax.Array
    forced: jax.Array
    num_real: jax.Array
    start: jax.Array
    min_p: jax.Array


class WindowForm(NamedTuple):
    """What the words of a window are, besides their numbers.

    Attributes:
        num_rows: T. table_words: words of a token's packed n-gram rows, which are the last T * table_words; 0 = none.
    """

    num_rows: int
    table_words: int = 0

    @classmethod
    def of(cls, num_rows: int, table_bytes: int) -> WindowForm:
        """A window of tokens each of which reads so many bytes of the n-gram table."""
        return cls(num_rows, -(-table_bytes // WORD_BYTES))

    @property
    def num_words(self) -> int:
        return NUM_SCALARS + self.num_rows * (2 + self.table_words)

    def table_part(self, words: jax.Array) -> jax.Array:
        """The words i32[T, table_words] of the n-gram rows."""
        return words[NUM_SCALARS + 2 * self.num_rows :].reshape(self.num_rows, self.table_words)


class Lookups(NamedTuple):
    """Routed (token, expert) pairs, and those served from the arena."""

    lookups: int = 0
    hits: int = 0


class Report(NamedTuple):
    """A round as the host reads it: the new tokens (none: it was not told in time what to read), the drafts worth
    verifying next, and the experts it looked up."""

    emitted: tuple[int, ...]
    drafts: list[int]
    used: Lookups


def window_words(
    tokens: Sequence[int],
    forced: Sequence[int],
    start: int,
    min_p: float,
    num_rows: int,
    table_rows: np.ndarray | None = None,
) -> np.ndarray:
    """A window for the device, i32[`WindowForm.num_words`], padded to ``num_rows`` rows; fewer forced tokens leave the
    rest free.

    Args:
        table_rows: [T, ...], packed n-gram rows.
    """
    packed = np.zeros((num_rows, 0), np.uint8)
    if table_rows is not None:
        packed = np.ascontiguousarray(table_rows).view(np.uint8).reshape(num_rows, -1)
    form = WindowForm.of(num_rows, packed.shape[1])
    words = np.zeros(form.num_words, np.int32)
    words[:2] = len(tokens), start
    words[2:3].view(np.float32)[0] = min_p
    end = NUM_SCALARS + 2 * num_rows
    rows = words[NUM_SCALARS:end].reshape(2, num_rows)
    rows[0, : len(tokens)] = tokens
    rows[1] = -1
    rows[1, : len(forced)] = forced
    words[end:].view(np.uint8).reshape(num_rows, -1)[:, : packed.shape[1]] = packed
    return words


def asked(words: jax.Array, form: WindowForm) -> Asked:
    """Take the words of a window apart; all zeros are a window without a real row."""
    tokens, forced = words[NUM_SCALARS : NUM_SCALARS + 2 * form.num_rows].reshape(2, form.num_rows)
    return Asked(tokens, forced, words[0], words[1], jax.lax.bitcast_convert_type(words[2], jnp.float32))


def report_words(
    tokens: jax.Array, num_kept: jax.Array, drafts: jax.Array, num_drafts: jax.Array, counts: ExpertCounts
) -> jax.Array:
    """What the host reads after a round: i32[4 + T + D] from tokens i32[T], drafts i32[D] and numbers i32[]."""
    found = jnp.stack([num_kept, num_drafts, counts.lookups, counts.hits]).astype(jnp.int32)
    return jnp.concatenate([found, tokens.astype(jnp.int32), drafts.astype(jnp.int32)])


def read_report(words: jax.Array, num_rows: int) -> Report:
    """Wait for the words of a report of T rows and take them apart."""
    kept, good, lookups, hits, *rest = np.asarray(words).tolist()
    return Report(tuple(rest[:kept]), rest[num_rows : num_rows + good], Lookups(lookups, hits))
