"""Arrays in host memory that the host writes over, and that programs find as they were written last.

A NumPy array given to a program is copied to the device first, and the program starts when the copy has: on an H200
(jax 0.11.2) a round of one token waits 0.25 ms longer for two arrays of 1.5 KB. An array of the mailbox is where it was
in the round before, in pinned memory; a program that wants it copies it itself.

JAX does not know of these writes. Whoever has started the programs that read the values names a result of the last one
(`read_before`), which the next write waits for. Nobody else may read the arrays: JAX would keep what it has seen.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from strata_jax.engine.host_copies import address


@dataclass
class Mailbox:
    """Arrays by name, shape and dtype: what the device is given, and the same bytes for the host to write."""

    arrays: dict[tuple[str, tuple[int, ...], np.dtype[Any]], tuple[jax.Array, np.ndarray]] = field(default_factory=dict)
    _result: Any = None

    def put(self, name: str, values: np.ndarray) -> jax.Array:
        """Write values over those of that name, shape and dtype; returns the array in host memory that has them.

        Raises:
            ValueError: JAX has no arrays of this dtype, as of 64 bits unless it is told so.
        """
        result, self._result = self._result, None
        jax.block_until_ready(result)
        key = name, values.shape, values.dtype
        if key not in self.arrays:
            where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
            array = jax.device_put(np.zeros_like(values), where, may_alias=False)
            if array.dtype != values.dtype:
                raise ValueError(f"{name}: {values.dtype} would become {array.dtype} on the device")
            memory = (ctypes.c_uint8 * array.nbytes).from_address(address(array))
            self.arrays[key] = array, np.frombuffer(memory, values.dtype).reshape(values.shape)
        array, memory_of_it = self.arrays[key]
        memory_of_it[...] = values
        return array

    def read_before(self, result: Any) -> None:
        """Note that all of the mailbox has been read once this result of a program is there."""
        self._result = result


def on_device(array: jax.Array) -> jax.Array:
    """Within a program: the array in device memory."""
    return jax.device_put(array, jax.memory.Space.Device)
