"""The residual-stream mixer: kernels under interpretation and the reference against float64 products."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.planes import PlaneLayout, from_planes, plane_layout
from strata_jax.kernels.quant_matmul import PlanePart, own_words
from strata_jax.kernels.stream_mixer import MixerPlanes, MixerRead, PendingWrite, mixer_problem, read
from strata_jax.kernels.stream_mixer.layout import mixer_blocks
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET
from tests.kernels.test_dequant import gguf_py
from tests.kernels.test_quant_matmul import random_words

pytestmark = pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
# 3 items of a rank, not a power of two; 2 parts of a stream; 2 blocks of rows of each kind
C, E, RANK, EPS = 2, 64 * 3, 96, 1e-6
TALLEST_FIRST = 1, 0, 2  # of down, up and inject, by the rows of their tiles
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run


def layouts(inject: str) -> tuple[PlaneLayout, PlaneLayout, PlaneLayout]:
    """Down, up and inject; Q8_0 is what the interpreter compiles fastest, and test_planes decodes all types."""
    return plane_layout("Q8_0", RANK, C * E), plane_layout("Q8_0", C * E, RANK), plane_layout(inject, C, C * E)


def mixer(inject: str | None = "Q8_0") -> MixerPlanes:
    parts = layouts(inject or "Q8_0")
    # random weights are large: a small norm keeps the sigmoids away from 0 and 1
    norm = np.random.default_rng(5).uniform(0.005, 0.015, C * E).astype(np.float32)
    arrays = [random_words(layout, seed) for seed, layout in enumerate(parts)]
    words = jnp.asarray(np.concatenate([arrays[0][:128], *(arrays[i] for i in TALLEST_FIRST)]))  # other words first
    down, up, weights = places(parts, 128)
    return MixerPlanes(jnp.asarray(norm), words, down, up, weights if inject else None)


def places(layouts: Sequence[PlaneLayout], first: int) -> list[PlanePart]:
    """Where matrices are whose words lie end to end, in the order of `TALLEST_FIRST`, from a word on."""
    starts = itertools.accumulate((layouts[i].num_words for i in TALLEST_FIRST), initial=first)
    found = dict(zip(TALLEST_FIRST, starts))
    return [PlanePart(layout, found[i]) for i, layout in enumerate(layouts)]


def inputs(num_tokens: int, *, pending: bool) -> tuple[jax.Array, PendingWrite | None]:
    rng = np.random.default_rng(num_tokens)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    # streams of different sizes, so that a norm of the wrong one shows
    streams = draw(num_tokens, C, E) * jnp.asarray([0.1, 10.0])[:, None]
    return streams, PendingWrite(draw(num_tokens, E), draw(num_tokens, C)) if pending else None


def in_float64(streams: jax.Array, w: MixerPlanes, pending: PendingWrite | None) -> tuple[np.ndarray, ...]:
    f64 = lambda x: np.asarray(x, np.float64)  # noqa: E731

    def matrix(part: PlanePart) -> np.ndarray:
        return f64(gguf_py(from_planes(np.asarray(own_words(w.words, part)), part.layout), part.layout.type_name))

    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    s = f64(streams)
    if pending is not None:
        s = s + f64(pending.inject)[:, :, None] * f64(pending.y)[:, None, :]
    normed = f64(w.norm).reshape(C, E) * s / np.sqrt((s**2).mean(-1, keepdims=True) + EPS)
    flat = normed.reshape(len(s), -1)
    z = flat @ matrix(w.down).T / C
    gate = sigmoid((z * sigmoid(z)) @ matrix(w.up).T).reshape(s.shape)
    mixed = (gate * normed).mean(1)
    if w.inject is None:
        return s, mixed
    return s, mixed, 2 * sigmoid(flat @ matrix(w.inject).T / C)


def arrays(found: MixerRead) -> list[np.ndarray]:
    return [np.asarray(x) for x in (found.streams, found.mixed, found.inject) if x is not None]


@pytest.mark.parametrize(
    ("num_tokens", "inject", "backend"),
    [(1, None, "triton"), (5, "Q8_0", "triton"), (2, "Q5_0", "triton"), (4, "Q8_0", "reference")],
)
def test_a_read_is_what_float64_gives(num_tokens: int, inject: str | None, backend: str) -> None:
    """With inject, of the type of down or another: with a pending write, too, and with what the next one needs.

    Five tokens fill no group of programs, neither by two nor by three.
    """
    whole = inject is not None
    w, (streams, write) = mixer(inject), inputs(num_tokens, pending=whole)
    run = jax.jit(
        lambda *args: read(args[0], w, EPS, args[1], backend=backend, interpret=INTERPRET), compiler_options=FAST
    )
    found, expected = arrays(run(streams, write)), in_float64(streams, w, write)
    assert len(found) == len(expected) == 2 + whole
    for got, wanted in zip(found, expected, strict=True):
        assert np.ptp(wanted) > 0.01
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    # a token's result is the same bits whatever the others are
    others = streams.at[1:].set(1e3)
    np.testing.assert_array_equal(arrays(run(others, write))[1][0], found[1][0])


def test_what_does_not_fit_is_named() -> None:
    w, (streams, pending) = mixer(), inputs(2, pending=True)
    assert pending is not None
    for changed, message in [
        ({"streams": jnp.zeros((9, C, E))}, r"streams are f32\[T, C, E\] with T from 1 to 8, got float32\[9, 2, 192\]"),
        ({"streams": jnp.zeros((2, C, 48))}, "a stream of 48 columns is no whole number of items of 32"),
        ({"streams": jnp.zeros((2, 3, E))}, "3 streams are no power of two"),
        (
            {"w": replace(w, words=w.words[:-1])},
            r"inject is 2 x 384 in planes; .* whose words \d+ to \d+ are of uint32",
        ),
        ({"w": replace(w, inject=w.down)}, "inject is 2 x 384 .* got a layout of 96 x 384"),
        ({"w": replace(w, up=replace(w.up, first_word=3))}, "up is 384 x 96 .* whose words 3 to"),
        ({"w": replace(w, norm=w.norm[1:])}, r"norm is float32\[384\], got float32\[383\]"),
        ({"pending": PendingWrite(pending.y[:1], pending.inject)}, r"y is float32\[2, 192\], got float32\[1, 192\]"),
        ({"backend": "mosaic"}, "backend='mosaic' is unknown"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(**({"streams": streams, "w": w, "eps": EPS, "pending": pending} | changed))
    assert mixer_problem(C, E) is None


def test_the_models_mixer_is_lowered_for_cuda_in_three_launches() -> None:
    streams, width, rank = 4, 2560, 320
    flat = streams * width
    down, up, _ = parts = (
        plane_layout("Q6_K", rank, flat), plane_layout("Q8_0", flat, rank), plane_layout("Q6_K", streams, flat),
    )  # fmt: skip
    blocks = mixer_blocks((2, streams, width), down, up)
    assert (blocks.parts, down.rows // blocks.down_rows, width // blocks.up_rows) == (20, 5, 160)
    shape = lambda *dims, of=jnp.float32: jax.ShapeDtypeStruct(dims, of)  # noqa: E731
    words = shape(sum(layout.num_words for layout in parts), of=jnp.uint32)
    where = places(parts, 0)

    def run(streams: jax.Array, norm: jax.Array, y: jax.Array, weights: jax.Array, words: jax.Array) -> MixerRead:
        return read(streams, MixerPlanes(norm, words, *where), EPS, PendingWrite(y, weights), backend="triton")

    text = lower_for_cuda(run, shape(2, streams, width), shape(flat), shape(2, width), shape(2, streams), words)
    assert text.count("__gpu$xla.gpu.triton") == 3
