"""Mixers and the gated delta net of a window by kernels, interpreted: what the engine gives without them.

The mixers are packed blocks, and the same in planes. Experts, attention and whole rounds: `test_expert_kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine import gdn
from strata_jax.engine.joined import join
from strata_jax.engine.layers import MixerWeights, read_streams, write_and_read, write_streams
from strata_jax.engine.matrix import Matrix, from_bytes
from strata_jax.kernels.gdn_window import WindowRows
from strata_jax.kernels.planes import to_planes
from strata_jax.kernels.quant_matmul import PlanePart
from strata_jax.memory.dense_planes import dense_planes
from strata_jax.presets import model_geometry
from tests.kernels.test_expert_gemv import random_packed

GEOMETRY = replace(model_geometry("synthetic_small"), embed_width=64, mixer_rank=64, gdn_value_heads=4, gdn_head_dim=16)
T, TOLERANCE = 2, 1e-4  # of the largest value
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run


@dataclass(frozen=True)
class Weights:
    """Two mixers around a gated delta net, and an output mixer."""

    attn_mixer: MixerWeights
    ffn_mixer: MixerWeights
    token_mixer: gdn.GdnWeights
    out_mixer: MixerWeights


jax.tree_util.register_dataclass(Weights)


def make(*, planes: bool) -> Weights:
    """The same weights, mixers as stored or in planes."""
    g, rng = GEOMETRY, np.random.default_rng(3)
    flat, heads, width = g.num_streams * g.embed_width, g.gdn_value_heads, g.gdn_value_heads * g.gdn_head_dim
    channels = 2 * g.gdn_key_heads * g.gdn_head_dim + width

    def matrix(rows: int, cols: int) -> Matrix:
        layout = dense_planes("Q8_0", rows, cols)
        assert layout is not None
        packed = random_packed("Q8_0", rows, cols, rng)
        if planes:
            return Matrix(to_planes(packed, layout), "Q8_0", cols, PlanePart(layout))  # type: ignore[arg-type]
        return from_bytes(packed, "Q8_0", cols)

    def product(rows: int, cols: int) -> Matrix:  # not what is tested here
        values = rng.standard_normal((rows, cols)) / cols**0.5
        return Matrix(jnp.asarray(values, jnp.float32), "F32", cols)

    def vector(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32)

    def mixer(*, inject: bool = True) -> MixerWeights:
        parts = matrix(g.mixer_rank, flat), matrix(flat, g.mixer_rank)
        return MixerWeights(vector(flat), *parts, matrix(g.num_streams, flat) if inject else None)

    token_mixer = gdn.GdnWeights(
        qkv=product(channels, g.embed_width), gate=product(width, g.embed_width), conv=vector(channels, g.conv_kernel),
        beta=product(heads, g.embed_width), alpha=product(heads, g.embed_width), dt_bias=vector(heads),
        a=-vector(heads), norm=vector(g.gdn_head_dim), out=product(g.embed_width, width),
    )  # fmt: skip
    return join(Weights(mixer(), mixer(), token_mixer, mixer(inject=False))).whole()


def half_block(w: Weights, streams: jax.Array, state: gdn.GdnState, count: jax.Array, *, kernels: bool) -> Any:
    """A GDN block with the identity in place of its experts: (streams, the state after ``count`` tokens), rows."""
    eps = GEOMETRY.rms_eps
    read = read_streams(streams, w.attn_mixer, eps)
    y, rows = gdn.window(read.mixed, w.token_mixer, state, GEOMETRY, kernels=kernels)
    read = write_and_read(read, y, w.attn_mixer, w.ffn_mixer, eps)
    streams = write_streams(read, read.mixed, w.ffn_mixer)
    return (streams, gdn.advance(state, rows, count)), rows


def flat_of(streams: jax.Array, w: MixerWeights) -> jax.Array:
    """The normalised streams that a read leaves, empty if it was done by kernels."""
    read = read_streams(streams, w, GEOMETRY.rms_eps)
    return jnp.zeros(0) if read.flat is None else read.flat


def far(found: Any, expected: Any) -> float:
    """The largest difference as a part of the largest value."""
    pairs = zip(map(np.asarray, jax.tree.leaves(found)), map(np.asarray, jax.tree.leaves(expected)), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def test_a_window_by_kernels_is_what_the_engine_gives_without() -> None:
    rng = np.random.default_rng(1)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32)  # noqa: E731
    streams = draw(jnp.empty((T, GEOMETRY.num_streams, GEOMETRY.embed_width)))
    state = jax.tree.map(draw, gdn.empty_state(GEOMETRY))
    plain, planes = make(planes=False), make(planes=True)
    run = jax.jit(half_block, static_argnames="kernels", compiler_options=FAST)
    for count in range(T + 1):
        expected, _ = run(plain, streams, state, jnp.int32(count), kernels=False)
        found, rows = run(planes, streams, state, jnp.int32(count), kernels=True)
        assert isinstance(rows, WindowRows)
        assert 0 < far(found, expected) < TOLERANCE
    # an output mixer, which nothing is written with; more rows than a window has, and no switch: XLA
    flat = GEOMETRY.num_streams * GEOMETRY.embed_width
    for num_tokens, w, left in [
        (T, planes.out_mixer, (0,)),
        (8, planes.attn_mixer, (0,)),
        (9, planes.attn_mixer, (9, flat)),
        (T, plain.attn_mixer, (T, flat)),
    ]:
        some = jax.ShapeDtypeStruct((num_tokens, *streams.shape[1:]), jnp.float32)
        assert jax.eval_shape(partial(flat_of, w=w), some).shape == left
    _, rows = jax.eval_shape(partial(gdn.window, g=GEOMETRY), streams.mean(1), planes.token_mixer, state)
    assert isinstance(rows, gdn.GdnRows)


def test_a_prompt_by_kernels_is_what_the_engine_gives_without() -> None:
    rng = np.random.default_rng(2)
    state = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), gdn.empty_state(GEOMETRY))
    w = make(planes=False).token_mixer
    run = jax.jit(partial(gdn.prefill, g=GEOMETRY), static_argnames="kernels", compiler_options=FAST)
    u = jnp.asarray(rng.standard_normal((2 * gdn.CHUNK, GEOMETRY.embed_width)), jnp.float32)
    for count in (gdn.CHUNK + 7, 2 * gdn.CHUNK):
        expected, after = run(u, w, state, jnp.int32(count), kernels=False)
        found, by_kernel = run(u, w, state, jnp.int32(count), kernels=True)
        assert 0 < far((found[:count], by_kernel), (expected[:count], after)) < TOLERANCE
