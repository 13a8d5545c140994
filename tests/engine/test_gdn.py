"""The gated delta net against its recurrence, token by token in float64, as the model's description has it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import gdn
from strata_jax.engine.matrix import Matrix
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from tests.oracle.models import ModelStore

WIDTH, KEY_HEADS, VALUE_HEADS, HEAD = 12, 2, 6, 8
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
TAPS = 4
TOLERANCE = 2e-5  # of outputs of size 1; float32 sums of 130 terms
WINDOW = jax.jit(gdn.window, static_argnames="g")
PREFILL = jax.jit(gdn.prefill, static_argnames="g")
ADVANCE = jax.jit(gdn.advance)
INVERSE = jax.jit(gdn._unit_lower_inverse)


@dataclass(frozen=True)
class Case:
    """How hard the recurrence is made.

    Attributes:
        log_a: as ``ssm_a``, the factor of log decay: 0 keeps everything, -16 is the strongest usual one.
        beta: added to the pre-sigmoid beta; 20 makes it 1.
        same_keys: every token has the same key: the matrix I + M is then all ones below the diagonal.
        tolerance: decay between two tokens is a difference of running sums, so it loses what the sums lose.
    """

    log_a: tuple[float, ...] = (-0.02, -0.1, -0.5, -1.0, -4.0, -0.001)
    beta: float = 0.0
    same_keys: bool = False
    tolerance: float = TOLERANCE


CASES = {
    "usual": Case(),
    "nothing is forgotten": Case(log_a=(0.0,) * 6),
    "much is forgotten": Case(log_a=(-16.0, -20.0, -8.0, -16.0, -12.0, -16.0), tolerance=5e-5),
    "beyond any model": Case(log_a=(0.0, -1e4, -1e-7, -80.0, -0.01, -500.0), tolerance=5e-3),
    "beta 1 and one key": Case(log_a=(0.0, -1e-4, -0.02, 0.0, -1e-6, -1.0), beta=20.0, same_keys=True),
    "beta near 1 and one key": Case(log_a=(0.0, -1e-4, -0.02, 0.0, -1e-6, -1.0), beta=4.0, same_keys=True),
}


def make(case: Case, seed: int = 0) -> tuple[gdn.GdnWeights, gdn.GdnState]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, scale: float = 1.0) -> Matrix:
        values = rng.standard_normal((rows, WIDTH)) * scale / WIDTH**0.5
        return Matrix(jnp.asarray(values, jnp.float32), "F32", WIDTH)

    qkv = np.asarray(matrix(CHANNELS, 2.0).data).copy()
    conv = rng.standard_normal((CHANNELS, TAPS)).astype(np.float32)
    beta = np.asarray(matrix(VALUE_HEADS).data).copy()
    if case.same_keys:  # the last input is 1: keys depend on it alone, and beta is shifted by it
        keys = slice(KEY_HEADS * HEAD, 2 * KEY_HEADS * HEAD)
        qkv[keys] = 0
        qkv[keys, -1] = rng.standard_normal(KEY_HEADS * HEAD)
        conv[keys, :-1] = 0
    beta[:, -1] += case.beta
    weights = gdn.GdnWeights(
        qkv=Matrix(jnp.asarray(qkv), "F32", WIDTH),
        gate=matrix(VALUE_HEADS * HEAD),
        conv=jnp.asarray(conv),
        beta=Matrix(jnp.asarray(beta), "F32", WIDTH),
        alpha=matrix(VALUE_HEADS),
        dt_bias=jnp.asarray(rng.standard_normal(VALUE_HEADS), jnp.float32),
        a=jnp.asarray(case.log_a, jnp.float32),
        norm=jnp.asarray(1 + 0.1 * rng.standard_normal(HEAD), jnp.float32),
        out=Matrix(
            jnp.asarray(rng.standard_normal((WIDTH, VALUE_HEADS * HEAD)) / (VALUE_HEADS * HEAD) ** 0.5, jnp.float32),
            "F32",
            VALUE_HEADS * HEAD,
        ),
    )
    memory = rng.standard_normal((VALUE_HEADS, HEAD, HEAD)) * 0.3
    history = rng.standard_normal((TAPS - 1, CHANNELS))
    return weights, gdn.GdnState(jnp.asarray(memory, jnp.float32), jnp.asarray(history, jnp.float32))


def inputs(num_tokens: int, seed: int = 1) -> np.ndarray:
    u = np.random.default_rng([seed, num_tokens]).standard_normal((num_tokens, WIDTH)).astype(np.float32)
    u[:, -1] = 1.0
    return u


def recurrence(
    u: np.ndarray, w: gdn.GdnWeights, state: gdn.GdnState, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs f64[T, E], memory after each token f64[T + 1, Hv, D, D], convolution inputs f64[taps - 1 + T, .]."""
    f64 = partial(np.asarray, dtype=np.float64)
    u = f64(u)
    x = np.concatenate([f64(state.conv), u @ f64(w.qkv.data).T])
    memory, outs, memories = f64(state.memory).copy(), [], [f64(state.memory)]
    for t in range(len(u)):
        c = sum(f64(w.conv)[:, j] * x[t + j] for j in range(TAPS))
        c = c * _sigmoid(c)
        q, k, v = np.split(c, [KEY_HEADS * HEAD, 2 * KEY_HEADS * HEAD])
        q, k = q.reshape(KEY_HEADS, HEAD), k.reshape(KEY_HEADS, HEAD)
        q = q / np.sqrt((q**2).sum(-1, keepdims=True) + eps) / np.sqrt(HEAD)
        k = k / np.sqrt((k**2).sum(-1, keepdims=True) + eps)
        beta = _sigmoid(f64(w.beta.data) @ u[t])
        decay = np.exp(f64(w.a) * np.logaddexp(0, f64(w.alpha.data) @ u[t] + f64(w.dt_bias)))
        heads = []
        for h in range(VALUE_HEADS):
            key, query, value = k[h % KEY_HEADS], q[h % KEY_HEADS], v.reshape(VALUE_HEADS, HEAD)[h]
            memory[h] *= decay[h]
            memory[h] += np.outer(key, beta[h] * (value - memory[h].T @ key))
            o = memory[h].T @ query
            heads.append(f64(w.norm) * o / np.sqrt((o**2).mean() + eps))
        gated = np.concatenate(heads) * _sigmoid(f64(w.gate.data) @ u[t])
        outs.append(f64(w.out.data) @ gated)
        memories.append(memory.copy())
    return np.stack(outs), np.stack(memories), x


