"""The residual-stream mixer in plain jnp, on decoded matrices: the oracle of the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.planes import decode_planes
from strata_jax.kernels.quant_matmul.tiles import PlanePart, own_words
from strata_jax.kernels.stream_mixer.layout import MixerPlanes, MixerRead, PendingWrite


def read(streams: jax.Array, w: MixerPlanes, eps: float, pending: PendingWrite | None) -> MixerRead:
    """As `strata_jax.kernels.stream_mixer.read`."""
    num_tokens, num_streams, width = streams.shape
    if pending is not None:
        streams = streams + pending.inject[:, :, None] * pending.y[:, None, :]
    mean_square = jnp.mean(streams * streams, axis=-1, keepdims=True)
    normed = w.norm.reshape(num_streams, width) * streams / jnp.sqrt(mean_square + eps)
    flat = normed.reshape(num_tokens, -1)
    hidden = jax.nn.silu(_product(flat, w.words, w.down) / num_streams)
    gate = jax.nn.sigmoid(_product(hidden, w.words, w.up)).reshape(streams.shape)
    inject = None
    if w.inject is not None:
        inject = 2.0 * jax.nn.sigmoid(_product(flat, w.words, w.inject) / num_streams)
    return MixerRead(streams, jnp.mean(gate * normed, axis=1), inject)


def _product(x: jax.Array, words: jax.Array, part: PlanePart) -> jax.Array:
    return jnp.dot(x, decode_planes(own_words(words, part), part.layout).T, precision=jax.lax.Precision.HIGHEST)
