"""Products with float matrices for a GPU against float64, and what they become there."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels import float_matmul as products
from strata_jax.kernels.float_matmul import float_matmul
from tests.kernels.lowering import lower_for_cuda

COLS = 320
TYPES = [jnp.float32, jnp.float16, jnp.bfloat16]


def operands(num_rows: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """f32[num_rows, COLS] and a matrix [48, COLS], of very different size and both signs."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, COLS)) * 10.0 ** rng.integers(-2, 3, (n, COLS)) for n in (num_rows, 48))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32).astype(dtype)


def error(x: jax.Array, w: jax.Array, *, rounded: bool) -> float:
    """Largest error as a part of the sum of magnitudes."""
    found = jax.jit(partial(float_matmul, rounded=rounded))(x, w)
    a, b = np.asarray(x, np.float64), np.asarray(w, np.float64)
    assert found.dtype == jnp.float32
    return float((np.abs(found - a @ b.T) / (np.abs(a) @ np.abs(b).T)).max())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 70])
def test_as_exact_as_float32(num_rows: int, dtype: Any) -> None:
    assert error(*operands(num_rows, dtype), rounded=False) < 2**-20


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [4, 32])
def test_a_large_matrix_too(num_rows: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CACHED_WEIGHTS", 0)
    assert error(*operands(num_rows, dtype), rounded=True) < 2**-20


@pytest.mark.parametrize("dtype", TYPES)
def test_many_rows_may_be_rounded(dtype: Any) -> None:
    assert error(*operands(32, dtype), rounded=True) < 2**-20
    assert 2**-14 < error(*operands(33, dtype), rounded=True) < 2**-7


@pytest.mark.parametrize(
    ("num_rows", "dtype", "rounded", "multiplications"),
    [(4, jnp.float32, False, 0), (2048, jnp.float32, False, 6), (2048, jnp.float16, False, 5),
     (2048, jnp.bfloat16, False, 3), (2048, jnp.bfloat16, True, 1), (2048, jnp.float32, True, 1)],
)  # fmt: skip
def test_bfloat16_operands_and_no_others_reach_a_gpus_products(
    num_rows: int, dtype: Any, rounded: bool, multiplications: int
) -> None:
    """Counted in products of all rows with the matrix."""
    x, w = jax.ShapeDtypeStruct((num_rows, 2560), jnp.float32), jax.ShapeDtypeStruct((512, 2560), dtype)
    text = lower_for_cuda(partial(float_matmul, rounded=rounded), x, w)
    dots = re.findall(r"dot_general.*: \(tensor<(\d+)x2560x(\w+)>, tensor<(\d+)x2560x(\w+)>\)", text)
    assert len(dots) == text.count("dot_general")
    assert all(a == b == "bf16" for _, a, _, b in dots)
    assert sum(int(m) * int(n) for m, _, n, _ in dots) == multiplications * num_rows * 512
