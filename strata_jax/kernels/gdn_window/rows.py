"""What a window of the gated delta net reads besides its products, and what it leaves for `advance`."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GdnVectors:
    """``conv: f32[channels, taps]``, ``dt_bias: f32[Hv]``, ``a: f32[Hv]`` (negative), ``norm: f32[D]``."""

    conv: jax.Array
    dt_bias: jax.Array
    a: jax.Array
    norm: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowRows:
    """What the state is advanced with, token by token, once it is known how many tokens are kept.

    Attributes:
        inputs: f32[T, channels], of the convolution.
        keys: f32[T, Hk, D].
        deltas: f32[T, Hv, D].
        decay: f32[T, Hv], of this token alone.
    """

    inputs: jax.Array
    keys: jax.Array
    deltas: jax.Array
    decay: jax.Array


def head_problem(head_dim: int) -> str | None:
    """Why the kernels cannot run heads of this width; None if they can."""
    return f"a head of {head_dim} is no power of two" if head_dim & (head_dim - 1) else None
