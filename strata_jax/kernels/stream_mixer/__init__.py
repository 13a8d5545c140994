"""Residual-stream mixers of a decode window: T <= 8 tokens read C streams of width E, and write a sublayer's output.

    normed = rms_norm(streams) * norm;  gate = sigmoid(up silu(down normed / C));  mixed = mean of gate * normed over C
    inject = 2 sigmoid(inject normed / C);  a write adds inject[:, :, None] * y[:, None, :] to the streams

A write can wait for the read after it (`PendingWrite`). Source: qwen4exp (`hc_*` tensors).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form
from strata_jax.kernels.stream_mixer import reference
from strata_jax.kernels.stream_mixer.layout import MixerPlanes, MixerRead, PendingWrite, mixer_problem
from strata_jax.memory.layout import MAX_WINDOW_TOKENS

__all__ = ["MAX_WINDOW_TOKENS", "MixerPlanes", "MixerRead", "PendingWrite", "mixer_problem", "read"]


def read(
    streams: jax.Array,
    w: MixerPlanes,
    eps: float,
    pending: PendingWrite | None = None,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> MixerRead:
    """Carry out a pending write and mix the streams into a sublayer's input, in float32.

    Args:
        streams: f32[T, C, E], T from 1 to 8.
        eps: added to mean squares.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the Triton kernels in Pallas' interpreter, on any device.

    Raises:
        ValueError: shapes or types do not fit, or no kernel can run these widths.
    """
    _check(streams, w, pending)

    def in_jnp(streams: jax.Array, w: MixerPlanes, pending: PendingWrite | None) -> MixerRead:
        return reference.read(streams, w, eps, pending)

    def on_triton(streams: jax.Array, w: MixerPlanes, pending: PendingWrite | None) -> MixerRead:
        from strata_jax.kernels.stream_mixer import triton

        return triton.read(streams, w, eps, pending, interpret=interpret)

    return on_backend(backend, on_triton, in_jnp, streams, w, pending)


def _check(streams: jax.Array, w: MixerPlanes, pending: PendingWrite | None) -> None:
    if streams.ndim != 3 or not 1 <= streams.shape[0] <= MAX_WINDOW_TOKENS or streams.dtype != jnp.float32:
        raise ValueError(f"streams are f32[T, C, E] with T from 1 to {MAX_WINDOW_TOKENS}, got {form(streams)}")
    num_tokens, num_streams, width = streams.shape
    if problem := mixer_problem(num_streams, width):
        raise ValueError(problem)
    flat, rank = num_streams * width, w.down.layout.rows
    expected = [("down", w.down, rank, flat), ("up", w.up, flat, rank)]
    if w.inject is not None:
        expected.append(("inject", w.inject, num_streams, flat))
    for name, part, rows, cols in expected:
        layout, end = part.layout, part.first_word + part.layout.num_words
        there = w.words.ndim == 1 and w.words.dtype == jnp.uint32 and end <= w.words.shape[0]
        if (layout.rows, layout.cols) != (rows, cols) or not there or part.first_word % layout.tile_rows:
            raise ValueError(
                f"{name} is {rows} x {cols} in planes; got a layout of {layout.rows} x {layout.cols}, whose words"
                f" {part.first_word} to {end} are of {form(w.words)}"
            )
    shapes: list[tuple[str, jax.Array, tuple[int, ...]]] = [("norm", w.norm, (flat,))]
    if pending is not None:
        shapes += [("y", pending.y, (num_tokens, width)), ("inject of y", pending.inject, (num_tokens, num_streams))]
    for name, array, shape in shapes:
        if array.shape != shape or array.dtype != jnp.float32:
            raise ValueError(f"{name} is float32{list(shape)}, got {form(array)}")
