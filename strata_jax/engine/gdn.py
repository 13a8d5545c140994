"""Gated delta net: causal convolution and the recurrent state, in chunk form.

One chunk of n tokens (n <= `CHUNK`) is computed from the state S at its start in closed form; a longer run is a scan
over chunks. The state is advanced by a count of accepted tokens that may be smaller than n: that is how padding in a
prompt chunk and rejected drafts in a decode window leave no trace. Kernels can run both instead (`kernels/gdn_chunks`,
`kernels/gdn_window`).

Shapes: T tokens, Hk key heads, Hv value heads, D head width, S: f32[Hv, D_key, D_value]. Source: qwen4exp (`ssm_*`
tensors); the chunk form is the WY form of the gated delta rule (Yang et al., arXiv:2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.engine.layers import rms_norm
from strata_jax.engine.matrix import Matrix, linear, linears
from strata_jax.geometry import Geometry
from strata_jax.kernels import backend, gdn_window
from strata_jax.kernels.gdn_chunks import chunk_problem, gdn_chunks
from strata_jax.kernels.gdn_window import GdnVectors, WindowRows, head_problem
from strata_jax.memory.layout import GDN_CHUNK_TOKENS as CHUNK

BLOCK = 8
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


def window(
    u: jax.Array, w: GdnWeights, state: GdnState, g: Geometry, *, kernels: bool = False
) -> tuple[jax.Array, GdnRows | WindowRows]:
    """Run T <= `CHUNK` tokens from ``state`` without advancing it: output f32[T, E] and the rows to advance with.

    Args:
        kernels: run the few tokens of a decode window by kernels, if these know heads of such a width.
    """
    num_tokens = u.shape[0]
    if kernels and num_tokens <= gdn_window.MAX_WINDOW_TOKENS and head_problem(g.gdn_head_dim) is None:
        products = linears(u, (w.qkv, w.gate, w.alpha, w.beta))
        vectors = GdnVectors(w.conv, w.dt_bias, w.a, w.norm)
        out, rows = _window_by_kernel(products, vectors, state, eps=g.rms_eps, interpret=backend.interprets())
        return linear(out, w.out), rows
    q, k, v, log_a, beta, conv_inputs, gate = _project(u, w, state.conv, g)
    if num_tokens == 1:
        o, deltas = _step(state.memory, q, k, v, log_a, beta)
        return _output(o.reshape(1, -1), gate, w, g), GdnRows(conv_inputs, k, deltas, log_a)
    terms = _inside(q, k, v, log_a, beta)
    o, deltas = _outputs(state.memory, terms)
    return _output(o.reshape(num_tokens, -1), gate, w, g), GdnRows(conv_inputs, k, deltas, terms.log_decay)


def advance(state: GdnState, rows: GdnRows | WindowRows, count: jax.Array) -> GdnState:
    """The state after the first ``count: i32`` tokens of the window (0 leaves it as it is)."""
    if isinstance(rows, WindowRows):
        return _advance_by_kernel(state, rows, count, interpret=backend.interprets())
    memory = _advance_memory(state.memory, rows.keys, rows.deltas, rows.log_decay, count)
    conv = jax.lax.dynamic_slice_in_dim(rows.conv_inputs, count, state.conv.shape[0])
    return GdnState(memory, conv)


def prefill(
    u: jax.Array, w: GdnWeights, state: GdnState, count: jax.Array, g: Geometry, *, kernels: bool = False
) -> tuple[jax.Array, GdnState]:
    """Run T tokens of which the first ``count`` are real, and advance the state past them.

    Args:
        u: f32[T, E]; T is a multiple of `CHUNK`.
        kernels: run the recurrence by kernels, if these know heads of such a width.
    """
    num_tokens = u.shape[0]
    q, k, v, log_a, beta, conv_inputs, gate = _project(u, w, state.conv, g)
    conv = jax.lax.dynamic_slice_in_dim(conv_inputs, count, state.conv.shape[0])
    if kernels and chunk_problem(g.gdn_head_dim) is None:
        o, memory = _chunks_by_kernel(q, k, v, log_a, beta, state.memory, count, interpret=backend.interprets())
        return _output(o, gate, w, g), GdnState(memory, conv)
    num_chunks = num_tokens // CHUNK
    parts = jax.tree.map(lambda x: x.reshape(num_chunks, CHUNK, *x.shape[1:]), (q, k, v, log_a, beta))
    inside = jax.vmap(_inside)(*parts)  # all that does not depend on the state, for all chunks at once
    counts = jnp.clip(count - jnp.arange(num_chunks) * CHUNK, 0, CHUNK)

    def step(memory: jax.Array, part: tuple[ChunkTerms, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        terms, k_i, count_i = part
        o, deltas = _outputs(memory, terms)
        return _advance_memory(memory, k_i, deltas, terms.log_decay, count_i), o

    memory, o = jax.lax.scan(step, state.memory, (inside, parts[1], counts))
    return _output(o.reshape(num_tokens, -1), gate, w, g), GdnState(memory, conv)


def _project(u: jax.Array, w: GdnWeights, conv_state: jax.Array, g: Geometry) -> tuple[jax.Array, ...]:
    """Queries, keys f32[T, Hk, D], values f32[T, Hv, D], log decay and beta f32[T, Hv], convolution inputs, gate."""
    num_tokens = u.shape[0]
    heads, width = g.gdn_key_heads, g.gdn_head_dim
    qkv, gate, alpha, beta = linears(u, (w.qkv, w.gate, w.alpha, w.beta))
    conv_inputs = jnp.concatenate([conv_state, qkv])
    c = jax.nn.silu(causal_conv(conv_inputs, w.conv, num_tokens))
    q = _l2_norm(c[:, : heads * width].reshape(num_tokens, heads, width), g.rms_eps) / width**0.5
    k = _l2_norm(c[:, heads * width : 2 * heads * width].reshape(num_tokens, heads, width), g.rms_eps)
    v = c[:, 2 * heads * width :].reshape(num_tokens, g.gdn_value_heads, width)
    log_a = w.a * jax.nn.softplus(alpha + w.dt_bias)
    return q, k, v, log_a, jax.nn.sigmoid(beta), conv_inputs, gate


@partial(jax.jit, static_argnames=("eps", "interpret"))
def _window_by_kernel(
    products: tuple[jax.Array, ...], w: GdnVectors, state: GdnState, *, eps: float, interpret: bool
) -> tuple[jax.Array, WindowRows]:
    """Jitted inside the programs that call it, so that all blocks share one lowered kernel; the next ones, too."""
    qkv, gate, alpha, beta = products
    return gdn_window.gdn_window(
        qkv, gate, alpha, beta, w, state.memory, state.conv, eps, backend="triton", interpret=interpret
    )


@partial(jax.jit, static_argnames=("interpret",))
def _chunks_by_kernel(*args: Any, interpret: bool) -> tuple[jax.Array, jax.Array]:
    return gdn_chunks(*args, chunk=CHUNK, backend="triton", interpret=interpret)


@partial(jax.jit, static_argnames=("interpret",))
def _advance_by_kernel(state: GdnState, rows: WindowRows, count: jax.Array, *, interpret: bool) -> GdnState:
    return GdnState(
        *gdn_window.gdn_advance(state.memory, state.conv, rows, count, backend="triton", interpret=interpret)
    )


def _l2_norm(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkTerms:
    """What the outputs of one chunk need besides the state.

    Value heads are split into (groups, Hk): value head = group * Hk + key head.

    Attributes:
        queries_keys: f32[2, n, Hk, D].
        values: f32[groups, Hk, n, D], scaled by beta.
        decay: f32[groups, Hk, n, 1], from the chunk's start; ``beta_decay`` the same times beta.
        inverse: f32[groups, Hk, n, n], (I + M)^-1.
        attention: f32[groups, Hk, n, n], decayed products of queries and keys on and below the diagonal.
        log_decay: f32[n, Hv], running sum of log decay.
    """

    queries_keys: jax.Array
    values: jax.Array
    decay: jax.Array
    beta_decay: jax.Array
    inverse: jax.Array
    attention: jax.Array
    log_decay: jax.Array


def _step(
    memory: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, log_a: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output f32[1, Hv, D] and delta f32[1, Hv, D] of one token: the chunk form for n = 1, in fewer operations."""
    groups = v.shape[1] // k.shape[1]
    qk = jnp.tile(jnp.concatenate([q, k]).swapaxes(0, 1), (groups, 1, 1))  # f32[Hv, 2, D]: head = group * Hk + key head
    from_state = jnp.matmul(qk, memory, precision=HIGHEST)
    decay = jnp.exp(log_a[0])[:, None]
    delta = beta[0][:, None] * (v[0] - decay * from_state[:, 1])
    overlap = jnp.tile(jnp.sum(q[0] * k[0], axis=-1), groups)[:, None]
    return (decay * from_state[:, 0] + overlap * delta)[None], delta[None]


