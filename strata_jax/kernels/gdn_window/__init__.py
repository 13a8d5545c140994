"""The gated delta net on a decode window: T <= 8 tokens from a state that moves only when their number is known.

A token's convolved channels give a query, a key (both of length 1, the query over sqrt(D)) and values v; per value head
S <- decay S;  delta = beta (v - k S);  S <- S + k delta;  o = q S;  out = rms_norm(o) * norm * sigmoid(gate)
Shapes: T tokens, Hk key heads, Hv value heads, D head width, channels = (2 Hk + Hv) D: queries, keys, values.
Value head h uses key head ``h mod Hk``. Longer runs: `engine/gdn.py`. Source: qwen4exp (`ssm_*` tensors).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form
from strata_jax.kernels.gdn_window import reference
from strata_jax.kernels.gdn_window.rows import GdnVectors, WindowRows, head_problem
from strata_jax.memory.layout import MAX_WINDOW_TOKENS

__all__ = ["MAX_WINDOW_TOKENS", "GdnVectors", "WindowRows", "gdn_advance", "gdn_window", "head_problem"]


def gdn_window(
    qkv: jax.Array,
    gate: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    w: GdnVectors,
    memory: jax.Array,
    history: jax.Array,
    eps: float,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, WindowRows]:
    """Run a window without advancing the state, in float32.

    Args:
        qkv: f32[T, channels], inputs of the convolution, T from 1 to 8.
        gate: f32[T, Hv*D]; alpha, beta: f32[T, Hv]: products of the same input, before any nonlinearity.
        memory: f32[Hv, D, D], the state S. history: f32[taps - 1, channels], the inputs before the window.
        eps: added to mean squares and to squared lengths.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the Triton kernel in Pallas' interpreter, on any device.

    Returns:
        f32[T, Hv*D], the input of the output projection; a token's depends on no later token. And what `gdn_advance`
        needs.

    Raises:
        ValueError: shapes or types do not fit, or no kernel can run heads of this width.
    """
    _check(qkv, gate, alpha, beta, w, memory, history)

    def in_jnp(*args: Any) -> tuple[jax.Array, WindowRows]:
        return reference.window(*args, eps=eps)

    def on_triton(*args: Any) -> tuple[jax.Array, WindowRows]:
        from strata_jax.kernels.gdn_window import triton

        return triton.window(*args, eps=eps, interpret=interpret)

    return on_backend(backend, on_triton, in_jnp, qkv, gate, alpha, beta, w, memory, history)


def gdn_advance(
    memory: jax.Array,
    history: jax.Array,
    rows: WindowRows,
    count: jax.Array,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Advance a state past the first ``count: i32`` tokens of a window, in place where it is donated.

    Args:
        memory, history: as `gdn_window` read them.
        count: 0 leaves them as they are; at most T. Rows from there on are not read.
    """
    num_tokens = rows.inputs.shape[0]
    if history.shape[1:] != rows.inputs.shape[1:] or rows.deltas.shape != (num_tokens, *memory.shape[:2]):
        raise ValueError(
            f"rows of {form(rows.inputs)} and {form(rows.deltas)} are of another state than {form(memory)} with"
            f" {form(history)}"
        )

    def on_triton(*args: Any) -> tuple[jax.Array, jax.Array]:
        from strata_jax.kernels.gdn_window import triton

        return triton.advance(*args, interpret=interpret)

    return on_backend(backend, on_triton, reference.advance, memory, history, rows, count)


def _check(
    qkv: jax.Array,
    gate: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    w: GdnVectors,
    memory: jax.Array,
    history: jax.Array,
) -> None:
    if qkv.ndim != 2 or not 1 <= qkv.shape[0] <= MAX_WINDOW_TOKENS:
        raise ValueError(f"qkv is f32[T, channels] with T from 1 to {MAX_WINDOW_TOKENS}, got {form(qkv)}")
    if memory.ndim != 3 or memory.shape[1] != memory.shape[2]:
        raise ValueError(f"memory is f32[Hv, D, D], got {form(memory)}")
    (num_tokens, channels), (num_heads, width, _) = qkv.shape, memory.shape
    if problem := head_problem(width):
        raise ValueError(problem)
    num_keys, rest = divmod(channels - num_heads * width, 2 * width)
    if rest or num_keys < 1 or num_heads % num_keys:
        raise ValueError(f"{channels} channels are not (2 Hk + {num_heads}) x {width} with Hk a divisor of {num_heads}")
    taps = w.conv.shape[-1]
    for name, array, shape in [
        ("qkv", qkv, (num_tokens, channels)),
        ("gate", gate, (num_tokens, num_heads * width)),
        ("alpha", alpha, (num_tokens, num_heads)),
        ("beta", beta, (num_tokens, num_heads)),
        ("memory", memory, memory.shape),
        ("history", history, (taps - 1, channels)),
        ("conv", w.conv, (channels, taps)),
        ("dt_bias", w.dt_bias, (num_heads,)),
        ("a", w.a, (num_heads,)),
        ("norm", w.norm, (width,)),
    ]:
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(f"{name} is float32{list(shape)}, got {form(array)}")
