"""The gated delta net on a prompt as two Pallas-Triton launches, by chunks of 64 tokens.

`_inside`: one program for each (chunk, value head) makes all that does not depend on the state: the running sum of log
decay, (I + M)^-1 and the decayed products of queries and keys.
`_scan`: one program for each (value head, part of its value columns) holds that part of the state in registers and goes
from chunk to chunk. Value columns do not depend on each other.

Products run on tensor cores. Where the state depends on them, operands are cut in two TF32 halves each: as accurate as
float32 to a few units. What only goes out, to a norm and a product of bfloat16, is one TF32 product: three times fewer
instructions, off by 4e-4 of the outputs (bench/LOG.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from strata_jax.kernels.launch import launch

Ref = Any
_INSIDE_WARPS, _SCAN_WARPS = 4, 4
_KEY_COLUMNS = 64  # of the state in one operand of `_scan`
_VALUE_COLUMNS = 32  # of a program of `_scan`: 192 programs for 48 heads of 128


def gdn_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    beta: jax.Array,
    memory: jax.Array,
    count: jax.Array,
    *,
    chunk: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `strata_jax.kernels.gdn_chunks.gdn_chunks`."""
    num_chunks, (num_heads, width, _) = q.shape[0] // chunk, memory.shape
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    options = {"chunk": chunk, "exact": _precision("TF32_TF32_F32_X3", interpret),
               "rough": _precision("TF32_TF32_F32", interpret)}  # fmt: skip

    square = shape((num_chunks, num_heads, chunk, chunk))
    outs = shape((num_chunks, num_heads, chunk)), square, square
    inside = launch(partial(_inside, **options), (num_heads, num_chunks), outs, _INSIDE_WARPS, interpret=interpret)
    terms = inside(q, k, log_a, beta)

    columns = min(_VALUE_COLUMNS, width)
    kernel = partial(_scan, columns=columns, key_columns=min(_KEY_COLUMNS, width), **options)
    results = shape(memory.shape), shape(v.shape)
    scan = launch(kernel, (width // columns, num_heads), results, _SCAN_WARPS, in_place=1, interpret=interpret)
    memory, out = scan(count.reshape(1), q, k, v, beta, *terms, memory)
    return out, memory


def _precision(algorithm: str, interpret: bool) -> Any:
    return jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset[algorithm]


def _inside(
    q: Ref,  # f32[T, Hk, D]
    k: Ref,  # f32[T, Hk, D]
    log_a: Ref,  # f32[T, Hv]
    beta: Ref,  # f32[T, Hv]
    log_decay: Ref,  # f32[chunks, Hv, n]
    inverse: Ref,  # f32[chunks, Hv, n, n]
    attention: Ref,  # f32[chunks, Hv, n, n]
    *,
    chunk: int,
    exact: Any,
    rough: Any,
) -> None:
    head, i = pl.program_id(0), pl.program_id(1)
    num_keys = k.shape[1]
    key_head = head - jax.lax.div(head, jnp.int32(num_keys)) * num_keys
    here = pl.ds(i * chunk, chunk)
    row, column = (jnp.arange(chunk, dtype=jnp.int32)[at] for at in ((slice(None), None), (None, slice(None))))
    total = jnp.sum(jnp.where(column <= row, log_a[here, head][None, :], 0.0), axis=1)
    # exponents above the diagonal are positive and may overflow: mask them before the exponential
    decay = jnp.where(column <= row, jnp.exp(jnp.where(column <= row, total[:, None] - total[None, :], 0.0)), 0.0)
    dot, keys = partial(_dot, precision=exact), k[here, key_head, :]

    log_decay[i, head, :] = total
    attention[i, head, :, :] = _dot(q[here, key_head, :], keys, (1, 1), precision=rough) * decay
    m = jnp.where(column < row, beta[here, head][:, None] * dot(keys, keys, (1, 1)) * decay, 0.0)
    # pairs of inverted diagonal blocks are joined, of size 1, 2, 4, ...: [A 0; L B]^-1 = [A' 0; -B' L A' B']
    joined = jnp.where(row == column, 1.0, 0.0)
    size = 1
    while size < chunk:
        row_block, column_block = (jax.lax.div(x, jnp.int32(size)) for x in (row, column))
        below = jnp.where((row_block - column_block == 1) & (jnp.bitwise_and(column_block, 1) == 0), m, 0.0)
        joined = joined - (below if size == 1 else dot(joined, dot(below, joined)))
        size *= 2
    inverse[i, head, :, :] = joined


def _scan(
    count_ref: Ref,  # i32[1]
    q: Ref,  # f32[T, Hk, D]
    k: Ref,  # f32[T, Hk, D]
    v: Ref,  # f32[T, Hv, D]
    beta: Ref,  # f32[T, Hv]
    log_decay: Ref,  # f32[chunks, Hv, n]
    inverse: Ref,  # f32[chunks, Hv, n, n]
    attention: Ref,  # f32[chunks, Hv, n, n]
    memory: Ref,  # f32[Hv, D, D]
    new_memory: Ref,
    out: Ref,  # f32[T, Hv, D]
    *,
    chunk: int,
    columns: int,
    key_columns: int,
    exact: Any,
    rough: Any,
) -> None:
    here, head, num_keys = pl.ds(pl.program_id(0) * columns, columns), pl.program_id(1), k.shape[1]
    key_head = head - jax.lax.div(head, jnp.int32(num_keys)) * num_keys
    token = jnp.arange(chunk, dtype=jnp.int32)
    dot, rough_dot = partial(_dot, precision=exact), partial(_dot, precision=rough)

    parts = [pl.ds(first, key_columns) for first in range(0, memory.shape[1], key_columns)]

    def step(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows, count = pl.ds(i * chunk, chunk), jnp.clip(count_ref[0] - i * chunk, 0, chunk)
        total = log_decay[i, head, :]
        decay = jnp.exp(total)[:, None]

        def from_state(ref: Ref, dot: Any) -> jax.Array:
            return decay * sum(dot(ref[rows, key_head, part], of_part) for part, of_part in zip(parts, state))

        deltas = dot(inverse[i, head, :, :], beta[rows, head][:, None] * (v[rows, head, here] - from_state(k, dot)))
        out[rows, head, here] = from_state(q, rough_dot) + rough_dot(attention[i, head, :, :], deltas)
        # tokens from `count` on leave nothing behind, whatever they hold
        last = jnp.sum(jnp.where(token == count - 1, total, 0.0))
        kept = token < count
        weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - total, 0.0)), 0.0)
        weighted = jnp.where(kept[:, None], weight[:, None] * deltas, 0.0)
        return tuple(
            jnp.exp(last) * of_part + dot(k[rows, key_head, part], weighted, (0, 0))
            for part, of_part in zip(parts, state)
        )

    state = tuple(memory[head, part, here] for part in parts)
    for part, of_part in zip(parts, jax.lax.fori_loop(0, log_decay.shape[0], step, state)):
        new_memory[head, part, here] = of_part


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0), *, precision: Any) -> jax.Array:
    """The product over one axis of each, rows of ``a`` by columns of ``b`` in what is left."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
