"""The gated delta net on windows: kernels under interpretation against float64 and the chunk form."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import gdn
from strata_jax.engine.matrix import linear
from strata_jax.kernels.gdn_window import GdnVectors, WindowRows, gdn_advance, gdn_window, head_problem
from strata_jax.presets import model_geometry
from tests.engine.test_gdn import CASES, CHANNELS, HEAD, KEY_HEADS, TAPS, VALUE_HEADS, WIDTH, inputs, make, recurrence
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
EPS = 1e-6
TOLERANCE = 1e-5
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run
GEOMETRY = replace(
    model_geometry("synthetic_small"), embed_width=WIDTH, gdn_key_heads=KEY_HEADS, gdn_value_heads=VALUE_HEADS,
    gdn_head_dim=HEAD, conv_kernel=TAPS, rms_eps=EPS,
)  # fmt: skip


def vectors(w: gdn.GdnWeights) -> GdnVectors:
    return GdnVectors(w.conv, w.dt_bias, w.a, w.norm)


@cache
def run_window(backend: str) -> Any:
    def run(u: jax.Array, w: gdn.GdnWeights, state: gdn.GdnState) -> tuple[jax.Array, WindowRows]:
        products = (linear(u, part) for part in (w.qkv, w.gate, w.alpha, w.beta))
        out, rows = gdn_window(
            *products, vectors(w), state.memory, state.conv, EPS, backend=backend, interpret=INTERPRET
        )
        return linear(out, w.out), rows

    return jax.jit(run, compiler_options=FAST)


@cache
def run_advance(backend: str) -> Any:
    def run(state: gdn.GdnState, rows: WindowRows, count: jax.Array) -> gdn.GdnState:
        return gdn.GdnState(*gdn_advance(state.memory, state.conv, rows, count, backend=backend, interpret=INTERPRET))

    return jax.jit(run, compiler_options=FAST)


CHUNK_FORM = jax.jit(partial(gdn.window, g=GEOMETRY))
CHUNK_ADVANCE = jax.jit(gdn.advance)


@pytest.mark.parametrize(("num_tokens", "backend"), [(1, "triton"), (2, "triton"), (8, "triton"), (8, "reference")])
def test_windows_equal_the_recurrence_and_the_chunk_form_and_advance_by_any_count(
    num_tokens: int, backend: str
) -> None:
    names = ["usual", "beta 1 and one key", "much is forgotten"] if num_tokens > 2 else ["usual"]
    for name in names:
        w, state = make(CASES[name])
        u = inputs(num_tokens)
        expected, memories, conv = recurrence(u, w, state, EPS)
        found, rows = run_window(backend)(jnp.asarray(u), w, state)
        chunk, chunk_rows = CHUNK_FORM(jnp.asarray(u), w, state)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        np.testing.assert_allclose(found, chunk, atol=TOLERANCE + CASES[name].tolerance)
        np.testing.assert_allclose(rows.deltas, chunk_rows.deltas, atol=TOLERANCE + CASES[name].tolerance)
        for count in range(num_tokens + 1):
            after = run_advance(backend)(state, rows, jnp.int32(count))
            np.testing.assert_allclose(after.memory, memories[count], atol=TOLERANCE, err_msg=f"{name}, {count} kept")
            np.testing.assert_allclose(after.conv, conv[count : count + TAPS - 1], atol=TOLERANCE)
            other = CHUNK_ADVANCE(state, chunk_rows, jnp.int32(count))
            np.testing.assert_allclose(after.memory, other.memory, atol=TOLERANCE + CASES[name].tolerance)


def test_rejected_tokens_leave_no_trace() -> None:
    """The state after some tokens is the same bits, whatever came after them in the window."""
    w, state = make(CASES["usual"])
    u = inputs(8)
    window, advance = run_window("triton"), run_advance("triton")
    out, rows = window(jnp.asarray(u), w, state)
    for count in (0, 1, 3, 7):
        alone = state if count == 0 else None
        changed = u.copy()
        changed[count:] = 1e3 * np.random.default_rng(count).standard_normal(changed[count:].shape)
        other_out, other = window(jnp.asarray(changed), w, state)
        np.testing.assert_array_equal(other_out[:count], out[:count])
        poisoned = jax.tree.map(lambda x, count=count: x.at[count:].set(jnp.nan), other)
        found, expected = advance(state, poisoned, jnp.int32(count)), advance(state, rows, jnp.int32(count))
        for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(alone or expected), strict=True):
            np.testing.assert_array_equal(got, wanted)


def given(num_tokens: int = 2) -> dict[str, Any]:
    zeros = partial(jnp.zeros, dtype=jnp.float32)
    w, state = make(CASES["usual"])
    heads = zeros((num_tokens, VALUE_HEADS))
    return {
        "qkv": zeros((num_tokens, CHANNELS)), "gate": zeros((num_tokens, VALUE_HEADS * HEAD)), "alpha": heads,
        "beta": heads, "w": vectors(w), "memory": state.memory, "history": state.conv, "eps": EPS,
    }  # fmt: skip


def test_what_does_not_fit_is_named() -> None:
    fits = given()
    for changed, message in [
        (given(9), r"qkv is f32\[T, channels\] with T from 1 to 8, got float32\[9, 80\]"),
        ({"memory": jnp.zeros((6, 8, 4))}, r"memory is f32\[Hv, D, D\], got float32\[6, 8, 4\]"),
        ({"memory": jnp.zeros((6, 12, 12))}, "a head of 12 is no power of two"),
        ({"qkv": jnp.zeros((2, 88))}, r"88 channels are not \(2 Hk \+ 6\) x 8 with Hk a divisor of 6"),
        ({"gate": jnp.zeros((1, 48))}, r"gate is float32\[2, 48\], got float32\[1, 48\]"),
        ({"history": jnp.zeros((4, 80))}, r"history is float32\[3, 80\], got float32\[4, 80\]"),
        ({"beta": jnp.zeros((2, 6), jnp.bfloat16)}, r"beta is float32\[2, 6\], got bfloat16\[2, 6\]"),
        ({"backend": "mosaic"}, "backend='mosaic' is unknown"),
    ]:
        with pytest.raises(ValueError, match=message):
            gdn_window(**(fits | changed))
    rows = WindowRows(fits["qkv"], jnp.zeros((2, 2, 8)), jnp.zeros((2, 3, 8)), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"rows of float32\[2, 80\] and float32\[2, 3, 8\] are of another state"):
        gdn_advance(fits["memory"], fits["history"], rows, jnp.int32(1))
    assert head_problem(128) is None


def test_the_models_window_is_lowered_for_cuda_as_one_launch_each() -> None:
    num_tokens, g = 4, model_geometry("synthetic_full")
    num_keys, num_heads, width = g.gdn_key_heads, g.gdn_value_heads, g.gdn_head_dim
    channels = (2 * num_keys + num_heads) * width
    shape = lambda *dims, of=jnp.float32: jax.ShapeDtypeStruct(dims, of)  # noqa: E731
    heads = shape(num_tokens, num_heads)
    state = shape(num_heads, width, width), shape(g.conv_kernel - 1, channels)

    def window(qkv: Any, gate: Any, alpha: Any, beta: Any, memory: Any, history: Any, *w: Any) -> Any:
        return gdn_window(qkv, gate, alpha, beta, GdnVectors(*w), memory, history, EPS, backend="triton")

    text = lower_for_cuda(
        window, shape(num_tokens, channels), shape(num_tokens, num_heads * width), heads, heads, *state,
        shape(channels, g.conv_kernel), shape(num_heads), shape(num_heads), shape(width),
    )  # fmt: skip
    assert text.count("__gpu$xla.gpu.triton") == 1
    rows = (
        shape(num_tokens, channels), shape(num_tokens, num_keys, width), shape(num_tokens, num_heads, width), heads,
    )  # fmt: skip
    text = lower_for_cuda(
        lambda memory, history, count, *rows: gdn_advance(memory, history, WindowRows(*rows), count, backend="triton"),
        *state, shape(of=jnp.int32), *rows,
    )  # fmt: skip
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 2  # the state in place
