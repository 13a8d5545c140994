"""Where the kernels of these tests run: compiled on a GPU if JAX has one, else interpreted."""

from strata_jax.kernels.backend import interprets

INTERPRET = interprets()
