"""Gated delta net: causal convolution and the recurrent state, in chunk form.

One chunk of n tokens (n <= `CHUNK`) is computed from the state S at its start in closed form; a longer run is a scan
over chunks. The state is advanced by a count of accepted tokens that may be smaller than n: that is how padding in a
prompt chunk and rejected drafts in a decode window leave no trace. Shapes: T tokens, Hk key heads, Hv value heads,
D head width, S: f32[Hv, D_key, D_value]. Source: qwen4exp (`ssm_*` tensors); the chunk form is the WY form of the
gated delta rule (Yang et al., arXiv:2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from strata_jax.engine.layers import rms_norm
from strata_jax.engine.matrix import Matrix, linear
from strata_jax.geometry import Geometry

CHUNK = 64
HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnWeights:
    """Rows of value heads are in file order: value head h uses key head ``h mod Hk``."""

    qkv: Matrix
    gate: Matrix
    conv: jax.Array  # f32[channels, conv_kernel]
    beta: Matrix
    alpha: Matrix
    dt_bias: jax.Array  # f32[Hv]
    a: jax.Array  # f32[Hv], negative
    norm: jax.Array  # f32[D]
    out: Matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnState:
    """``memory: f32[Hv, D, D]`` and the last inputs of the convolution, ``conv: f32[conv_kernel - 1, channels]``."""

    memory: jax.Array
    conv: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnRows:
    """What a window must keep to advance the state once the accepted length is known (see `advance`)."""

    conv_inputs: jax.Array  # f32[conv_kernel - 1 + T, channels]
    keys: jax.Array  # f32[T, Hk, D]
    deltas: jax.Array  # f32[T, Hv, D]
    log_decay: jax.Array  # f32[T, Hv], running sum from the window's start


def empty_state(g: Geometry) -> GdnState:
    """The state before the first token."""
    channels = (2 * g.gdn_key_heads + g.gdn_value_heads) * g.gdn_head_dim
    memory = jnp.zeros((g.gdn_value_heads, g.gdn_head_dim, g.gdn_head_dim), jnp.float32)
    return GdnState(memory, jnp.zeros((g.conv_kernel - 1, channels), jnp.float32))


def causal_conv(inputs: jax.Array, kernel: jax.Array, num_tokens: int) -> jax.Array:
    """``inputs: f32[taps - 1 + T, channels]`` (history first), ``kernel: f32[channels, taps]`` -> f32[T, channels]."""
    taps = kernel.shape[1]
    return sum(inputs[j : j + num_tokens] * kernel[:, j] for j in range(taps))  # type: ignore[return-value]


def window(u: jax.Array, w: GdnWeights, state: GdnState, g: Geometry) -> tuple[jax.Array, GdnRows]:
    """Run T <= `CHUNK` tokens from ``state`` without advancing it: output f32[T, E] and the rows to advance with."""
    num_tokens = u.shape[0]
    q, k, v, log_a, beta, conv_inputs = _project(u, w, state.conv, g)
    o, deltas, log_decay = _chunk(state.memory, q, k, v, log_a, beta)
    return _output(o.reshape(num_tokens, -1), u, w, g), GdnRows(conv_inputs, k, deltas, log_decay)


def advance(state: GdnState, rows: GdnRows, count: jax.Array) -> GdnState:
    """The state after the first ``count: i32`` tokens of the window (0 leaves it as it is)."""
    memory = _advance_memory(state.memory, rows.keys, rows.deltas, rows.log_decay, count)
    conv = jax.lax.dynamic_slice_in_dim(rows.conv_inputs, count, state.conv.shape[0])
    return GdnState(memory, conv)


def prefill(u: jax.Array, w: GdnWeights, state: GdnState, count: jax.Array, g: Geometry) -> tuple[jax.Array, GdnState]:
    """Run T tokens of which the first ``count`` are real, and advance the state past them.

    Args:
        u: f32[T, E]; T is at most `CHUNK` or a multiple of it.
    """
    num_tokens = u.shape[0]
    if num_tokens <= CHUNK:
        y, rows = window(u, w, state, g)
        return y, advance(state, rows, count)
    q, k, v, log_a, beta, conv_inputs = _project(u, w, state.conv, g)
    num_chunks = num_tokens // CHUNK
    parts = jax.tree.map(lambda x: x.reshape(num_chunks, CHUNK, *x.shape[1:]), (q, k, v, log_a, beta))
    counts = jnp.clip(count - jnp.arange(num_chunks) * CHUNK, 0, CHUNK)

    def step(memory: jax.Array, part: tuple) -> tuple[jax.Array, jax.Array]:
        (q_i, k_i, v_i, log_a_i, beta_i), count_i = part
        o, deltas, log_decay = _chunk(memory, q_i, k_i, v_i, log_a_i, beta_i)
        return _advance_memory(memory, k_i, deltas, log_decay, count_i), o

    memory, o = jax.lax.scan(step, state.memory, (parts, counts))
    conv = jax.lax.dynamic_slice_in_dim(conv_inputs, count, state.conv.shape[0])
    return _output(o.reshape(num_tokens, -1), u, w, g), GdnState(memory, conv)


def _project(u: jax.Array, w: GdnWeights, conv_state: jax.Array, g: Geometry) -> tuple[jax.Array, ...]:
    """Queries, keys f32[T, Hk, D], values f32[T, Hv, D], log decay and beta f32[T, Hv], convolution inputs."""
    num_tokens = u.shape[0]
    heads, width = g.gdn_key_heads, g.gdn_head_dim
    conv_inputs = jnp.concatenate([conv_state, linear(u, w.qkv)])
    c = jax.nn.silu(causal_conv(conv_inputs, w.conv, num_tokens))
    q = _l2_norm(c[:, : heads * width].reshape(num_tokens, heads, width), g.rms_eps) / width**0.5
    k = _l2_norm(c[:, heads * width : 2 * heads * width].reshape(num_tokens, heads, width), g.rms_eps)
    v = c[:, 2 * heads * width :].reshape(num_tokens, g.gdn_value_heads, width)
    log_a = w.a * jax.nn.softplus(linear(u, w.alpha) + w.dt_bias)
    beta = jax.nn.sigmoid(linear(u, w.beta))
    return q, k, v, log_a, beta, conv_inputs


def _l2_norm(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def _chunk(
    memory: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, log_a: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs f32[n, Hv, D], deltas f32[n, Hv, D] and running log decay f32[n, Hv] of one chunk."""
    n, heads, width = k.shape
    groups = v.shape[1] // heads  # file order: value head = group * Hk + key head
    split = lambda x: x.reshape(n, groups, heads, *x.shape[2:])  # noqa: E731
    s = jnp.cumsum(log_a, axis=0)
    sg, bg, vg = split(s), split(beta), split(v)
    state = memory.reshape(groups, heads, width, width)
    qk = jnp.stack([q, k])  # one pass over the state serves queries and keys
    from_state = jnp.einsum("znhk,ghkv->zghnv", qk, state, precision=HIGHEST)
    decay = jnp.exp(jnp.moveaxis(sg, 0, -1))[..., None]  # [groups, heads, n, 1]
    bh = jnp.moveaxis(bg, 0, -1)[..., None]
    rhs = bh * (jnp.moveaxis(vg, 0, 2) - decay * from_state[1])
    out = decay * from_state[0]
    if n == 1:
        deltas = rhs
        out = out + jnp.sum(q * k, axis=-1)[0][None, :, None, None] * deltas
    else:
        st = jnp.moveaxis(sg, 0, -1)
        lower = jnp.tril(jnp.ones((n, n), bool))
        # exponents above the diagonal are positive and may overflow: mask them before the exponential
        d = jnp.where(lower, jnp.exp(jnp.where(lower, st[..., :, None] - st[..., None, :], 0.0)), 0.0)
        scores = jnp.einsum("zihd,jhd->zhij", qk, k, precision=HIGHEST)
        m = jnp.where(jnp.tril(jnp.ones((n, n), bool), -1), bh * scores[1] * d, 0.0)
        deltas = _solve_unit_lower(m, rhs)
        out = out + jnp.einsum("ghij,ghjv->ghiv", scores[0] * d, deltas, precision=HIGHEST)
    to_rows = lambda x: jnp.moveaxis(x, 2, 0).reshape(n, groups * heads, width)  # noqa: E731
    return to_rows(out), to_rows(deltas), s


