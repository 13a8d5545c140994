"""The gated delta net on a prompt: many tokens, of which the first ``count`` are real, and the state past them.

Per value head, over tokens:  S <- exp(log_a) S;  delta = beta (v - k S);  S <- S + k delta;  o = q S
Computed chunk by chunk in closed form (WY form, Yang et al., arXiv:2412.06464). Shapes: T tokens, Hk key heads, Hv
value heads, D head width, n tokens of a chunk. Value head h uses key head ``h mod Hk``. Windows: `kernels/gdn_window`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form
from strata_jax.kernels.gdn_chunks import reference

__all__ = ["chunk_problem", "gdn_chunks"]

MIN_SIDE = 16  # of a tile on tensor cores


def chunk_problem(head_dim: int) -> str | None:
    """Why the kernels cannot run heads of this width; None if they can."""
    if head_dim < MIN_SIDE or head_dim & (head_dim - 1):
        return f"a head of {head_dim} is no power of two from {MIN_SIDE} on"
    return None


def gdn_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    beta: jax.Array,
    memory: jax.Array,
    count: jax.Array,
    *,
    chunk: int,
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Run T tokens and advance the state past the first ``count: i32`` of them.

    Args:
        q, k: f32[T, Hk, D], normed (queries over sqrt(D)). v: f32[T, Hv, D]. T is a multiple of `chunk`.
        log_a: f32[T, Hv], logarithm of the decay, 0 at most. beta: f32[T, Hv].
        memory: f32[Hv, D, D], the state, updated in place where it is donated.
        chunk: n, a power of two from 16 on.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the Triton kernels in Pallas' interpreter, on any device.

    Returns:
        o: f32[T, Hv, D], of real tokens independent of the others; the state.

    Raises:
        ValueError: shapes or types do not fit, or no kernel can run heads of this width.
    """
    _check(q, k, v, log_a, beta, memory, chunk)

    def on_triton(*args: Any) -> tuple[jax.Array, jax.Array]:
        from strata_jax.kernels.gdn_chunks import triton

        return triton.gdn_chunks(*args, chunk=chunk, interpret=interpret)

    return on_backend(backend, on_triton, reference.gdn_chunks, q, k, v, log_a, beta, memory, count)


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, log_a: jax.Array, beta: jax.Array, memory: jax.Array, chunk: int
) -> None:
    if memory.ndim != 3 or memory.shape[1] != memory.shape[2]:
        raise ValueError(f"memory is f32[Hv, D, D], got {form(memory)}")
    num_heads, width, _ = memory.shape
    if problem := chunk_problem(width):
        raise ValueError(problem)
    if chunk < MIN_SIDE or chunk & (chunk - 1) or q.shape[0] % chunk:
        raise ValueError(f"{q.shape[0]} tokens in chunks of {chunk}: whole chunks of a power of two from {MIN_SIDE} on")
    num_keys = k.shape[1] if k.ndim == 3 else 0
    if num_keys < 1 or num_heads % num_keys:
        raise ValueError(f"k is f32[T, Hk, {width}] with Hk a divisor of {num_heads}, got {form(k)}")
    keys, values, heads = ((q.shape[0], *rest) for rest in ((num_keys, width), (num_heads, width), (num_heads,)))
    named = {"q": (q, keys), "k": (k, keys), "v": (v, values), "log_a": (log_a, heads), "beta": (beta, heads)}
    for name, (array, shape) in named.items():
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(f"{name} is float32{list(shape)}, got {form(array)}")
