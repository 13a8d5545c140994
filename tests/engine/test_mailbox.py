"""The mailbox: programs find what was written last, in the same place."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from strata_jax.engine.host_copies import address
from strata_jax.engine.mailbox import Mailbox, on_device


def test_a_program_finds_what_was_written_last() -> None:
    mailbox = Mailbox()
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    array = mailbox.put("words", values)
    assert array.sharding.memory_kind == "pinned_host"
    read = jax.jit(lambda x: on_device(x) + 1)
    for added in range(3):
        assert mailbox.put("words", values + added) is array
        found = read(array)
        assert found.sharding.memory_kind == "device"
        np.testing.assert_array_equal(found, values + added + 1)


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
    mailbox.put("b", np.arange(8, dtype=np.int32)[::-2])
    assert jax.jit(on_device)(places[1]).tolist() == [7, 5, 3, 1]


def test_nothing_is_written_before_the_last_values_have_been_read() -> None:
    mailbox, seen = Mailbox(), list[list[int]]()
    array = mailbox.put("words", np.arange(3, dtype=np.int32))

    class Result:
        def block_until_ready(self) -> None:
            seen.append(jax.jit(on_device)(array).tolist())

    mailbox.read_before(Result())
    mailbox.put("words", np.arange(3, dtype=np.int32) + 5)
    mailbox.put("words", np.arange(3, dtype=np.int32) + 6)
    assert seen == [[0, 1, 2]]


def test_a_type_that_the_device_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match="words: int64 would become int32 on the device"):
        Mailbox().put("words", np.zeros(2, np.int64))
