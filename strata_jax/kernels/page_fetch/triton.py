"""Pallas on Triton: a fixed number of programs, each of which takes the next part of a blob until all are copied.

Programs do not depend on how many experts there are, so a call without any costs a launch and nothing else.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.launch import launch

MAX_RUN_WORDS = 4096
NUM_PROGRAMS, NUM_WARPS = 264, 4  # two for each multiprocessor of an H200: 4 MiB on their way, the link needs far less


def run_words(page_words: int) -> int:
    """Return the words of one part, a power of two that divides a page."""
    return min(MAX_RUN_WORDS, page_words & -page_words)


def fetch_pages(
    bank: jax.Array,
    experts: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    *arrays: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See `strata_jax.kernels.page_fetch.fetch_pages`."""
    page_words, num_words = arrays[0].shape[1], bank.shape[1]
    run = run_words(page_words)
    firsts = (0, *accumulate(array.shape[0] for array in arrays))
    kernel = partial(_copy_parts, run=run, page_runs=page_words // run, num_words=num_words, firsts=firsts)
    lines = [array.reshape(-1, run) for array in arrays]
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lines)
    programs = min(NUM_PROGRAMS, experts.shape[0] * -(-num_words // run))
    call = launch(kernel, (programs,), out, NUM_WARPS, in_place=len(arrays), interpret=interpret)
    done = call(bank, experts, pages, count, *lines)
    return tuple(x.reshape(array.shape) for x, array in zip(done, arrays))


def _copy_parts(
    bank_ref: Any,  # u32[X, blob_words]
    experts_ref: Any,  # i32[M]
    pages_ref: Any,  # i32[M]
    count_ref: Any,  # i32[1]
    *array_refs: Any,  # u32[pages * page_runs, run] each, as operands and then as results
    run: int,
    page_runs: int,
    num_words: int,
    firsts: tuple[int, ...],
) -> None:
    parts = -(-num_words // run)
    words = jnp.arange(run)

    def copy(item: jax.Array, _: None) -> None:
        idx = jax.lax.div(item, jnp.int32(parts))
        part = item - idx * parts
        page = pages_ref[idx]
        source = bank_ref.at[experts_ref[idx], pl.ds(part * run, run)]
        whole = num_words % run == 0
        values = plt.load(source) if whole else plt.load(source, mask=part * run + words < num_words)
        for out_ref, first, end in zip(array_refs[len(firsts) - 1 :], firsts, firsts[1:]):

            def store(out_ref: Any = out_ref, first: int = first) -> None:
                target = out_ref.at[(page - first) * page_runs + part]
                plt.store(target, values, mask=None if whole else part * run + words < num_words)

            pl.when((page >= first) & (page < end))(store)

    first_item, items = pl.program_id(0), count_ref[0] * parts
    turns = jax.lax.div(items - first_item + pl.num_programs(0) - 1, pl.num_programs(0))
    jax.lax.fori_loop(0, turns, lambda turn, carry: copy(first_item + turn * pl.num_programs(0), carry), None)
