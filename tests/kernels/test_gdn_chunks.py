"""The gated delta net on prompts: kernels under interpretation and the reference, against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.gdn_chunks import chunk_problem, gdn_chunks
from strata_jax.presets import model_geometry
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
KEY_HEADS, VALUE_HEADS, HEAD, CHUNK, T = 2, 4, 128, 16, 48
TOLERANCE = 2e-5
ROUGH = 5e-3  # of outputs that are one TF32 product, on a GPU
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compile, not run


def inputs(*, hard: bool) -> list[np.ndarray]:
    """q, k, v, log_a, beta and the state; hard: one key for all tokens, beta 1, hardly any decay."""
    rng = np.random.default_rng(hard)
    q, k = (rng.standard_normal((T, KEY_HEADS, HEAD)) for _ in range(2))
    if hard:
        k[:] = k[0]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_a = -np.array([0.0, 1e-4, 0.02, 0.5]) * rng.uniform(0.5, 1.5, (T, VALUE_HEADS)) * (1.0 if hard else 4.0)
    beta = np.ones_like(log_a) if hard else rng.uniform(0.1, 0.9, log_a.shape)
    v = rng.standard_normal((T, VALUE_HEADS, HEAD))
    memory = 0.1 * rng.standard_normal((VALUE_HEADS, HEAD, HEAD))
    return [x.astype(np.float32) for x in (q, k, v, log_a, beta, memory)]


def recurrence(q: Any, k: Any, v: Any, log_a: Any, beta: Any, memory: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs f64[T, Hv, D] and the state after each number of tokens."""
    q, k, v, log_a, beta, memory = (np.asarray(x, np.float64) for x in (q, k, v, log_a, beta, memory))
    states, outs = [memory.copy()], []
    for t in range(T):
        state = states[-1] * np.exp(log_a[t])[:, None, None]
        key, query = (np.tile(x[t], (VALUE_HEADS // KEY_HEADS, 1)) for x in (k, q))
        delta = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", key, state))
        states.append(state + key[:, :, None] * delta[:, None, :])
        outs.append(np.einsum("hk,hkv->hv", query, states[-1]))
    return np.stack(outs), states


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_prompt_is_the_recurrence_up_to_its_count(backend: str) -> None:
    run = jax.jit(
        lambda *args: gdn_chunks(*args, chunk=CHUNK, backend=backend, interpret=INTERPRET), compiler_options=FAST
    )  # fmt: skip
    of_outputs = ROUGH if backend == "triton" and not INTERPRET else TOLERANCE
    for hard in (False, True):
        given = inputs(hard=hard)
        expected, states = recurrence(*given)
        for count in (0, 1, CHUNK - 1, CHUNK + 3, 2 * CHUNK, T):
            padded = [x.copy() for x in given]
            padded[2][count:] *= 1e3  # what follows must leave no trace
            for x in padded[:2]:
                x[count:] = np.roll(x[count:], 1, axis=-1)
            out, memory = run(*padded, jnp.int32(count))
            np.testing.assert_allclose(out[:count], expected[:count], atol=of_outputs)
            np.testing.assert_allclose(memory, states[count], atol=TOLERANCE, err_msg=f"{count} tokens, {hard}")


def test_what_does_not_fit_is_named() -> None:
    names = ("q", "k", "v", "log_a", "beta", "memory")
    fits: dict[str, Any] = dict(zip(names, map(jnp.asarray, inputs(hard=False)))) | {"count": jnp.int32(1)}
    for changed, message in [
        ({"memory": jnp.zeros((4, 16, 8))}, r"memory is f32\[Hv, D, D\], got float32\[4, 16, 8\]"),
        ({"memory": jnp.zeros((4, 8, 8))}, "a head of 8 is no power of two from 16 on"),
        ({"chunk": 32}, "48 tokens in chunks of 32: whole chunks of a power of two from 16 on"),
        ({"k": jnp.zeros((T, 3, HEAD))}, r"k is f32\[T, Hk, 128\] with Hk a divisor of 4, got float32\[48, 3, 128\]"),
        ({"v": jnp.zeros((T, 4, 64))}, r"v is float32\[48, 4, 128\], got float32\[48, 4, 64\]"),
        ({"backend": "mosaic"}, "backend='mosaic' is unknown"),
    ]:
        with pytest.raises(ValueError, match=message):
            gdn_chunks(**(fits | {"chunk": CHUNK} | changed))
    assert chunk_problem(128) is None
    assert chunk_problem(96) is not None


def test_the_models_prompt_is_lowered_for_cuda_as_two_launches() -> None:
    g = model_geometry("synthetic_full")
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    keys, width = shape((128, g.gdn_key_heads, g.gdn_head_dim)), g.gdn_head_dim
    values, heads = shape((128, g.gdn_value_heads, width)), shape((128, g.gdn_value_heads))
    text = lower_for_cuda(
        lambda *args: gdn_chunks(*args, chunk=64, backend="triton"), keys, keys, values, heads, heads,
        shape((g.gdn_value_heads, width, width)), jax.ShapeDtypeStruct((), jnp.int32),
    )  # fmt: skip
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert text.count("output_operand_alias<") == 1  # the state in place
