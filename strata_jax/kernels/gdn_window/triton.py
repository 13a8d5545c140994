"""A window of the gated delta net, and the step of its state, each as one Pallas-Triton launch.

`window`: one program for each value head. It reads its D x D state once into registers and runs the recurrence over the
tokens there: convolution and norms of its own channels, the delta rule, RMS norm and gate. The state is not written.
`advance`: one program for each D channels of the convolution, the first of which are a value head's state as well. It
repeats the kept tokens' updates in their order and writes in place, so that rejected tokens leave nothing behind.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from strata_jax.kernels.gdn_window.rows import GdnVectors, WindowRows
from strata_jax.kernels.launch import launch

Ref = Any
# A program has a state of 128 x 128 in registers. Vectors of a head as long as there are threads are loaded once and
# handed on; with more threads than elements, each thread would load its own copies (seen in the compiled code).
_WINDOW_WARPS, _ADVANCE_WARPS = 4, 8


_Rows = tuple[tuple[jax.Array, ...], ...]
"""Inputs of the convolution of the channels of query, key and value: f32[D] each."""


class _Inputs(NamedTuple):
    """What a program needs of one token: the convolution's inputs of its three kinds of channels f32[D], the rest."""

    rows: tuple[jax.Array, ...]
    gate: jax.Array
    alpha: jax.Array
    beta: jax.Array


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
    last, here = qkv.shape[0] - 1, pl.ds(head * width, width)
    key_head = head - jax.lax.div(head, jnp.int32(num_keys)) * num_keys

    firsts = key_head * width, (num_keys + key_head) * width, (2 * num_keys + head) * width
    channels = [pl.ds(first, width) for first in firsts]

    def inputs(t: jax.Array | int) -> _Inputs:
        rows = tuple(qkv[t, channel] for channel in channels)
        return _Inputs(rows, gate[t, here], alpha[t, head], beta[t, head])

    state, gamma, bias, rate = memory[head, :, :], norm[:], dt_bias[head], a[head]
    taps = [[conv[channel, j] for j in range(conv.shape[1])] for channel in channels]
    before = tuple(tuple(history[j, channel] for j in range(history.shape[0])) for channel in channels)

    def step(t: jax.Array, carry: tuple[jax.Array, _Rows, _Inputs]) -> tuple[jax.Array, _Rows, _Inputs]:
        state, before, now = carry
        following = inputs(jnp.minimum(t + 1, last))  # on its way while this token is computed
        rows = [(*old, new) for old, new in zip(before, now.rows, strict=True)]
        q, k, v = (_convolved(of_channels, tap) for of_channels, tap in zip(rows, taps, strict=True))
        q, k = _l2_norm(q, eps) / width**0.5, _l2_norm(k, eps)
        decay, strength = jnp.exp(rate * _softplus(now.alpha + bias)), _sigmoid(now.beta)

        from_keys = jnp.sum(k[:, None] * state, axis=0)
        from_queries = jnp.sum(q[:, None] * state, axis=0)
        delta = strength * (v - decay * from_keys)
        o = decay * from_queries + jnp.sum(q * k) * delta
        deltas[t, head, :] = delta
        decays[t, head] = decay
        out[t, here] = gamma * o / jnp.sqrt(jnp.sum(o * o) / width + eps) * _sigmoid(now.gate)

        @pl.when(head < num_keys)
        def _() -> None:
            keys[t, head, :] = k

        if last:
            state = decay * state + k[:, None] * delta[None, :]
        return state, tuple(of_channels[1:] for of_channels in rows), following

    jax.lax.fori_loop(0, last + 1, step, (state, before, inputs(0)))


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


def _convolved(rows: Sequence[jax.Array], taps: Sequence[jax.Array]) -> jax.Array:
    """Convolution and silu: f32[width]."""
    x = functools.reduce(operator.add, (row * tap for row, tap in zip(rows, taps, strict=True)))
    return x * _sigmoid(x)


def _l2_norm(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x) + eps)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