def _solve_unit_lower(m: jax.Array, rhs: jax.Array) -> jax.Array:
    """Solve (I + m) x = rhs for strictly lower triangular ``m: f32[..., n, n]``."""
    eye = jnp.eye(m.shape[-1], dtype=m.dtype)
    return jax.lax.linalg.triangular_solve(m + eye, rhs, left_side=True, lower=True, unit_diagonal=True)


def _advance_memory(
    memory: jax.Array, k: jax.Array, deltas: jax.Array, log_decay: jax.Array, count: jax.Array
) -> jax.Array:
    n, heads, width = k.shape
    groups = deltas.shape[1] // heads
    last = jnp.where(count > 0, log_decay[jnp.maximum(count - 1, 0)], 0.0)  # [Hv]
    kept = (jnp.arange(n) < count)[:, None]
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - log_decay, 0.0)), 0.0)
    weighted = (weight[..., None] * deltas).reshape(n, groups, heads, width)
    update = jnp.einsum("nhk,nghv->ghkv", k, weighted, precision=HIGHEST).reshape(memory.shape)
    return jnp.exp(last)[:, None, None] * memory + update


def _output(o: jax.Array, u: jax.Array, w: GdnWeights, g: Geometry) -> jax.Array:
    num_tokens = u.shape[0]
    heads = o.reshape(num_tokens, g.gdn_value_heads, g.gdn_head_dim)
    normed = rms_norm(heads, w.norm, g.rms_eps).reshape(num_tokens, -1)
    return linear(normed * jax.nn.sigmoid(linear(u, w.gate)), w.out)
