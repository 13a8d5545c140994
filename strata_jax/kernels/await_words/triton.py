"""One warp of a Pallas-Triton kernel that looks at the number until it is the wanted one, and then reads the words.

All loads of the box are volatile: a GPU keeps no copy of what they read, and makes them in their order. The words are
read only once a branch has seen their number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.launch import launch

_LANES = 256  # words a step: eight loads on their way for each thread of the warp


def await_words(box: jax.Array, number: jax.Array, polls: int, *, interpret: bool = False) -> jax.Array:
    """See `strata_jax.kernels.await_words.await_words`."""
    out = jax.ShapeDtypeStruct((box.shape[0] - 1,), jnp.int32)
    return launch(partial(_await, polls=polls), (1,), out, 1, interpret=interpret, name="await_words")(box, number)


def _await(
    box_ref: Any,  # i32[1 + n]
    number_ref: Any,  # i32[1]
    out_ref: Any,  # i32[n]
    *,
    polls: int,
) -> None:
    wanted, num_words = number_ref[0], out_ref.shape[0]

    def look(seen: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return plt.load(box_ref.at[jnp.int32(0)], volatile=True), seen[1] + 1

    found = jax.lax.while_loop(lambda seen: (seen[0] != wanted) & (seen[1] < polls), look, (~wanted, jnp.int32(0)))[0]

    @pl.when(found == wanted)
    def _() -> None:
        _each_part(num_words, lambda at, mask: plt.load(box_ref.at[1 + at], mask=mask, other=0, volatile=True), out_ref)

    @pl.when(found != wanted)
    def _() -> None:
        _each_part(num_words, lambda at, mask: jnp.zeros(at.shape, jnp.int32), out_ref)


def _each_part(num_words: int, words: Any, out_ref: Any) -> None:
    for first in range(0, num_words, _LANES):
        at = first + jnp.arange(_LANES, dtype=jnp.int32)
        mask = at < num_words
        plt.store(out_ref.at[at], words(at, mask), mask=mask)