def _inside(q: jax.Array, k: jax.Array, v: jax.Array, log_a: jax.Array, beta: jax.Array) -> ChunkTerms:
    n, heads, width = k.shape
    groups = v.shape[1] // heads
    log_decay = jnp.cumsum(log_a, axis=0)
    s = log_decay.T.reshape(groups, heads, n)
    b = beta.T.reshape(groups, heads, n, 1)
    lower = jnp.tril(jnp.ones((n, n), bool))
    # exponents above the diagonal are positive and may overflow: mask them before the exponential
    d = jnp.where(lower, jnp.exp(jnp.where(lower, s[..., :, None] - s[..., None, :], 0.0)), 0.0)
    qk = jnp.stack([q, k])
    scores = jnp.einsum("zihd,jhd->zhij", qk, k, precision=HIGHEST)
    m = jnp.where(jnp.tril(lower, -1), b * scores[1] * d, 0.0)
    values = jnp.moveaxis(v, 0, 1).reshape(groups, heads, n, width)
    decay = jnp.exp(s)[..., None]
    return ChunkTerms(qk, b * values, decay, b * decay, _unit_lower_inverse(m), scores[0] * d, log_decay)


def _outputs(memory: jax.Array, terms: ChunkTerms) -> tuple[jax.Array, jax.Array]:
    """Outputs f32[n, Hv, D] and deltas f32[n, Hv, D] of one chunk from the state at its start."""
    groups, heads, n, width = terms.values.shape
    state = memory.reshape(groups, heads, width, width)
    # one pass over the state serves queries and keys
    from_state = jnp.einsum("znhk,ghkv->zghnv", terms.queries_keys, state, precision=HIGHEST)
    rhs = terms.values - terms.beta_decay * from_state[1]
    deltas = jnp.matmul(terms.inverse, rhs, precision=HIGHEST)
    out = terms.decay * from_state[0] + jnp.matmul(terms.attention, deltas, precision=HIGHEST)
    to_rows = lambda x: jnp.moveaxis(x, 2, 0).reshape(n, groups * heads, width)  # noqa: E731
    return to_rows(out), to_rows(deltas)


