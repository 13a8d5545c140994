"""Experts copied into runs of pages: reference and interpreted kernel against numpy, the kernel lowered for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.kernels.page_fetch import fetch_pages, triton
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

EXPERTS, PAGE_WORDS = 6, 48
POISON = np.uint32(0xFFFFFFFF)
KERNELS = {
    "reference": partial(fetch_pages, backend="reference"),
    "interpreted": partial(fetch_pages, backend="triton", interpret=INTERPRET),
}


def bank(num_words: int) -> np.ndarray:
    return np.random.default_rng(num_words).integers(0, 2**31, (EXPERTS, num_words), dtype=np.uint32)


def fetched(kernel: Callable[..., Any], sizes: tuple[int, ...], words: np.ndarray, experts: list[int],
            pages: list[int], count: int) -> np.ndarray:  # fmt: skip
    """The arena's pages, poisoned before, after a call."""
    arrays = tuple(jnp.full((num, PAGE_WORDS), POISON) for num in sizes)
    args = jnp.array(experts, jnp.int32), jnp.array(pages, jnp.int32), jnp.array([count], jnp.int32)
    done = jax.jit(kernel, donate_argnums=0)(arrays, jnp.asarray(words), *args)
    return np.concatenate([np.asarray(x) for x in done])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "num_words"),
    [((12,), 3 * PAGE_WORDS), ((12,), 2 * PAGE_WORDS + 5), ((5, 4, 3), PAGE_WORDS + 17), ((12,), 7)],
)
def test_the_first_experts_fill_their_runs_and_nothing_else_changes(
    sizes: tuple[int, ...], num_words: int, name: str
) -> None:
    words, num_pages = bank(num_words), -(-num_words // PAGE_WORDS)
    pages = [6, 0, 9, 3]  # with three arrays: runs in the second, the first, the third, and one past the count
    found = fetched(KERNELS[name], sizes, words, [4, 1, 5, 2], pages, 3)
    left = np.ones(found.shape, bool)
    for expert, page in zip([4, 1, 5], pages):
        run = found[page : page + num_pages].reshape(-1)
        np.testing.assert_array_equal(run[:num_words], words[expert])
        assert (run[num_words:] == (0 if name == "reference" else POISON)).all()
        left[page : page + num_pages] = False
    assert (found[left] == POISON).all()
    assert (fetched(KERNELS[name], sizes, words, [4], [6], 0) == POISON).all()


def test_both_are_given_the_same_and_more_parts_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "NUM_PROGRAMS", 3)
    words = bank(2 * PAGE_WORDS)
    results = [fetched(kernel, (12,), words, [0, 3, 3], [2, 8, 0], 3) for kernel in KERNELS.values()]
    np.testing.assert_array_equal(*results)
    assert (results[0] == POISON).sum() == 6 * PAGE_WORDS


@pytest.mark.parametrize(("page_words", "run"), [(48, 16), (1280, 256), (69_632, 4096), (65_536, 4096)])
def test_parts_divide_a_page(page_words: int, run: int) -> None:
    assert triton.run_words(page_words) == run


def test_what_does_not_fit_is_refused() -> None:
    arena, one = jnp.zeros((4, 8), jnp.uint32), jnp.zeros(1, jnp.int32)
    words = jnp.zeros((2, 16), jnp.uint32)
    with pytest.raises(ValueError, match=r"of one page size, got \['uint32\[4, 8\]', 'uint32\[4, 16\]'\]"):
        fetch_pages((arena, jnp.zeros((4, 16), jnp.uint32)), words, one, one, one)
    with pytest.raises(ValueError, match=r"bank is u32\[X, blob_words\], got float32\[2, 16\]"):
        fetch_pages((arena,), words.astype(jnp.float32), one, one, one)
    with pytest.raises(ValueError, match=r"i32\[M\], got int32\[1\] and int32\[2\]"):
        fetch_pages((arena,), words, one, jnp.zeros(2, jnp.int32), one)
    with pytest.raises(ValueError, match=r"count is i32\[1\], got int32\[\]"):
        fetch_pages((arena,), words, one, one, jnp.int32(1))


def test_the_kernel_is_lowered_for_cuda_at_the_models_sizes_in_one_launch() -> None:
    def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    arrays = tuple(shape(pages, 67_584, dtype=jnp.uint32) for pages in (40_000, 64))
    words = shape(512, 545_280, dtype=jnp.uint32)
    text = lower_for_cuda(partial(fetch_pages, backend="triton"), arrays, words, shape(80), shape(80), shape(1))
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 2
