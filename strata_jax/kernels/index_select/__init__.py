"""The best blocks of cells of each token: scores of an indexer, and the exact choice among them.

A token's score for a block is the sum over index heads of relu(q_h . key). It keeps the ``num_kept`` best of the blocks
that it sees, of equal scores those with the lower index, in ascending order of block: sums over them then have one
order. The same code serves decode windows and prompt chunks, and a token's result does not depend on the others.
Shapes: T tokens, H index heads, d their width, B blocks. Source: qwen4exp (`indexer.*`, section on sparse selection).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form
from strata_jax.kernels.index_select import reference
from strata_jax.kernels.index_select.blocks import DEFAULT, Blocks

__all__ = ["Blocks", "best_blocks", "index_scores"]


def index_scores(
    q: jax.Array,
    keys: jax.Array,
    seen: jax.Array,
    *,
    backend: str | None = None,
    blocks: Blocks = DEFAULT,
    interpret: bool = False,
) -> jax.Array:
    """Score the blocks that each token sees.

    Args:
        q: f32[T, H, d], H and d powers of two, d at least 16.
        keys: f32[B, d]; rows that no token sees may hold anything.
        seen: i32[T], 0 to B: a token sees the blocks before this one.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the kernel in Pallas' interpreter, on any device.

    Returns:
        f32[T, B'], at least 0; B' is B or a little more, and from ``seen`` on a row may hold anything.

    Raises:
        ValueError: shapes or types do not fit, or `backend` is unknown.
    """
    num_tokens, num_heads, width = _three(q)
    if not _power_of_two(num_heads) or not _power_of_two(width) or width < 16:
        raise ValueError(
            f"q has {num_heads} index heads of {width}: both must be powers of two, a head of at least 16 values"
        )
    if keys.ndim != 2 or keys.shape[1] != width or keys.dtype != jnp.float32:
        raise ValueError(f"keys are f32[B, {width}], got {form(keys)}")
    _check_seen(seen, num_tokens)

    def on_triton(q: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
        from strata_jax.kernels.index_select import triton

        return triton.index_scores(q, keys, seen, blocks, interpret=interpret)

    return on_backend(backend, on_triton, reference.index_scores, q, keys, seen)


def best_blocks(
    scores: jax.Array,
    seen: jax.Array,
    num_kept: int,
    *,
    backend: str | None = None,
    blocks: Blocks = DEFAULT,
    interpret: bool = False,
) -> jax.Array:
    """Choose the blocks with the best scores: the set that `jax.lax.top_k` gives, in ascending order.

    Args:
        scores: f32[T, B], at least 0 (or NaN: taken as 0) before ``seen``, anything from there on.
        seen: i32[T], 0 to B, as of `index_scores`.
        num_kept: static, at least 1.

    Returns:
        i32[T, num_kept]: the first ``min(num_kept, seen)`` entries of a row are blocks, ascending; the others are 0.

    Raises:
        ValueError: shapes or types do not fit, or `backend` is unknown.
    """
    if scores.ndim != 2 or scores.dtype != jnp.float32:
        raise ValueError(f"scores are f32[T, B], got {form(scores)}")
    if num_kept < 1:
        raise ValueError(f"num_kept={num_kept}: at least 1 block is kept")
    _check_seen(seen, scores.shape[0])

    def in_jnp(scores: jax.Array, seen: jax.Array) -> jax.Array:
        return reference.best_blocks(scores, seen, num_kept)

    def on_triton(scores: jax.Array, seen: jax.Array) -> jax.Array:
        from strata_jax.kernels.index_select import triton

        return triton.best_blocks(scores, seen, num_kept, blocks, interpret=interpret)

    return on_backend(backend, on_triton, in_jnp, scores, seen)


def _three(q: jax.Array) -> tuple[int, int, int]:
    if q.ndim != 3 or q.dtype != jnp.float32:
        raise ValueError(f"q is f32[T, H, d], got {form(q)}")
    num_tokens, num_heads, width = q.shape
    return num_tokens, num_heads, width


def _check_seen(seen: jax.Array, num_tokens: int) -> None:
    if seen.shape != (num_tokens,) or seen.dtype != jnp.int32:
        raise ValueError(f"seen is i32[{num_tokens}], got {form(seen)}")


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
