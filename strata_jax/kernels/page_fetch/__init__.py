"""Chosen experts of a block, copied from the bank into runs of pages of the arena, in place.

A copy of words: all implementations agree bit for bit. Bytes read from the bank and written to the arena: the blobs of
the chosen experts; nothing is computed, so the link decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form
from strata_jax.kernels.page_fetch import reference

__all__ = ["fetch_pages"]


def fetch_pages(
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    experts: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    *,
    backend: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Copy the first ``count`` of some experts; words of a last page beyond a blob keep their values on Triton.

    Args:
        arrays: of the arena, u32[pages, page_words], page numbers running through all of them; they become the result.
        bank: u32[X, blob_words]; on a GPU it may be in host memory.
        experts: i32[M]. pages: i32[M], the first page of each one's run, all of which lies in one array. No two of the
            first ``count`` runs share a page.
        count: i32[1].
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the Triton kernel in Pallas' interpreter, on any device.

    Raises:
        ValueError: shapes or types do not fit, or `backend` is unknown.
    """
    _check(arrays, bank, experts, pages, count)

    def on_triton(*operands: jax.Array) -> tuple[jax.Array, ...]:
        from strata_jax.kernels.page_fetch import triton

        return triton.fetch_pages(*operands, interpret=interpret)

    return on_backend(backend, on_triton, reference.fetch_pages, bank, experts, pages, count, *arrays)


def _check(
    arrays: Sequence[jax.Array], bank: jax.Array, experts: jax.Array, pages: jax.Array, count: jax.Array
) -> None:
    if not arrays or any(a.ndim != 2 or a.shape[1] != arrays[0].shape[1] or a.dtype != jnp.uint32 for a in arrays):
        raise ValueError(
            f"the arena is one or more arrays u32[pages, page_words] of one page size, got {[*map(form, arrays)]}"
        )
    if bank.ndim != 2 or bank.dtype != jnp.uint32:
        raise ValueError(f"bank is u32[X, blob_words], got {form(bank)}")
    if experts.ndim != 1 or experts.shape != pages.shape or experts.dtype != jnp.int32 or pages.dtype != jnp.int32:
        raise ValueError(f"experts and pages are i32[M], got {form(experts)} and {form(pages)}")
    if count.shape != (1,) or count.dtype != jnp.int32:
        raise ValueError(f"count is i32[1], got {form(count)}")