def _unit_lower_inverse(m: jax.Array) -> jax.Array:
    """(I + m)^-1 for strictly lower triangular ``m: f32[..., n, n]``.

    Diagonal blocks of 8 by forward substitution, then pairs of inverted blocks are joined: as accurate as substitution,
    and batched products instead of a sequence of n rows (the triangular solver of the CPU backend was 100x slower).
    """
    n = m.shape[-1]
    size = BLOCK
    while size < n:
        size *= 2
    if size != n and n > BLOCK:
        m = jnp.pad(m, [(0, 0)] * (m.ndim - 2) + [(0, size - n)] * 2)
        return _unit_lower_inverse(m)[..., :n, :n]
    block = min(n, BLOCK)
    diagonal = jnp.stack([m[..., i : i + block, i : i + block] for i in range(0, n, block)], axis=-3)
    rows = [jnp.broadcast_to(jnp.eye(block)[0], (*diagonal.shape[:-2], block))]
    for i in range(1, block):
        known = jnp.stack(rows, axis=-2)
        rows.append(jnp.eye(block)[i] - jnp.sum(diagonal[..., i, :i, None] * known, axis=-2))
    inverse = jnp.stack(rows, axis=-2)
    while block < n:
        a, b = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        lower = jnp.stack([m[..., i + block : i + 2 * block, i : i + block] for i in range(0, n, 2 * block)], axis=-3)
        corner = -jnp.matmul(b, jnp.matmul(lower, a, precision=HIGHEST), precision=HIGHEST)
        top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, b], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


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


def _output(o: jax.Array, gate: jax.Array, w: GdnWeights, g: Geometry) -> jax.Array:
    num_tokens = o.shape[0]
    heads = o.reshape(num_tokens, g.gdn_value_heads, g.gdn_head_dim)
    normed = rms_norm(heads, w.norm, g.rms_eps).reshape(num_tokens, -1)
    return linear(normed * jax.nn.sigmoid(gate), w.out)
