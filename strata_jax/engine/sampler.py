"""Choosing tokens from logits inside the compiled step.

Filters apply in llama.cpp's default order: top-k, top-p, min-p, then temperature. The random number of a token depends
only on the seed and on the token's position, so drafted and plain decoding draw the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from strata_jax.errors import ConfigError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """`Sampling` as device scalars."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a token.

    Attributes:
        temperature: 0 = greedy.
        top_k: keep this many best tokens, 0 = all.
        top_p: keep the smallest set of best tokens with at least this probability, 1 = all.
        min_p: drop tokens less probable than this share of the best one, 0 = none.
        seed: 0 .. 2^32 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0 = off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "seed": (0 <= self.seed < 2**32, "from 0 to 4294967295"),
        }
        wrong = [f"{key}={getattr(self, key)} must be {rule}" for key, (fits, rule) in limits.items() if not fits]
        if wrong:
            raise ConfigError("sampling: " + "; ".join(wrong))

    def arrays(self) -> SamplingArrays:
        return SamplingArrays(
            jnp.float32(self.temperature),
            jnp.int32(self.top_k),
            jnp.float32(self.top_p),
            jnp.float32(self.min_p),
            jnp.uint32(self.seed),
        )


def sample(logits: jax.Array, positions: jax.Array, how: SamplingArrays) -> jax.Array:
    """Choose one token per row.

    Args:
        logits: f32[T, V].
        positions: i32[T], the position each chosen token will have.

    Returns:
        i32[T].
    """
    return jax.lax.cond(
        how.temperature > 0,
        lambda: _draw(logits, positions, how),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )


def filtered(logits: jax.Array, how: SamplingArrays) -> tuple[jax.Array, jax.Array]:
    """Sorted, filtered log-weights: f32[T, V] (best first, -inf = dropped) and the token of each i32[T, V]."""
    vocab = logits.shape[-1]
    best, tokens = jax.lax.top_k(logits, vocab)
    rank = jnp.arange(vocab)
    keep = (how.top_k == 0) | (rank < how.top_k)
    prob = jax.nn.softmax(jnp.where(keep, best, -jnp.inf), axis=-1)
    keep = keep & (jnp.cumsum(prob, axis=-1) - prob < how.top_p)
    keep = keep & (prob >= how.min_p * prob[:, :1])
    return jnp.where(keep, best / how.temperature, -jnp.inf), tokens


def _draw(logits: jax.Array, positions: jax.Array, how: SamplingArrays) -> jax.Array:
    weights, tokens = filtered(logits, how)
    base = jax.random.key(how.seed)
    noise = jax.vmap(lambda p: jax.random.gumbel(jax.random.fold_in(base, p), (logits.shape[-1],)))(positions)
    best = jnp.argmax(weights + noise, axis=-1)
    return jnp.take_along_axis(tokens, best[:, None], axis=-1)[:, 0].astype(jnp.int32)
