"""Parse the header of one GGUF file: metadata entries and tensor records, every length checked before it is used.

Memory: nothing is decoded here but keys and tensor names. A metadata entry only remembers where its bytes lie, so a
hostile count or length costs a comparison, never an allocation. Format: GGUF versions 2 and 3, little endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGUFValueType

from strata_jax.errors import FormatError
from strata_jax.gguf.cursor import Buffer, Cursor
from strata_jax.gguf.sniff import GGUF_MAGIC, SNIFF_BYTES, describe_start
from strata_jax.gguf.tensors import TensorInfo, place_tensors, read_tensors

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Python objects outweigh the bytes of an entry: about 1 KB per tensor, 4 bytes per character of a key. The bounds keep
# a hostile header's cost below 64 MB. A real qwen4exp file has 1,256 tensors and about 60 keys of 60 bytes.
MAX_TENSORS = 32_768
MAX_KEYS = 8_192
MAX_KEY_BYTES = 1_024
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dimensions, one dimension, type, offset
_MIN_KEY_BYTES = 8 + 1 + 4 + 1

SCALAR_DTYPES: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class Value:
    """Where one metadata value lies. `count` is None for a scalar, else the number of array elements."""

    kind: GGUFValueType
    count: int | None
    start: int

    @property
    def type_name(self) -> str:
        name = self.kind.name.lower()
        return name if self.count is None else f"{name}[{self.count}]"


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the tensor data of one file."""

    version: int
    values: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    shard_idx: int


def parse_header(buffer: Buffer, file_bytes: int, path: Path) -> Header:
    """Parse the header at the start of `buffer`; reads no byte of the data section.

    `file_bytes` is the size of the whole file, against which tensors are checked. Raises FormatError.
    """
    cursor = Cursor(buffer, path)
    version = _check_start(cursor)
    num_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES, MAX_TENSORS)
    num_keys = cursor.count("key count", _MIN_KEY_BYTES, MAX_KEYS)
    values: dict[str, Value] = {}
    for idx in range(num_keys):
        start = cursor.pos
        key = cursor.name(f"key {idx} of {num_keys}", MAX_KEY_BYTES)
        if key in values:
            cursor.fail(f"key {key!r} appears twice, first with a value at byte {values[key].start}", start)
        values[key] = _read_value(cursor, key)
    alignment = _alignment(cursor, values)
    shard_idx = read_scalar_int(buffer, values, "split.no", path) if _is_split(buffer, values, path) else 0
    records = read_tensors(cursor, num_tensors)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = place_tensors(
        cursor, records, data_start=data_start, alignment=alignment, shard_idx=shard_idx, file_bytes=file_bytes
    )
    return Header(version, values, tensors, data_start, shard_idx)


def read_scalar_int(buffer: Buffer, values: dict[str, Value], key: str, path: Path) -> int:
    """Return the scalar integer `key` of any width. Raises FormatError if it is missing or something else."""
    value = values.get(key)
    if value is None:
        raise FormatError(f"{path}: key {key!r} is missing; expected an integer")
    if value.count is not None or SCALAR_DTYPES.get(value.kind, "?")[1:2] not in ("u", "i"):
        raise FormatError(
            f"{path}: key {key!r} at byte {value.start} is a {value.type_name}; expected an integer of any width"
        )
    return int(np.frombuffer(buffer, SCALAR_DTYPES[value.kind], 1, value.start)[0])


def _check_start(cursor: Cursor) -> int:
    """Check magic, byte order and version; return the version."""
    start = bytes(cursor.buffer[:SNIFF_BYTES])
    if start[:4] != GGUF_MAGIC and start[:4] != GGUF_MAGIC[::-1]:
        cursor.fail(f"not a GGUF file of {cursor.end} bytes: {describe_start(start)}", 0)
    cursor.need(4, "the magic")
    version = cursor.u32("the version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if start[:4] == GGUF_MAGIC[::-1] or (version > 0xFFFF and swapped <= 0xFFFF):
        cursor.fail(
            f"this is a big-endian GGUF (version {min(version, swapped)} in swapped byte order); only little-endian "
            f"files are read. `gguf-convert-endian FILE little` of the gguf package converts it in place",
            4,
        )
    if version == 1:
        cursor.fail(
            "this is a GGUF of version 1, whose lengths are 32-bit; versions 2 and 3 are read. Convert it again", 4
        )
    if version not in VERSIONS:
        cursor.fail(f"this is a GGUF of version {version}; versions 2 and 3 are read", 4)
    return version


def _read_value(cursor: Cursor, key: str) -> Value:
    kind = _value_type(cursor, f"key {key!r}")
    count = None
    if kind is GGUFValueType.ARRAY:
        at = cursor.pos
        kind = _value_type(cursor, f"the elements of key {key!r}")
        if kind is GGUFValueType.ARRAY:
            cursor.fail(
                f"key {key!r} is an array of arrays, which is not read; expected numbers, booleans or strings", at
            )
        at = cursor.pos
        count = cursor.u64(f"the length of key {key!r}")
        width = 8 if kind is GGUFValueType.STRING else np.dtype(SCALAR_DTYPES[kind]).itemsize
        if count * width > cursor.end - cursor.pos:
            cursor.fail(
                f"key {key!r} has {count} elements of at least {width} bytes: {count * width} bytes, but "
                f"{cursor.end - cursor.pos} are left in the file of {cursor.end}",
                at,
            )
    start = cursor.pos
    number = 1 if count is None else count
    if kind is GGUFValueType.STRING:
        cursor.skip_strings(number, f"key {key!r}")
        return Value(kind, count, start)
    dtype = np.dtype(SCALAR_DTYPES[kind])
    cursor.need(number * dtype.itemsize, f"key {key!r}")
    if kind is GGUFValueType.BOOL and number:
        bits = np.frombuffer(cursor.buffer, np.uint8, number, start)
        if bits.max() > 1:
            bad = int(np.argmax(bits > 1))
            cursor.fail(f"key {key!r}: boolean {bad} is stored as {bits[bad]}; expected 0 or 1", start + bad)
    return Value(kind, count, start)


def _value_type(cursor: Cursor, what: str) -> GGUFValueType:
    at = cursor.pos
    number = cursor.u32(f"the type of {what}")
    if number not in GGUFValueType._value2member_map_:
        cursor.fail(f"{what} has value type {number}; expected 0 to {max(GGUFValueType)}", at)
    return GGUFValueType(number)


def _alignment(cursor: Cursor, values: dict[str, Value]) -> int:
    if "general.alignment" not in values:
        return DEFAULT_ALIGNMENT
    alignment = read_scalar_int(cursor.buffer, values, "general.alignment", cursor.path)
    if not (0 < alignment <= 1 << 30 and alignment & (alignment - 1) == 0):
        at = values["general.alignment"].start
        cursor.fail(f"general.alignment is {alignment}; expected a power of two from 1 to {1 << 30}", at)
    return alignment


def _is_split(buffer: Buffer, values: dict[str, Value], path: Path) -> bool:
    # llama.cpp's merge tool leaves split.count = 0 and a stale split.no in the merged file
    return "split.count" in values and read_scalar_int(buffer, values, "split.count", path) > 0
