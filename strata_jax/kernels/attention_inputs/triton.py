"""One Pallas-Triton launch in which each program makes one row: a head of a query, one side of a cell, a block's key.

Programs are numbered kind by kind and have one warp each, so that no sum goes through shared memory. A side of a cell
in ``int8``, ``f16``, ``bf16`` or ``f32`` is packed in registers: tile j of it holds the values of place j of each word.
A rotated side (``q4_0``) is packed by XLA before, and only written here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.attention_inputs.operands import AttentionInputs, CellShape, Norms, Projections
from strata_jax.kernels.attention_inputs.packing import pack, values_at
from strata_jax.kernels.attention_inputs.reference import blocks_of, norm_and_turn, turns
from strata_jax.kernels.kv_codec import encode_k, encode_v
from strata_jax.kernels.launch import launch
from strata_jax.kv_types import cell_bytes, sides

Ref = Any
Values = Callable[[jax.Array], jax.Array]
"""The values of a vector by their indices."""

ROTATED = "q4_0"


@dataclass(frozen=True)
class _Kernel:
    """What is static: ``shape``; T, H, I, d and e; the 32-bit words of both sides of a cell."""

    shape: CellShape
    num_tokens: int
    num_heads: int
    index_heads: int
    head: int
    index_head: int
    words: tuple[int, int]

    def __call__(
        self,
        query_gate_ref: Ref,  # f32[T, H, 2 d]
        k_ref: Ref,  # f32[T, G d], or packed u32[T, words]
        v_ref: Ref,  # the same
        index_q_ref: Ref,  # f32[T, I, e]
        index_k_ref: Ref,  # f32[T, e]
        q_norm_ref: Ref,  # f32[d]
        k_norm_ref: Ref,  # f32[d]
        index_q_norm_ref: Ref,  # f32[e]
        index_k_norm_ref: Ref,  # f32[e]
        turns_ref: Ref,  # f32[T + T / r + 1, 2, rope_dim / 2], of the tokens, then of the blocks
        tail_ref: Ref,  # f32[r - 1, e]
        pages_ref: Ref,  # i32[N]
        start_ref: Ref,  # i32[1]
        count_ref: Ref,  # i32[1]
        _arena: Ref,
        _keys: Ref,
        arena_ref: Ref,  # u32[P, W]
        keys_ref: Ref,  # f32[B, e]
        q_ref: Ref,  # f32[T, G, h, d]
        new_index_q_ref: Ref,  # f32[T, I, e]
        raw_ref: Ref,  # f32[r - 1 + T, e]
        positions_ref: Ref,  # i32[T]
        seen_ref: Ref,  # i32[T]
    ) -> None:
        start, count, ratio = start_ref[0], count_ref[0], self.shape.ratio
        per_group = self.num_heads // self.shape.num_kv_heads

        def turned(x: Values, norm_ref: Ref, row: jax.Array, size: int) -> jax.Array:
            index = jnp.arange(size)
            norm = _root(jnp.sum(_squares(x(index))), size, self.shape.eps)
            return _turn(x, norm_ref, norm, turns_ref, row, index)

        def query(i: jax.Array) -> None:
            token, head = _div_rem(i, self.num_heads)
            value = turned(lambda at: query_gate_ref[token, head, at], q_norm_ref, token, self.head)
            group, member = _div_rem(head, per_group)
            q_ref[token, group, member, pl.ds(0, self.head)] = value / self.head**0.5

        def index_query(i: jax.Array) -> None:
            token, head = _div_rem(i, self.index_heads)
            value = turned(lambda at: index_q_ref[token, head, at], index_q_norm_ref, token, self.index_head)
            new_index_q_ref[token, head, pl.ds(0, self.index_head)] = value / self.index_head**0.5

        def side(which: int, token: jax.Array) -> None:
            position = start + token
            group = jnp.minimum(jax.lax.div(position, jnp.int32(self.shape.cells_per_page)), pages_ref.shape[0] - 1)
            in_page, page = position - group * self.shape.cells_per_page, pages_ref[group]
            first = self.shape.cells_per_page * self.words[0] * which + in_page * self.words[which]
            real = (token < count) & (position < self.shape.num_cells) & (page >= 0)

            def write(at: jax.Array, words: jax.Array) -> None:
                place = arena_ref.at[jnp.maximum(page, 0), first + at]
                plt.store(place, words, mask=jnp.full(words.shape, real))

            ref, fmt = (k_ref, v_ref)[which], sides(self.shape.kv_type)[which]
            groups, size = self.shape.num_kv_heads, self.head
            if fmt == ROTATED:
                num_words = self.words[which]
                at = jnp.arange(pl.next_power_of_2(num_words))
                words = plt.load(ref.at[token, at], mask=at < num_words, other=jnp.zeros_like(at).astype(jnp.uint32))
                place = arena_ref.at[jnp.maximum(page, 0), first + at]
                plt.store(place, words, mask=(at < num_words) & real)
                return
            tiles = values_at(fmt, groups, size)
            values = [ref[token, head * size + at] for head, at in tiles]
            if which == 0:
                total = sum((jnp.sum(_squares(x).reshape(groups, -1), axis=1) for x in values), jnp.zeros(groups))
                norm = _root(total, size, self.shape.eps).reshape(-1, *[1] * (values[0].ndim - 1))
                values = [
                    _turn(partial(_of_head, ref, token, head, size), k_norm_ref, norm, turns_ref, token, at)
                    for head, at in tiles
                ]
            for at, words in pack(fmt, values):
                write(at, words)

        def block_key(i: jax.Array) -> None:
            block = jax.lax.div(start, jnp.int32(ratio)) + i
            first = block * ratio - start  # of its tokens; those before the first one are in the tail
            size = self.index_head

            def mean(at: jax.Array) -> jax.Array:
                member = first + jnp.arange(ratio)[:, None]
                wide = jnp.broadcast_to(at[None, :], (ratio, at.shape[0]))
                before, now = member < 0, (member >= 0) & (member < self.num_tokens)
                row = jnp.where(now, member, 0)
                value = plt.load(
                    index_k_ref.at[row, wide], mask=jnp.broadcast_to(now, wide.shape), other=jnp.zeros(wide.shape)
                )
                row = jnp.where(before, member + (ratio - 1), 0)
                value = plt.load(tail_ref.at[row, wide], mask=jnp.broadcast_to(before, wide.shape), other=value)
                return jnp.sum(value, axis=0) / ratio

            value = turned(mean, index_k_norm_ref, self.num_tokens + i, size)
            complete = ((block + 1) * ratio <= start + count) & (block < keys_ref.shape[0])
            at = jnp.arange(size)
            plt.store(keys_ref.at[jnp.where(complete, block, 0), at], value, mask=jnp.full(at.shape, complete))

        def tail_row(row: jax.Array) -> None:
            raw_ref[row, pl.ds(0, self.index_head)] = tail_ref[row, pl.ds(0, self.index_head)]

        def raw_row(token: jax.Array) -> None:
            raw_ref[ratio - 1 + token, pl.ds(0, self.index_head)] = index_k_ref[token, pl.ds(0, self.index_head)]
            positions_ref[token] = start + token
            seen_ref[token] = jnp.minimum(jax.lax.div(start + token + 1, jnp.int32(ratio)), keys_ref.shape[0])

        works: tuple[Callable[[jax.Array], None], ...] = (
            query, index_query, partial(side, 0), partial(side, 1), block_key, raw_row, tail_row,
        )  # fmt: skip
        program = pl.program_id(0)
        for work, first, num in zip(works, (0, *accumulate(self.programs)), self.programs, strict=False):
            pl.when((program >= first) & (program < first + num))(partial(work, program - first))

    @property
    def programs(self) -> tuple[int, ...]:
        """How many programs do each kind of work."""
        tokens = self.num_tokens
        return (
            tokens * self.num_heads, tokens * self.index_heads, tokens, tokens, tokens // self.shape.ratio + 1, tokens,
            self.shape.ratio - 1,
        )  # fmt: skip


def prepare(
    projected: Projections,
    norms: Norms,
    tail: jax.Array,
    pages: jax.Array,
    start: jax.Array,
    count: jax.Array,
    arena: jax.Array,
    keys: jax.Array,
    *,
    shape: CellShape,
    interpret: bool = False,
) -> AttentionInputs:
    """See `strata_jax.kernels.attention_inputs.attention_inputs`."""
    num_tokens, head, index_head = projected.k.shape[0], norms.q.shape[0], norms.index_q.shape[0]
    groups, (k_format, v_format) = shape.num_kv_heads, sides(shape.kv_type)
    k, v = projected.k, projected.v
    # angles are large, so that cosines take long code: once for each place, and by XLA once for all layers of a program
    blocks = blocks_of(start, num_tokens, shape.ratio)
    turn = turns(jnp.concatenate([start + jnp.arange(num_tokens), blocks * shape.ratio]), shape)
    if k_format == ROTATED:
        heads = k.reshape(num_tokens, groups, head)
        k = encode_k(norm_and_turn(heads, norms.k, turn[:num_tokens], shape.eps), shape.kv_type)
    if v_format == ROTATED:
        v = encode_v(v.reshape(num_tokens, groups, head), shape.kv_type)
    query_gate = projected.query_gate.reshape(num_tokens, -1, 2 * head)
    index_q = projected.index_q.reshape(num_tokens, -1, index_head)
    num_heads = query_gate.shape[1]
    k_bytes, v_bytes = cell_bytes(shape.kv_type, groups, head)
    kernel = _Kernel(shape, num_tokens, num_heads, index_q.shape[1], head, index_head, (k_bytes // 4, v_bytes // 4))
    f32, i32 = (partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    out = (
        jax.ShapeDtypeStruct(arena.shape, arena.dtype), f32(keys.shape),
        f32((num_tokens, groups, num_heads // groups, head)), f32(index_q.shape),
        f32((shape.ratio - 1 + num_tokens, index_head)), i32((num_tokens,)), i32((num_tokens,)),
    )  # fmt: skip
    call = launch(kernel, (sum(kernel.programs),), out, num_warps=1, in_place=2, interpret=interpret)
    return AttentionInputs(
        *call(
            query_gate, k, v, index_q, projected.index_k, norms.q, norms.k, norms.index_q, norms.index_k,
            turn, tail, pages, start.reshape(1), count.reshape(1), arena, keys,
        )
    )  # fmt: skip


def _div_rem(value: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    quotient = jax.lax.div(value, jnp.int32(by))
    return quotient, value - quotient * by


def _squares(x: jax.Array) -> jax.Array:
    return x * x


def _root(total: jax.Array, size: int, eps: float) -> jax.Array:
    return jnp.sqrt(total / size + eps)


def _of_head(ref: Ref, token: jax.Array, head: jax.Array, size: int, at: jax.Array) -> jax.Array:
    return ref[token, head * size + at]


def _turn(x: Values, norm_ref: Ref, norm: jax.Array, turns_ref: Ref, row: jax.Array, index: jax.Array) -> jax.Array:
    """The values ``index`` of a head, normed and rotated; each one's partner is read again."""
    half = turns_ref.shape[2]
    low, inside = index < half, index < 2 * half
    partner = jnp.where(low, index + half, jnp.where(inside, index - half, index))
    pair = jnp.where(low, index, jnp.where(inside, index - half, 0))
    cos, sin = jnp.where(inside, turns_ref[row, 0, pair], 1.0), jnp.where(inside, turns_ref[row, 1, pair], 0.0)
    value, other = (norm_ref[at] * x(at) / norm for at in (index, partner))
    return value * cos + other * jnp.where(low, -sin, sin)
