"""Runs of words out of pages that lie in one of two arrays: an arena on the device, or a store in host memory.

XLA refuses gathers from host memory beside a GPU, so there a Pallas kernel reads each run where it lies. The result is
a copy of words: all implementations agree bit for bit.
"""

from __future__ import annotations

from typing import Literal

import jax

from strata_jax.kernels.cell_gather import triton
from strata_jax.kernels.cell_gather.reference import gather_runs as reference_runs

__all__ = ["gather_runs"]

Implementation = Literal["reference", "triton"]


def gather_runs(
    arena: jax.Array,
    store: jax.Array,
    page: jax.Array,
    row: jax.Array,
    first_word: jax.Array,
    num_words: int,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Read runs of ``num_words`` words.

    Args:
        arena: u32[P, W].
        store: u32[M, W], in host memory beside a GPU.
        page: i32[...], the page of the arena with the run, -1 = it lies in the store.
        row: i32[...], the row of the store that it lies in then, 0 to M - 1 in any case.
        first_word: i32[...], where in the page or row it begins; runs end within them.
        num_words: static.
        implementation: None: Triton on a GPU, the reference elsewhere.

    Returns:
        u32[..., num_words].
    """
    if implementation is None:
        implementation = "triton" if jax.default_backend() == "gpu" else "reference"
    read = {"reference": reference_runs, "triton": triton.gather_runs}[implementation]
    return read(arena, store, page, row, first_word, num_words)
