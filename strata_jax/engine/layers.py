"""The pieces every block is made of: RMS norm, rotary embedding, residual-stream mixers, the output mixer.

Shapes: T tokens, C streams, E model width, r mixer rank. All arithmetic is float32. Where a mixer is held in planes, a
window reads and writes the streams by kernels (`kernels/stream_mixer`).
Source: the qwen4exp architecture as stored in GGUF (hyper-connection mixers, `hc_*` tensors).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.matrix import Matrix, linear
from strata_jax.kernels import backend, stream_mixer
from strata_jax.kernels.stream_mixer import MixerPlanes, PendingWrite, mixer_problem


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixerWeights:
    """One residual-stream mixer: ``norm: f32[C*E]``, ``down: [r, C*E]``, ``up: [C*E, r]``, ``inject: [C, C*E]``."""

    norm: jax.Array
    down: Matrix
    up: Matrix
    inject: Matrix | None


@dataclass(frozen=True)
class StreamRead:
    """What a sublayer gets from the streams, and what writing its output needs.

    Attributes:
        streams: f32[T, C, E], as they were read.
        mixed: f32[T, E], the sublayer's input.
        flat: f32[T, C*E], the normalised streams; None where kernels have read them.
        inject: f32[T, C], weights of the output in each stream, from kernels.
    """

    streams: jax.Array
    mixed: jax.Array
    flat: jax.Array | None = None
    inject: jax.Array | None = None


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, scaled by ``gamma``."""
    return gamma * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def read_streams(streams: jax.Array, w: MixerWeights, eps: float) -> StreamRead:
    """Mix the streams f32[T, C, E] into a sublayer's input."""
    planes = _planes(streams, w)
    if planes is not None:
        return _read_by_kernels(streams, planes, None, eps)
    num_tokens, num_streams, width = streams.shape
    normed = rms_norm(streams, w.norm.reshape(num_streams, width), eps)
    flat = normed.reshape(num_tokens, num_streams * width)
    gate = jax.nn.sigmoid(linear(jax.nn.silu(linear(flat, w.down) / num_streams), w.up))
    return StreamRead(streams, jnp.mean(gate.reshape(streams.shape) * normed, axis=1), flat)


def inject_weights(read: StreamRead, w: MixerWeights) -> jax.Array:
    """With which weight each stream takes a sublayer's output, per token: f32[T, C]."""
    if read.inject is not None:
        return read.inject
    assert w.inject is not None
    assert read.flat is not None
    return 2.0 * jax.nn.sigmoid(linear(read.flat, w.inject) / read.streams.shape[1])


def add_to_streams(streams: jax.Array, inject: jax.Array, y: jax.Array) -> jax.Array:
    """Add ``y: f32[T, E]`` to every stream f32[T, C, E], each with its own weight per token f32[T, C]."""
    return streams + inject[:, :, None] * y[:, None, :]


def write_streams(read: StreamRead, y: jax.Array, w: MixerWeights) -> jax.Array:
    """Add a sublayer's output ``y: f32[T, E]`` to the streams that it was read from: f32[T, C, E]."""
    return add_to_streams(read.streams, inject_weights(read, w), y)


def write_and_read(read: StreamRead, y: jax.Array, w: MixerWeights, following: MixerWeights, eps: float) -> StreamRead:
    """`write_streams`, then `read_streams` with the ``following`` mixer: by kernels in the launches of the read."""
    planes = _planes(read.streams, following)
    if planes is None or read.inject is None:
        return read_streams(write_streams(read, y, w), following, eps)
    return _read_by_kernels(read.streams, planes, PendingWrite(y, read.inject), eps)


def _planes(streams: jax.Array, w: MixerWeights) -> MixerPlanes | None:
    """The mixer as the kernels take it; None if they cannot, or for more tokens than a window has."""
    num_tokens, num_streams, width = streams.shape
    few = num_tokens <= stream_mixer.MAX_WINDOW_TOKENS
    if not few or w.down.planes is None or w.up.planes is None or mixer_problem(num_streams, width):
        return None
    inject = None if w.inject is None else w.inject.planes
    if w.inject is not None and inject is None:
        return None
    return MixerPlanes(w.norm, w.down.data, w.down.planes, w.up.planes, inject)


def _read_by_kernels(streams: jax.Array, w: MixerPlanes, pending: PendingWrite | None, eps: float) -> StreamRead:
    found = _read(streams, w, pending, eps=eps, interpret=backend.interprets())
    return StreamRead(found.streams, found.mixed, inject=found.inject)


@partial(jax.jit, static_argnames=("eps", "interpret"))
def _read(
    streams: jax.Array, w: MixerPlanes, pending: PendingWrite | None, *, eps: float, interpret: bool
) -> stream_mixer.MixerRead:
    """Jitted inside the programs that call it, so that mixers of one layout are traced and lowered once."""
    return stream_mixer.read(streams, w, eps, pending, backend="triton", interpret=interpret)


def rope_tables(positions: jax.Array, rope_dim: int, base: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine tables f32[T, rope_dim/2] for text ``positions: i32[T]``."""
    # float64 on the host: the frequencies are constants of the program
    freq = np.asarray(base ** (-np.arange(rope_dim // 2, dtype=np.float64) * 2 / rope_dim), np.float32)
    angle = positions[:, None].astype(jnp.float32) * freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first dimensions of ``x: f32[T, heads, d]`` in half-split pairs (i, i + rope_dim/2)."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
