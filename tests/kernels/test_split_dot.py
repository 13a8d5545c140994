"""Products of cut operands: how exact each number of parts is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.split_dot import split_dot


@pytest.mark.parametrize(("num_parts", "least", "most"), [(1, 2**-12, 2**-7), (2, 2**-21, 2**-16), (3, 0.0, 2**-20)])
def test_bits_that_count(num_parts: int, least: float, most: float) -> None:
    """The error as a part of the sum of magnitudes, for operands of very different size and both signs."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape) for shape in ((32, 64), (48, 64)))
    a, b = a.astype(np.float32), b.astype(np.float32)
    found = jax.jit(lambda a, b: split_dot(a, b, (((1,), (1,)), ((), ())), num_parts))(jnp.asarray(a), jnp.asarray(b))
    exact, magnitudes = a.astype(np.float64) @ b.T.astype(np.float64), np.abs(a) @ np.abs(b).T
    assert least <= (np.abs(found - exact) / magnitudes).max() < most
