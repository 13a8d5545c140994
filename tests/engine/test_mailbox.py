"""The mailbox: a round finds what it was told, in the same place, and nothing that was meant for another one."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.host_copies import address
from strata_jax.engine.mailbox import Mailbox
from strata_jax.kernels.await_words import await_words

WORDS = np.arange(10, 16, dtype=np.int32)
look = jax.jit(await_words)


class Result:
    """Of a round: notes when it is waited for."""

    def __init__(self, mailbox: Mailbox, num_words: int = len(WORDS)) -> None:
        self.seen, self.mailbox, self.num_words = list[list[int]](), mailbox, num_words

    def block_until_ready(self) -> None:
        self.seen.append(np.asarray(self.mailbox.box(self.num_words))[1:].tolist())


def start(mailbox: Mailbox) -> Result:
    """A round that counts on, as rounds do."""
    result = Result(mailbox)
    mailbox.started(mailbox.turn + 1, result.num_words, result)
    return result


def test_a_program_finds_what_was_told_last_in_the_same_place() -> None:
    mailbox = Mailbox()
    box = mailbox.box(len(WORDS))
    assert box.sharding.memory_kind == "pinned_host"
    for added in range(3):
        assert not look(box, mailbox.turn).any()  # not told yet
        mailbox.tell(WORDS + added)
        assert mailbox.box(len(WORDS)) is box
        found = look(box, mailbox.turn)
        assert found.sharding.memory_kind == "device"
        np.testing.assert_array_equal(found, WORDS + added)
        start(mailbox)


def test_a_box_is_not_written_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its zeros may have to wait for what the device does; they would wipe out the first words."""
    put = jax.device_put

    class Late:
        """An array whose zeros come, once, when somebody waits for it."""

        def __init__(self, array: jax.Array) -> None:
            self.array, self.nbytes, self.there = array, array.nbytes, False

        def block_until_ready(self) -> None:
            pointer = self.array.unsafe_buffer_pointer()
            if not self.there:
                np.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(pointer), np.int32)[:] = 0
            self.there = True

        def addressable_data(self, index: int) -> jax.Array:
            return self.array.addressable_data(index)

    monkeypatch.setattr(jax, "device_put", lambda *args, **how: Late(put(*args, **how)))
    mailbox = Mailbox()
    mailbox.tell(WORDS)
    late: Any = mailbox.box(len(WORDS))
    monkeypatch.undo()
    late.block_until_ready()
    np.testing.assert_array_equal(look(late.array, mailbox.turn), WORDS)


def test_boxes_of_other_sizes_have_other_places_and_count_on() -> None:
    mailbox = Mailbox()
    sizes = (3, 6, 2)
    assert len({address(mailbox.box(size)) for size in sizes}) == 3
    for size in sizes:
        mailbox.tell(WORDS[:size])
        np.testing.assert_array_equal(look(mailbox.box(size), mailbox.turn), WORDS[:size])
        start(mailbox)
    mailbox.tell(np.zeros(6, np.int32))
    assert [int(np.asarray(mailbox.box(size))[0]) for size in sizes] == [1, 4, 3]


def test_numbers_begin_again_where_the_devices_do() -> None:
    mailbox = Mailbox(told=2**31 - 2, begun=2**31 - 2, _turn=jnp.full(1, 2**31 - 1, jnp.int32))
    for added in range(3):
        mailbox.tell(WORDS + added)
        np.testing.assert_array_equal(look(mailbox.box(len(WORDS)), mailbox.turn), WORDS + added)
        start(mailbox)
    assert int(mailbox.turn[0]) == 2 - 2**31


def test_a_round_that_was_started_first_is_told_next() -> None:
    mailbox = Mailbox()
    mailbox.tell(WORDS)
    start(mailbox)
    waiting = mailbox.turn
    start(mailbox)
    mailbox.tell(WORDS + 1)
    np.testing.assert_array_equal(look(mailbox.box(len(WORDS)), waiting), WORDS + 1)
    assert not look(mailbox.box(len(WORDS)), mailbox.turn).any()


def test_nothing_is_written_before_the_last_words_have_been_read() -> None:
    mailbox = Mailbox()
    mailbox.tell(WORDS)
    first = start(mailbox)
    second = start(mailbox)  # ahead: it cannot have read anything
    mailbox.tell(WORDS + 5)
    assert (first.seen, second.seen) == ([WORDS.tolist()], [])
    mailbox.tell(WORDS + 6)
    assert (len(first.seen), second.seen) == (1, [(WORDS + 5).tolist()])


def test_a_round_that_could_not_be_started_is_told_again() -> None:
    mailbox = Mailbox()
    mailbox.tell(WORDS)
    mailbox.tell(WORDS + 1)
    np.testing.assert_array_equal(look(mailbox.box(len(WORDS)), mailbox.turn), WORDS + 1)
    assert mailbox.turn.dtype == jnp.int32


def test_rounds_that_nobody_has_told_anything_are_told_nothing_and_waited_for() -> None:
    mailbox = Mailbox()
    mailbox.tell(WORDS)
    first, waiting = start(mailbox), [start(mailbox), start(mailbox)]
    mailbox.withdraw()
    assert mailbox.told == mailbox.begun == 3
    assert first.seen == [WORDS.tolist()]
    assert all(round.seen and not np.any(round.seen) for round in waiting)
    mailbox.withdraw()
    mailbox.tell(WORDS + 2)
    np.testing.assert_array_equal(look(mailbox.box(len(WORDS)), mailbox.turn), WORDS + 2)
