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

NUM_SCALARS = 3  # before the tokens of a window: how many are real, start, min_p
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


class Lookups(NamedTuple):
    """Routed (token, expert) pairs, and those served from the arena."""

    lookups: int = 0
    hits: int = 0


class Report(NamedTuple):
    """A round as the host reads it: the new tokens, the drafts worth verifying next, and the experts it looked up."""

    emitted: tuple[int, ...]
    drafts: list[int]
    used: Lookups


def window_words(tokens: Sequence[int], forced: Sequence[int], start: int, min_p: float, num_rows: int) -> np.ndarray:
    """A window for the device, i32[3 + 2 T], padded to ``num_rows`` rows; fewer forced tokens leave the rest free."""
    words = np.zeros(NUM_SCALARS + 2 * num_rows, np.int32)
    words[:2] = len(tokens), start
    words[2:3].view(np.float32)[0] = min_p
    rows = words[NUM_SCALARS:].reshape(2, num_rows)
    rows[0, : len(tokens)] = tokens
    rows[1] = -1
    rows[1, : len(forced)] = forced
    return words


def num_window_rows(words: jax.Array | np.ndarray) -> int:
    """T of a window's words."""
    return (words.shape[0] - NUM_SCALARS) // 2


def asked(words: jax.Array) -> Asked:
    """Take the words i32[3 + 2 T] of a window apart."""
    tokens, forced = words[NUM_SCALARS:].reshape(2, -1)
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
