"""The pieces every block is made of: RMS norm, rotary embedding, residual-stream mixers, the output mixer.

Shapes: T tokens, C streams, E model width, r mixer rank. All arithmetic is float32.
Source: the qwen4exp architecture as stored in GGUF (hyper-connection mixers, `hc_*` tensors).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.matrix import Matrix, linear


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixerWeights:
    """One residual-stream mixer: ``norm: f32[C*E]``, ``down: [r, C*E]``, ``up: [C*E, r]``, ``inject: [C, C*E]``."""

    norm: jax.Array
    down: Matrix
    up: Matrix
    inject: Matrix | None


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, scaled by ``gamma``."""
    return gamma * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def read_streams(streams: jax.Array, w: MixerWeights, eps: float) -> tuple[jax.Array, jax.Array]:
    """Mix the streams into a sublayer's input.

    Args:
        streams: f32[T, C, E] residual streams.

    Returns:
        input f32[T, E] of the sublayer, and the flattened normalised streams f32[T, C*E] (needed by `write_streams`).
    """
    num_tokens, num_streams, width = streams.shape
    normed = rms_norm(streams, w.norm.reshape(num_streams, width), eps)
    flat = normed.reshape(num_tokens, num_streams * width)
    gate = jax.nn.sigmoid(linear(jax.nn.silu(linear(flat, w.down) / num_streams), w.up))
    mixed = jnp.mean(gate.reshape(streams.shape) * normed, axis=1)
    return mixed, flat


def write_streams(streams: jax.Array, flat: jax.Array, y: jax.Array, w: MixerWeights) -> jax.Array:
    """Add a sublayer's output ``y: f32[T, E]`` to every stream, each with its own weight per token."""
    assert w.inject is not None
    inject = 2.0 * jax.nn.sigmoid(linear(flat, w.inject) / streams.shape[1])
    return streams + inject[:, :, None] * y[:, None, :]


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
