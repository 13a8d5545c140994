"""The metadata of a GGUF as a read-only mapping whose values are decoded on first use."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import numpy as np
from gguf.constants import GGUFValueType

from strata_jax.gguf.cursor import Buffer
from strata_jax.gguf.header import SCALAR_DTYPES, Value

_U64 = struct.Struct("<Q")


class Metadata(Mapping[str, object]):
    """Keys to int, float, bool or str; numeric arrays as read-only numpy arrays of their own width; strings as lists.

    Lengths and UTF-8 were checked when the header was parsed, so decoding cannot fail. The mapping keeps the file's
    pages alive, also after the file object was closed.
    """

    def __init__(self, buffer: Buffer, values: Mapping[str, Value]) -> None:
        self._buffer = buffer
        self._values = values
        self._decoded: dict[str, object] = {}

    def __getitem__(self, key: str) -> object:
        if key not in self._decoded:
            self._decoded[key] = _decode(self._buffer, self._values[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def type_of(self, key: str) -> str:
        """Return the stored type of `key`, for example ``uint32`` or ``string[248320]``, without decoding it."""
        return self._values[key].type_name

    def offset_of(self, key: str) -> int:
        """Return the byte in the file where the value of `key` starts."""
        return self._values[key].start

    def count_of(self, key: str) -> int | None:
        """Return the number of elements of an array without decoding it, or None for a scalar."""
        return self._values[key].count


def _decode(buffer: Buffer, value: Value) -> object:
    if value.kind is GGUFValueType.STRING:
        if value.count is not None:
            return _strings(buffer, value.start, value.count)
        (length,) = _U64.unpack_from(buffer, value.start)
        with memoryview(buffer) as view:  # no copy: a chat template is short, a hostile string need not be
            return str(view[value.start + 8 : value.start + 8 + length], "utf-8")
    dtype = np.dtype(SCALAR_DTYPES[value.kind])
    if value.count is None:
        return np.frombuffer(buffer, dtype, 1, value.start)[0].item()
    if value.count == 0:
        return np.empty(0, dtype)
    array = np.frombuffer(buffer, dtype, value.count, value.start).copy()
    array.flags.writeable = False
    return array


def _strings(buffer: Buffer, pos: int, count: int) -> list[str]:
    unpack = _U64.unpack_from
    strings: list[str] = []
    for _ in range(count):
        (length,) = unpack(buffer, pos)
        pos += 8
        strings.append(buffer[pos : pos + length].decode())
        pos += length
    return strings
