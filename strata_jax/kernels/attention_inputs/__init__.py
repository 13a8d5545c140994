"""What attention does between projections and scores, in one launch: norms, rotation, new cells, new block keys.

Queries of attention and indexer come out normed, rotated and scaled. Keys and values of real tokens are packed into
their cells of the arena, and keys of blocks that real tokens complete into the index, both in place.
Shapes: T tokens, H heads, G K/V heads of d values, h = H / G; I index heads of e values; B blocks of r cells.
Source: qwen4exp (`attn_*`, `indexer.*`).
"""

from __future__ import annotations

import jax

from strata_jax.kernels.attention_inputs import reference
from strata_jax.kernels.attention_inputs.operands import AttentionInputs, CellShape, Norms, Projections
from strata_jax.kernels.backend import on_backend

__all__ = ["AttentionInputs", "CellShape", "Norms", "Projections", "attention_inputs"]


def attention_inputs(
    projected: Projections,
    norms: Norms,
    tail: jax.Array,
    pages: jax.Array,
    start: jax.Array,
    count: jax.Array,
    arena: jax.Array,
    keys: jax.Array,
    shape: CellShape,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> AttentionInputs:
    """Prepare T tokens at positions ``start + i``, of which the first ``count`` are real.

    The others write nothing, and neither do cells past the context or on a page that is not mapped.

    Args:
        tail: f32[r - 1, e], the raw index keys of the tokens before ``start``.
        pages: i32[N], the page of each group of cells, -1 = not mapped.
        start, count: i32[].
        arena: u32[P, W] and keys: f32[B, e], updated in place where they are donated.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the kernel in Pallas' interpreter, on any device.

    Raises:
        ValueError: shapes do not fit, or `backend` is unknown.
    """
    _check(projected, norms, tail, keys, shape)

    def in_jnp(projected: Projections, norms: Norms, *arrays: jax.Array) -> AttentionInputs:
        return reference.prepare(projected, norms, *arrays, shape=shape)

    def on_triton(projected: Projections, norms: Norms, *arrays: jax.Array) -> AttentionInputs:
        from strata_jax.kernels.attention_inputs import triton

        return triton.prepare(projected, norms, *arrays, shape=shape, interpret=interpret)

    return on_backend(backend, on_triton, in_jnp, projected, norms, tail, pages, start, count, arena, keys)


def _check(projected: Projections, norms: Norms, tail: jax.Array, keys: jax.Array, shape: CellShape) -> None:
    head, index_head, num_tokens = norms.q.shape[0], norms.index_q.shape[0], projected.k.shape[0]
    side = (num_tokens, shape.num_kv_heads * head)
    if projected.k.shape != side or projected.v.shape != side:
        raise ValueError(f"k and v are f32{list(side)}, got {list(projected.k.shape)} and {list(projected.v.shape)}")
    if projected.query_gate.shape[1] % (2 * head * shape.num_kv_heads):
        raise ValueError(
            f"query_gate is f32[T, H * {2 * head}], H a multiple of {shape.num_kv_heads} heads, got"
            f" {list(projected.query_gate.shape)}"
        )
    if projected.index_k.shape != (num_tokens, index_head) or projected.index_q.shape[1] % index_head:
        raise ValueError(
            f"index_q and index_k are f32[{num_tokens}, I * {index_head}] and f32[{num_tokens}, {index_head}], got"
            f" {list(projected.index_q.shape)} and {list(projected.index_k.shape)}"
        )
    if shape.ratio < 2:
        raise ValueError(f"blocks of {shape.ratio} cells: at least 2")
    if tail.shape != (shape.ratio - 1, index_head) or keys.shape[1:] != (index_head,):
        raise ValueError(
            f"tail and keys are f32[{shape.ratio - 1}, {index_head}] and f32[B, {index_head}], got"
            f" {list(tail.shape)} and {list(keys.shape)}"
        )
    if shape.rope_dim % 2 or shape.rope_dim > min(head, index_head):
        raise ValueError(
            f"rope_dim={shape.rope_dim}: an even number of values of heads of {head} and {index_head} is rotated"
        )
