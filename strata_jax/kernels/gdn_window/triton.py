"""A window of the gated delta net, and the step of its state, each as one Pallas-Triton launch.

`window`: one program for each value head. It reads its D x D state once into registers and runs the recurrence over the
tokens there: convolution and norms of its own channels, the delta rule, RMS norm and gate. The state is not written.
`advance`: one program for each D channels of the convolution, the first of which are a value head's state as well. It
repeats the kept tokens' updates in their order and writes in place, so that rejected tokens leave nothing behind.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from strata_jax.kernels.gdn_window.rows import GdnVectors, WindowRows
from strata_jax.kernels.launch import launch

Ref = Any
# A program has a state of 128 x 128 in registers. Vectors of a head as long as there are threads are loaded once and
# handed on; with more threads than elements, each thread would load its own copies (seen in the compiled code).
_WINDOW_WARPS, _ADVANCE_WARPS = 4, 8


def window(
    qkv: jax.Array,
    gate: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    w: GdnVectors,
    memory: jax.Array,
    history: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, WindowRows]:
    """As `strata_jax.kernels.gdn_window.gdn_window`."""
    num_tokens, channels = qkv.shape
    num_heads, width, _ = memory.shape
    num_keys = (channels // width - num_heads) // 2
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    sizes = gate.shape, (num_tokens, num_keys, width), (num_tokens, num_heads, width), (num_tokens, num_heads)
    kernel, outs = partial(_window, eps=eps), tuple(map(shape, sizes))
    call = launch(kernel, (num_heads,), outs, _WINDOW_WARPS, interpret=interpret)
    out, *rows = call(memory, qkv, gate, alpha, beta, w.conv, w.dt_bias, w.a, w.norm, history)
    return out, WindowRows(qkv, *rows)


def advance(
    memory: jax.Array, history: jax.Array, rows: WindowRows, count: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As `strata_jax.kernels.gdn_window.gdn_advance`."""
    outs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (memory, history))
    grid = (history.shape[1] // memory.shape[1],)
    call = launch(_advance, grid, outs, _ADVANCE_WARPS, in_place=2, interpret=interpret)
    return call(count.reshape(1), rows.inputs, rows.keys, rows.deltas, rows.decay, memory, history)


def _window(
    memory: Ref,  # f32[Hv, D, D]
    qkv: Ref,  # f32[T, channels]
    gate: Ref,  # f32[T, Hv*D]
    alpha: Ref,  # f32[T, Hv]
    beta: Ref,  # f32[T, Hv]
    conv: Ref,  # f32[channels, taps]
    dt_bias: Ref,  # f32[Hv]
    a: Ref,  # f32[Hv]
    norm: Ref,  # f32[D]
    history: Ref,  # f32[taps - 1, channels]
    out: Ref,  # f32[T, Hv*D]
    keys: Ref,  # f32[T, Hk, D]
    deltas: Ref,  # f32[T, Hv, D]
    decays: Ref,  # f32[T, Hv]
    *,
    eps: float,
) -> None:
    head, num_keys, width = pl.program_id(0), keys.shape[1], memory.shape[1]
    tokens, here = range(qkv.shape[0]), pl.ds(head * width, width)
    key_head = head - jax.lax.div(head, jnp.int32(num_keys)) * num_keys

    # all loads first: they wait together
    state = memory[head, :, :]
    firsts = key_head * width, (num_keys + key_head) * width, (2 * num_keys + head) * width
    loaded = [_taps(qkv, history, conv, first, width) for first in firsts]
    gates, gamma = [gate[t, here] for t in tokens], norm[:]
    decay = [jnp.exp(a[head] * _softplus(alpha[t, head] + dt_bias[head])) for t in tokens]
    strength = [_sigmoid(beta[t, head]) for t in tokens]

    queries, key_rows, values = map(_convolved, loaded)
    queries = [_l2_norm(q, eps) / width**0.5 for q in queries]
    key_rows = [_l2_norm(k, eps) for k in key_rows]
    for t, q, k, v in zip(tokens, queries, key_rows, values, strict=True):
        from_keys = jnp.sum(k[:, None] * state, axis=0)
        from_queries = jnp.sum(q[:, None] * state, axis=0)
        delta = strength[t] * (v - decay[t] * from_keys)
        o = decay[t] * from_queries + jnp.sum(q * k) * delta
        if t < len(tokens) - 1:
            state = decay[t] * state + k[:, None] * delta[None, :]
        deltas[t, head, :] = delta
        decays[t, head] = decay[t]
        out[t, here] = gamma * o / jnp.sqrt(jnp.sum(o * o) / width + eps) * _sigmoid(gates[t])

    @pl.when(head < num_keys)
    def _() -> None:
        for t in tokens:
            keys[t, head, :] = key_rows[t]


def _advance(
    count_ref: Ref,  # i32[1]
    inputs: Ref,  # f32[T, channels]
    keys: Ref,  # f32[T, Hk, D]
    deltas: Ref,  # f32[T, Hv, D]
    decays: Ref,  # f32[T, Hv]
    memory: Ref,  # f32[Hv, D, D]
    history: Ref,  # f32[taps - 1, channels]
    new_memory: Ref,
    new_history: Ref,
) -> None:
    head, num_keys = pl.program_id(0), keys.shape[1]
    num_heads, width = memory.shape[:2]
    count, here, kept = count_ref[0], pl.ds(head * width, width), range(history.shape[0])

    rows = []
    for j in kept:
        old = history[jnp.minimum(j + count, len(kept) - 1), here]
        new = inputs[jnp.maximum(j + count - len(kept), 0), here]
        rows.append(jnp.where(j + count < len(kept), old, new))
    for j, row in enumerate(rows):
        new_history[j, here] = row

    @pl.when(head < num_heads)
    def _() -> None:
        key_head = head - jax.lax.div(head, jnp.int32(num_keys)) * num_keys

        def step(t: jax.Array, state: jax.Array) -> jax.Array:
            return decays[t, head] * state + keys[t, key_head, :][:, None] * deltas[t, head, :][None, :]

        new_memory[head, :, :] = jax.lax.fori_loop(0, count, step, memory[head, :, :])


def _taps(qkv: Ref, history: Ref, conv: Ref, first: jax.Array, width: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Inputs of the convolution, history first, and its taps, of the channels ``first ... first + width - 1``."""
    here = pl.ds(first, width)
    rows = [ref[i, here] for ref in (history, qkv) for i in range(ref.shape[0])]
    return rows, [conv[here, j] for j in range(conv.shape[1])]


def _convolved(loaded: tuple[list[jax.Array], list[jax.Array]]) -> list[jax.Array]:
    """Convolution and silu: f32[width] for each token."""
    rows, taps = loaded
    sums: list[Any] = [
        sum(rows[t + j] * tap for j, tap in enumerate(taps)) for t in range(len(rows) - len(taps) + 1)
    ]  # fmt: skip
    return [x * _sigmoid(x) for x in sums]


def _l2_norm(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x) + eps)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
