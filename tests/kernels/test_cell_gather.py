"""Runs of words from an arena or a host store: reference against numpy, kernel interpreted, kernel lowered for CUDA."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.cell_gather import gather_runs, triton
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

NUM_PAGES, NUM_ROWS, WORDS = 7, 9, 300
POISON = np.uint32(0xFFFFFFFF)


def arrays(shape: tuple[int, ...], num_words: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Arena and store of different words; pages (half of them -1), rows and places of runs."""
    rng = np.random.default_rng(seed)
    arena = rng.integers(0, 2**31, (NUM_PAGES, WORDS), dtype=np.uint32)
    store = rng.integers(2**31, 2**32 - 1, (NUM_ROWS, WORDS), dtype=np.uint32)
    page = np.where(rng.random(shape) < 0.5, -1, rng.integers(0, NUM_PAGES, shape)).astype(np.int32)
    row, first = rng.integers(0, NUM_ROWS, shape), rng.integers(0, WORDS + 1 - num_words, shape)
    return arena, store, page, row.astype(np.int32), first.astype(np.int32)


def expected(arena: np.ndarray, store: np.ndarray, page: np.ndarray, row: np.ndarray, first: np.ndarray, num_words: int
             ) -> np.ndarray:  # fmt: skip
    places = zip(page.reshape(-1), row.reshape(-1), first.reshape(-1), strict=True)
    runs = [(store[r] if p < 0 else arena[p])[f : f + num_words] for p, r, f in places]
    return np.stack(runs).reshape(*page.shape, num_words)


CASES = [((1,), 1), ((5,), 3), ((2, 4), 48), ((3, 2, 2), 129), ((2,), WORDS)]


@pytest.mark.parametrize("kernel", ["reference", "interpreted"])
@pytest.mark.parametrize(("shape", "num_words"), CASES)
def test_every_run_comes_from_where_the_table_says(shape: tuple[int, ...], num_words: int, kernel: str) -> None:
    args = arrays(shape, num_words)
    given = tuple(map(jnp.asarray, args))
    found = (
        gather_runs(*given, num_words, implementation="reference")
        if kernel == "reference"
        else triton.gather_runs(*given, num_words, interpret=INTERPRET)
    )
    np.testing.assert_array_equal(found, expected(*args, num_words))


@pytest.mark.parametrize("kernel", ["reference", "interpreted"])
def test_nothing_else_is_returned(kernel: str) -> None:
    """Words that no run covers are poison, and so are the rows of runs in the arena and the pages of the others."""
    arena, store, page, row, first = arrays((6,), 37, seed=3)
    page[:2], page[2:] = (4, 1), -1
    clean = expected(arena, store, page, row, first, 37)
    only_arena, only_store = np.full_like(arena, POISON), np.full_like(store, POISON)
    for p, r, f in zip(page, row, first, strict=True):
        (only_arena[p] if p >= 0 else only_store[r])[f : f + 37] = (arena[p] if p >= 0 else store[r])[f : f + 37]
    given = tuple(map(jnp.asarray, (only_arena, only_store, page, row, first)))
    read = gather_runs if kernel == "reference" else triton.gather_runs
    options = {"implementation": "reference"} if kernel == "reference" else {"interpret": INTERPRET}
    np.testing.assert_array_equal(read(*given, 37, **options), clean)  # type: ignore[operator]


@pytest.mark.parametrize("num_runs", [1, 24, 20_000])
@pytest.mark.parametrize("num_words", [1, 3, 127, 128, 528, 8448])
def test_blocks_are_powers_of_two_within_a_run(num_runs: int, num_words: int) -> None:
    block = triton.block_words(num_runs, num_words)
    assert block & (block - 1) == 0
    assert min(num_words, triton.MIN_BLOCK_WORDS) < 2 * block <= 2 * min(num_words, triton.MAX_BLOCK_WORDS)


def test_the_kernel_is_lowered_for_cuda_without_a_gpu() -> None:
    args = tuple(map(jnp.asarray, arrays((2, 4), 48)))
    with _abstract_gpu():
        traced = jax.jit(lambda *args: triton.gather_runs(*args, 48)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1


def _abstract_gpu() -> contextlib.AbstractContextManager[object]:
    """From jax 0.11 on a kernel must be told which GPU it is lowered for."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))
