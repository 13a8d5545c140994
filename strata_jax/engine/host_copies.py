"""Copies from host memory into device arrays that run beside the device's programs, on a stream of their own.

JAX copies whole arrays only, each into a new one. Here runs of bytes go straight from a pinned array into a place of an
array that exists, through the driver's own interface (CUDA driver API, `cuMemcpyHtoDAsync`), so that experts of any
choice fill one buffer whose bytes the plan knows. On a CPU the same copies are made at once.

JAX does not know of these writes: no program that reads the target may be running or queued when a copy starts, and
none may start before `wait` has returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax

from strata_jax.errors import ConfigError

Run = tuple[int, int, int]
"""Address of the target, address of the source, bytes."""

_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class HostCopies(Protocol):
    """Makes copies in the order in which they are started; those of one start have a number to ask for them by."""

    def start(self, number: int, runs: Iterable[Run]) -> None:
        """Queue copies under a number; those that had it before are done."""

    def done(self, number: int) -> bool:
        """Whether the copies of a number, or of none so far, are done."""

    def wait(self, number: int) -> None:
        """Return when they are done."""


def host_copies() -> HostCopies:
    """Return what copies to the first device.

    Raises:
        ConfigError: nothing here can copy beside its programs.
    """
    device = jax.devices()[0]
    return CopiesAtOnce() if device.platform == "cpu" else CudaCopies(_cuda(), device.local_hardware_id)


def address(array: jax.Array) -> int:
    """Return where the bytes of an array lie, once they are there: those to come would be written over others."""
    array.block_until_ready()
    return int(array.addressable_data(0).unsafe_buffer_pointer())


class CopiesAtOnce:
    """Copies in the host's own memory."""

    def start(self, number: int, runs: Iterable[Run]) -> None:
        for target, source, num_bytes in runs:
            ctypes.memmove(target, source, num_bytes)

    def done(self, number: int) -> bool:
        return True

    def wait(self, number: int) -> None:
        return


class CudaCopies:
    """Copies by the copy engine of an NVIDIA GPU, on one stream; an event follows the copies of each number."""

    def __init__(self, cuda: Any, ordinal: int) -> None:
        self.cuda, self.events = cuda, dict[int, ctypes.c_void_p]()
        self.context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        device = ctypes.c_int()
        self._check("cuInit", ctypes.c_uint(0))
        self._check("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        # the context that JAX uses; it is never given back, since arrays outlive this object
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        with self._current():
            self._check("cuStreamCreate", ctypes.byref(self.stream), ctypes.c_uint(_NON_BLOCKING))

    def start(self, number: int, runs: Iterable[Run]) -> None:
        with self._current():
            if number not in self.events:
                event = ctypes.c_void_p()
                self._check("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_DISABLE_TIMING))
                self.events[number] = event
            for target, source, num_bytes in runs:
                # sources are pinned: the call returns at once
                self._check(
                    "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_void_p(source),
                    ctypes.c_size_t(num_bytes), self.stream,
                )  # fmt: skip
            self._check("cuEventRecord", self.events[number], self.stream)

    def done(self, number: int) -> bool:
        if number not in self.events:
            return True
        with self._current():
            return self._check("cuEventQuery", self.events[number], fine=(0, _NOT_READY)) == 0

    def wait(self, number: int) -> None:
        if number in self.events:
            with self._current():
                self._check("cuEventSynchronize", self.events[number])

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context the thread's current one for a while."""
        self._check("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _check(self, name: str, *args: Any, fine: tuple[int, ...] = (0,)) -> int:
        result = int(getattr(self.cuda, name)(*args))
        if result not in fine:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()} ({result})")
        return result


def _cuda() -> Any:
    """The driver's library, which JAX has loaded before."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError(
        f"prefill.stage_mib: the CUDA driver's library ({' or '.join(_LIBRARIES)}) cannot be loaded. Set"
        " prefill.stage_mib=0"
    )
