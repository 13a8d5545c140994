"""Words with the wanted number are found, all of them; without it there are zeros after a number of looks."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.mailbox import Mailbox
from strata_jax.kernels.await_words import await_words
from tests.kernels.lowering import lower_for_cuda
from tests.kernels.place import INTERPRET

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

KERNELS = {
    "reference": partial(await_words, backend="reference"),
    "interpreted": partial(await_words, backend="triton", interpret=INTERPRET, polls=3),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_words", [1, 7, 256, 700])
def test_words_are_found_by_their_number(num_words: int, name: str) -> None:
    words = np.random.default_rng(num_words).integers(-(2**31), 2**31, num_words).astype(np.int32)
    box = jnp.asarray(np.concatenate([[41], words]).astype(np.int32))
    find = jax.jit(KERNELS[name])
    np.testing.assert_array_equal(find(box, jnp.full(1, 41, jnp.int32)), words)
    for other in (40, 42, -42, 0):
        assert not find(box, jnp.full(1, other, jnp.int32)).any()


def test_the_kernel_looks_again_each_time() -> None:
    """Loads that a compiler may merge, or move out of the loop, would wait for nothing."""
    shapes = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    kernel = partial(await_words, backend="triton")
    assert "await_words" in lower_for_cuda(kernel, *shapes)
    loads = loads_of(jax.make_jaxpr(kernel)(*shapes).jaxpr)
    assert loads == {"pallas_call/while": [True], "pallas_call/cond": [True], "pallas_call": [False]}  # the number


def loads_of(jaxpr: Any, path: tuple[str, ...] = ()) -> dict[str, list[bool]]:
    """Whether the loads of a kernel are volatile, by the operations that they are in."""
    found = dict[str, list[bool]]()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("masked_load", "get"):
            found.setdefault("/".join(path), []).append(bool(eqn.params.get("is_volatile")))
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                found |= loads_of(inner, (*path, name))
    return found


@pytest.mark.parametrize(
    ("box", "number", "polls", "message"),
    [
        (jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), 1, r"i32\[1 \+ n\] with n from 1, got"),
        (jnp.zeros(4), jnp.zeros(1, jnp.int32), 1, "a box is i32"),
        (jnp.zeros(4, jnp.int32), jnp.int32(3), 1, r"the number is i32\[1\], got"),
        (jnp.zeros(4, jnp.int32), jnp.zeros(1, jnp.int32), 0, "polls=0"),
    ],
)
def test_what_does_not_fit_is_refused(box: jax.Array, number: jax.Array, polls: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await_words(box, number, polls=polls)


@pytest.mark.skipif(INTERPRET, reason="programs wait for words on a GPU only")
def test_a_program_on_a_gpu_waits_for_what_the_host_writes() -> None:
    mailbox = Mailbox()
    find = jax.jit(await_words)
    box, words = mailbox.box(700), np.arange(5, 705, dtype=np.int32)
    find(box, mailbox.turn).block_until_ready()  # compiled; it has given up
    for waits_s in (0.0, 0.001, 0.05):
        found = find(box, mailbox.turn)
        time.sleep(waits_s)
        assert waits_s == 0.0 or not found.is_ready()
        mailbox.tell(words)
        np.testing.assert_array_equal(found, words)
        mailbox.started(mailbox.turn + 1, len(words), found)
        words = words + 1
