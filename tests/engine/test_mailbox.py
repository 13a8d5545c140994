"""The mailbox: programs find what was written last, in the same place."""

from __future__ import annotations

import jax
import numpy as np

from strata_jax.engine.host_copies import address
from strata_jax.engine.mailbox import Mailbox, on_device


def test_a_program_finds_what_was_written_last() -> None:
    mailbox = Mailbox()
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    array = mailbox.put("words", values)
    assert array.sharding.memory_kind == "pinned_host"
    where, read = address(array), jax.jit(lambda x: on_device(x) + 1)
    for added in range(3):
        assert mailbox.put("words", values + added) is array
        found = read(array)
        assert found.sharding.memory_kind == "device"
        np.testing.assert_array_equal(found, values + added + 1)
    assert address(array) == where


def test_other_names_shapes_and_types_have_other_places() -> None:
    mailbox = Mailbox()
    values = np.arange(4, dtype=np.int32)
    places = [
        mailbox.put(name, x)
        for name, x in (("a", values), ("b", values), ("a", values[:2]), ("a", values.astype(np.uint8)))
    ]
    assert len({address(array) for array in places}) == 4
    mailbox.put("a", np.zeros(4, np.int32))
    assert [array.tolist() for array in places[1:]] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    mailbox.put("b", values + 5)
    values[:] = 9  # the caller's own array is not what programs read
    assert np.asarray(jax.jit(on_device)(places[1])).tolist() == [5, 6, 7, 8]
