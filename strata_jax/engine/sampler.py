"""Choosing tokens from logits inside the compiled step.

Filters apply in llama.cpp's default order: top-k, top-p, min-p, then temperature. The random number of a token depends
only on the seed and on the token's position, so drafted and plain decoding draw the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from strata_jax.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """`Sampling` as device scalars.

    greedy: the best token is taken. Known when a program is compiled: of a branch on the device the host would have to
        read which one it is, in the middle of a round.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    greedy: bool = field(metadata={"static": True})


def sampling_arrays(how: Sampling) -> SamplingArrays:
    """The settings as device scalars: between those that are not greedy a change compiles nothing."""
    return SamplingArrays(
        jnp.float32(how.temperature),
        jnp.int32(how.top_k),
        jnp.float32(how.top_p),
        jnp.float32(how.min_p),
        jnp.uint32(how.seed),
        greedy=how.temperature == 0,
    )


def sample(logits: jax.Array, positions: jax.Array, how: SamplingArrays) -> jax.Array:
    """Choose one token per row.

    Args:
        logits: f32[T, V].
        positions: i32[T], the position each chosen token will have.

    Returns:
        i32[T].
    """
    return jnp.argmax(logits, axis=-1).astype(jnp.int32) if how.greedy else _draw(logits, positions, how)


def filtered(logits: jax.Array, how: SamplingArrays) -> tuple[jax.Array, jax.Array]:
    """Sorted, filtered log-weights: f32[T, V] (best first, -inf = dropped) and the token of each i32[T, V]."""
    vocab = logits.shape[-1]
    best, tokens = jax.lax.top_k(logits, vocab)
    rank = jnp.arange(vocab)
    keep = (how.top_k == 0) | (rank < how.top_k)
    prob = jax.nn.softmax(jnp.where(keep, best, -jnp.inf), axis=-1)
    # the sum rounds to 1 before the last tokens: without the first condition top_p=1 would drop them
    keep = keep & ((how.top_p >= 1) | (jnp.cumsum(prob, axis=-1) - prob < how.top_p))
    keep = keep & (prob >= how.min_p * prob[:, :1])
    return jnp.where(keep, best / how.temperature, -jnp.inf), tokens


def _draw(logits: jax.Array, positions: jax.Array, how: SamplingArrays) -> jax.Array:
    weights, tokens = filtered(logits, how)
    base = jax.random.key(how.seed)
    noise = jax.vmap(lambda p: jax.random.gumbel(jax.random.fold_in(base, p), (logits.shape[-1],)))(positions)
    best = jnp.argmax(weights + noise, axis=-1)
    return jnp.take_along_axis(tokens, best[:, None], axis=-1)[:, 0].astype(jnp.int32)