@pytest.fixture(scope="module")
def geometry(models: ModelStore) -> Geometry:
    """A real geometry with the widths of these tests."""
    g = Geometry.from_gguf(open_gguf(models.synthetic("nano", 0)))
    return replace(
        g, embed_width=WIDTH, gdn_key_heads=KEY_HEADS, gdn_value_heads=VALUE_HEADS, gdn_head_dim=HEAD, conv_kernel=TAPS
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, 62, 64])
def test_window_equals_the_recurrence_and_advances_by_any_count(num_tokens: int, name: str, geometry: Geometry) -> None:
    case = CASES[name]
    w, state = make(case)
    u = inputs(num_tokens)
    out, memories, conv = recurrence(u, w, state, geometry.rms_eps)
    found, rows = WINDOW(jnp.asarray(u), w, state, g=geometry)
    np.testing.assert_allclose(found, out, atol=case.tolerance)
    for count in range(num_tokens + 1):
        after = ADVANCE(state, rows, jnp.int32(count))
        np.testing.assert_allclose(after.memory, memories[count], atol=case.tolerance, err_msg=f"after {count}")
        np.testing.assert_allclose(after.conv, conv[count : count + TAPS - 1], atol=case.tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_tokens", [64, 192])
def test_prompt_chunks_equal_the_recurrence_up_to_their_count(num_tokens: int, name: str, geometry: Geometry) -> None:
    case = CASES[name]
    w, state = make(case)
    u = inputs(num_tokens)
    out, memories, conv = recurrence(u, w, state, geometry.rms_eps)
    for count in {num_tokens, num_tokens - 1, 1, 63, num_tokens // 2 + 1, min(num_tokens, 130)}:
        padded = u.copy()
        padded[count:] = 1e3 * np.random.default_rng(count).standard_normal(padded[count:].shape)  # must leave no trace
        found, after = PREFILL(jnp.asarray(padded), w, state, jnp.int32(count), g=geometry)
        np.testing.assert_allclose(found[:count], out[:count], atol=case.tolerance, err_msg=f"{count} tokens")
        np.testing.assert_allclose(after.memory, memories[count], atol=case.tolerance, err_msg=f"{count} tokens")
        np.testing.assert_allclose(after.conv, conv[count : count + TAPS - 1], atol=case.tolerance)


def test_windows_one_after_the_other_equal_one_recurrence(geometry: Geometry) -> None:
    w, state = make(CASES["usual"])
    u = inputs(130)
    out, memories, _ = recurrence(u, w, state, geometry.rms_eps)
    first, found = 0, []
    for size in (1, 2, 62, 1, 64):
        part, rows = WINDOW(jnp.asarray(u[first : first + size]), w, state, g=geometry)
        state, first = ADVANCE(state, rows, jnp.int32(size)), first + size
        found.append(np.asarray(part))
    assert first == 130
    np.testing.assert_allclose(np.concatenate(found), out, atol=TOLERANCE)
    np.testing.assert_allclose(state.memory, memories[-1], atol=TOLERANCE)


def test_state_before_the_first_token_is_zero_and_of_the_models_size(models: ModelStore) -> None:
    g = Geometry.from_gguf(open_gguf(models.synthetic("nano", 0)))
    state = gdn.empty_state(g)
    assert state.memory.shape == (4, 32, 32)
    assert state.conv.shape == (3, (2 * 2 + 4) * 32)
    assert not any(np.asarray(x).any() for x in (state.memory, state.conv))


@pytest.mark.parametrize("n", [1, 2, 8, 9, 31, 64])
def test_inverse_of_unit_lower_triangles(n: int) -> None:
    rng = np.random.default_rng(n)
    m = np.tril(rng.uniform(-0.5, 0.5, (3, 2, n, n)), -1)
    m[0, 1] = np.tril(np.ones((n, n)), -1)  # beta 1, one key, no decay: the inverse is a bidiagonal matrix of 1 and -1
    m[1, 0] = 0
    found = np.asarray(INVERSE(jnp.asarray(m, jnp.float32)))
    expected = np.linalg.inv(np.eye(n) + m)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(found[0, 1], np.eye(n) - np.eye(n, k=-1), atol=1e-6)
    assert not np.triu(found, 1).any()
    above = jnp.asarray(m + np.triu(np.full((n, n), 9.0), 1), jnp.float32)
    lower_only = np.asarray(INVERSE(jnp.tril(above, -1)))
    np.testing.assert_array_equal(lower_only, found)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
