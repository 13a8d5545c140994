"""The routed experts of a window in plain jnp: the oracle of the kernels, and what runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp

from strata_jax.kernels.expert_gemv.layout import ExpertLayout
from strata_jax.kernels.planes import decode_planes


def expert_window(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    arrays: Sequence[jax.Array],
    bank: jax.Array,
    pages: jax.Array,
    layout: ExpertLayout,
) -> jax.Array:
    """As `expert_gemv`; pair by pair in the order of ids."""
    num_experts, num_used = pages.shape[0], ids.shape[1]

    def step(pair: jax.Array, total: jax.Array) -> jax.Array:
        token, k = pair // num_used, pair % num_used
        expert = ids[token, k]

        def add(total: jax.Array) -> jax.Array:
            y = _expert(u[token], _blob(arrays, bank, pages, expert, layout), layout)
            return total.at[token].add(weights[token, k] * y)

        return jax.lax.cond(expert < num_experts, add, lambda total: total, total)

    return jax.lax.fori_loop(0, ids.size, step, jnp.zeros_like(u))


def _expert(x: jax.Array, words: jax.Array, layout: ExpertLayout) -> jax.Array:
    gate, up, down = (
        decode_planes(words[first : first + part.num_words], part) for first, part in zip(layout.firsts, layout.parts)
    )
    dot = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
    return dot(down, jax.nn.silu(dot(gate, x)) * dot(up, x))


def _blob(
    arrays: Sequence[jax.Array], bank: jax.Array, pages: jax.Array, expert: jax.Array, layout: ExpertLayout
) -> jax.Array:
    """The expert's words, from the arena if it is resident, else from the bank."""
    page = pages[expert]
    firsts = [0, *accumulate(array.shape[0] for array in arrays)]

    def read(array: jax.Array, first: int) -> jax.Array:
        num_pages = -(-layout.num_words // array.shape[1])
        run = jax.lax.dynamic_slice(array, (page - first, 0), (num_pages, array.shape[1]))
        return run.reshape(-1)[: layout.num_words]

    def fetch() -> jax.Array:
        words = jax.lax.dynamic_slice(bank, (expert, 0), (1, layout.num_words))[0]
        return jax.device_put(words, jax.memory.Space.Device)

    which = sum((page >= first).astype(jnp.int32) for first in firsts[:-1])
    return jax.lax.switch(which, [fetch, *(partial(read, array, first) for array, first in zip(arrays, firsts))])
