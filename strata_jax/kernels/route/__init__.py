"""Which experts each token uses, with which weights, and what a decode window needs to run them.

The best K of X softmax scores, ties to the lower expert, in ascending order of expert; their weights add up to 1.
Not here: the router's product. Source of the formula: qwen4exp (`ffn_gate_inp`).
Shapes: T tokens, X experts, K experts per token, P = T K pairs, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.expert_gemv import VectorRows, WindowPlan
from strata_jax.kernels.form import form
from strata_jax.kernels.planes import ITEM
from strata_jax.kernels.route import reference
from strata_jax.memory.layout import MAX_WINDOW_TOKENS

__all__ = ["Routing", "choose_experts", "route_window"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Where the tokens of a window go.

    Attributes:
        ids: i32[T, K], the experts of each token, ascending; X in rows past the real ones.
        weights: f32[T, K], 0 in rows past the real ones.
        shared: f32[T, 1], the weight of the shared expert.
        hits: i32[], pairs whose expert is resident.
        uses: i32[X], tokens of each expert.
        plan: the pairs sorted by expert.
        x: u32[T, rows.count, E / 32], the tokens' vectors as `expert_gemv` multiplies them.
    """

    ids: jax.Array
    weights: jax.Array
    shared: jax.Array
    hits: jax.Array
    uses: jax.Array
    plan: WindowPlan
    x: jax.Array


def choose_experts(
    scores: jax.Array, num_used: int, *, backend: str | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Choose each token's experts: ids i32[T, K] and weights f32[T, K], for any number of tokens.

    Args:
        scores: f32[T, X], before softmax.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the kernel in Pallas' interpreter, on any device.

    Raises:
        ValueError: `scores` do not fit, or there are fewer than `num_used` experts.
    """
    _check_scores(scores, num_used)

    def on_triton(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        from strata_jax.kernels.route import triton

        return triton.choose_experts(scores, num_used, interpret=interpret)

    return on_backend(backend, on_triton, lambda scores: reference.choose_experts(scores, num_used), scores)


def route_window(
    scores: jax.Array,
    u: jax.Array,
    shared_router: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    num_used: int,
    rows: VectorRows,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> Routing:
    """Choose the experts of a window of T <= 8 tokens and prepare their products: one launch.

    Args:
        scores: f32[T, X], before softmax.
        u: f32[T, E], what the experts are applied to.
        shared_router: f32[E].
        pages: i32[X], first arena page of each expert, -1 = not resident.
        count: i32[], so many of the tokens are real.
        rows: how the vectors are packed (`expert_gemv.input_rows`).
        backend, interpret: as of `choose_experts`.

    Raises:
        ValueError: as `choose_experts`, or the other operands do not fit.
    """
    _check_scores(scores, num_used)
    num_tokens, num_experts = scores.shape
    if num_tokens > MAX_WINDOW_TOKENS:
        raise ValueError(
            f"a window has at most {MAX_WINDOW_TOKENS} tokens, got {num_tokens}; `choose_experts` takes any number"
        )
    if u.ndim != 2 or u.shape[0] != num_tokens or u.shape[1] % ITEM or u.dtype != jnp.float32:
        raise ValueError(f"u is f32[{num_tokens}, E], E a multiple of {ITEM}, got {form(u)}")
    if shared_router.shape != u.shape[1:] or shared_router.dtype != jnp.float32:
        raise ValueError(f"shared_router is f32[{u.shape[1]}], got {form(shared_router)}")
    if pages.shape != (num_experts,) or pages.dtype != jnp.int32:
        raise ValueError(f"pages is i32[{num_experts}], got {form(pages)}")

    def in_jnp(*operands: jax.Array) -> Routing:
        return Routing(*reference.route_window(*operands, num_used=num_used, rows=rows))

    def on_triton(*operands: jax.Array) -> Routing:
        from strata_jax.kernels.route import triton

        return Routing(*triton.route_window(*operands, num_used=num_used, rows=rows, interpret=interpret))

    operands = scores, u, shared_router, pages, jnp.asarray(count, jnp.int32)
    return on_backend(backend, on_triton, in_jnp, *operands)


def _check_scores(scores: jax.Array, num_used: int) -> None:
    if scores.ndim != 2 or scores.dtype != jnp.float32 or scores.shape[0] < 1:
        raise ValueError(f"scores is f32[T, X], got {form(scores)}")
    if not 1 <= num_used <= scores.shape[1]:
        raise ValueError(f"a token cannot use {num_used} of {scores.shape[1]} experts")
