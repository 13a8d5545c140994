"""Boxes in host memory in which the host tells rounds what to read, also such as have been started before.

A NumPy array given to a program is copied to the device first, and the program starts when the copy has: on an H200
(jax 0.11.2) a round of one token waits 0.25 ms longer for two arrays of 1.5 KB. A box is where it was in the round
before, in pinned memory, and a program that wants its words reads them itself (`kernels/await_words`): those of the
number that the device counts up to. JAX does not know of these writes, so nobody else may read a box.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine.host_copies import address


@dataclass
class Mailbox:
    """A box for each number of words: what the device is given, and the same bytes for the host to write.

    Attributes:
        told, begun: numbers of the last round that was told what to read, and of the last one that was started.
        turn: i32[1], the number that the next round to be started waits for; rounds write over it.
    """

    told: int = 0
    begun: int = 0
    _turn: jax.Array | None = None
    _boxes: dict[int, tuple[jax.Array, np.ndarray]] = field(default_factory=dict)
    _started: dict[int, tuple[int, Any]] = field(default_factory=dict)  # by number: its words, and a result

    @property
    def turn(self) -> jax.Array:
        if self._turn is None:
            self._turn = jnp.ones(1, jnp.int32)
        return self._turn

    def box(self, num_words: int) -> jax.Array:
        """The box i32[1 + num_words], in host memory."""
        if num_words not in self._boxes:
            where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
            array = jax.device_put(np.zeros(1 + num_words, np.int32), where, may_alias=False)
            memory = (ctypes.c_uint8 * array.nbytes).from_address(address(array))
            self._boxes[num_words] = array, np.frombuffer(memory, np.int32)
        return self._boxes[num_words][0]

    def tell(self, words: np.ndarray) -> None:
        """Tell a round its words i32[n]: the one that was started before it was told, or the next one to be."""
        jax.block_until_ready(self._started.pop(self.told, None))
        self.box(len(words))
        memory = self._boxes[len(words)][1]
        memory[1:] = words
        with threading.Lock():  # for the device, too, the words are there before their number is
            self.told = min(self.told, self.begun) + 1
        memory[:1] = np.array(self.told).astype(np.int32)  # which begins again where the device's does

    def started(self, turn: jax.Array, num_words: int, result: Any) -> None:
        """Note that the programs of a round of so many words have been started: the number after its own, and a result
        that is there once it is done."""
        self.begun += 1
        self._turn, self._started[self.begun] = turn, (num_words, result)

    def withdraw(self) -> None:
        """Tell rounds that were started, but not told what to read, to read nothing; returns when they are done."""
        while self.told < self.begun:
            num_words, result = self._started[self.told + 1]
            self.tell(np.zeros(num_words, np.int32))
            jax.block_until_ready(result)
