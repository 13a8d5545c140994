"""One expert's blob in planes, and which rows a window needs of which expert. No kernel here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.kernels.planes import MAX_TILE_ROWS, PlaneLayout, plane_layout, to_planes


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Planes of gate (F x E), up (F x E) and down (E x F), one after the other; ``firsts`` are their first words.

    All three interleave the same number of rows, so that a blob is whole lines of ``tile_rows`` words.
    """

    gate: PlaneLayout
    up: PlaneLayout
    down: PlaneLayout

    @property
    def parts(self) -> tuple[PlaneLayout, PlaneLayout, PlaneLayout]:
        return self.gate, self.up, self.down

    @property
    def firsts(self) -> tuple[int, int, int]:
        return 0, self.gate.num_words, self.gate.num_words + self.up.num_words

    @property
    def num_words(self) -> int:
        return sum(part.num_words for part in self.parts)

    @property
    def tile_rows(self) -> int:
        return self.gate.tile_rows

    @property
    def num_lines(self) -> int:
        return self.num_words // self.tile_rows


@cache
def expert_layout(
    gate_type: str, up_type: str, down_type: str, width: int, expert_width: int, tile_rows: int | None = None
) -> ExpertLayout:
    """Return the layout of one expert of model width E = `width` and expert width F = `expert_width`.

    Args:
        tile_rows: rows that are interleaved, a divisor of both widths; by default their largest common power of two,
            128 at most.

    Raises:
        FormatError, ValueError: as `plane_layout`.
    """
    if tile_rows is None:
        tile_rows = min(width & -width, expert_width & -expert_width, MAX_TILE_ROWS)
    return ExpertLayout(
        plane_layout(gate_type, expert_width, width, tile_rows),
        plane_layout(up_type, expert_width, width, tile_rows),
        plane_layout(down_type, width, expert_width, tile_rows),
    )


def pack_expert(parts: Sequence[np.ndarray], layout: ExpertLayout, out: np.ndarray | None = None) -> np.ndarray:
    """Repack one expert: (gate, up, down) or (gate above up, down) as the file holds them -> u32[num_words].

    Args:
        out: where the words go, contiguous: a row of the bank, say. None = a new array.

    Raises:
        ValueError: a part is not u8[rows, row_bytes] of the layout, or `out` does not fit.
    """
    if len(parts) == 2:
        half = layout.gate.rows
        parts = (parts[0][:half], parts[0][half:], parts[1])
    blob = np.empty(layout.num_words, np.uint32) if out is None else out
    if blob.shape != (layout.num_words,):
        raise ValueError(f"out is uint32[{layout.num_words}], got {blob.dtype}{list(blob.shape)}")
    for part, part_layout, first in zip(parts, layout.parts, layout.firsts, strict=True):
        to_planes(part, part_layout, blob[first : first + part_layout.num_words])
    return blob


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowPlan:
    """Who computes what in a window of T tokens with K experts each, M = min(X, T K) experts at most.

    Pairs of token and expert are rows P = T K, sorted by expert, those of one expert next to each other in the order of
    tokens. Experts that are not resident come first, because their bytes take longest to arrive.

    Attributes:
        experts: i32[M], active experts; past the last one, 0.
        first_row: i32[M + 1], first row of each active expert and the end; no rows past the last active expert.
        token_of: i32[P], token of each row.
        row_of: i32[T, K], row of each pair; P where the pair is not used.
    """

    experts: jax.Array
    first_row: jax.Array
    token_of: jax.Array
    row_of: jax.Array


def plan_window(ids: jax.Array, pages: jax.Array) -> WindowPlan:
    """Sort the pairs of a window by expert: comparisons of all pairs, no sort, no scan (P is 80 at most).

    Args:
        ids: i32[T, K], experts of each token, each one once; X = not used.
        pages: i32[X], first arena page of each expert, -1 = not resident.
    """
    num_tokens, num_used = ids.shape
    num_experts, num_pairs = pages.shape[0], ids.size
    size = min(num_experts, num_pairs)
    expert = ids.reshape(-1)
    token = jnp.repeat(jnp.arange(num_tokens, dtype=jnp.int32), num_used, total_repeat_length=num_pairs)
    valid = expert < num_experts
    resident = pages[jnp.minimum(expert, num_experts - 1)] >= 0
    key = expert + jnp.where(resident, num_experts, 0)
    same = key[:, None] == key
    earlier = token[:, None] > token
    leads = valid & ~jnp.any(same & earlier, axis=1)
    before = (key[:, None] > key) & valid
    row = jnp.sum(before | (same & earlier & valid), axis=1, dtype=jnp.int32)
    group = jnp.sum(before & leads, axis=1, dtype=jnp.int32)
    slots = jnp.arange(size + 1, dtype=jnp.int32)
    mine = (group == slots[:size, None]) & leads
    experts = jnp.sum(jnp.where(mine, expert, 0), axis=1, dtype=jnp.int32)
    first_row = jnp.sum((group < slots[:, None]) & valid, axis=1, dtype=jnp.int32)
    row = jnp.where(valid, row, num_pairs)
    at = jnp.arange(num_pairs, dtype=jnp.int32)
    token_of = jnp.sum(jnp.where(row == at[:, None], token, 0), axis=1, dtype=jnp.int32)
    return WindowPlan(experts, first_row, token_of, row.reshape(ids.shape))
