"""Write small GGUF files byte by byte, valid or broken on purpose: no writer library would agree to the broken ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCALARS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "B"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
STRING, ARRAY = 8, 9

Key = tuple[str | bytes, bytes]
"""A key's name and its encoded value."""


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: str, value: float) -> bytes:
    number, code = SCALARS[kind]
    return struct.pack("<I" + code, number, value)


def string(value: str | bytes) -> bytes:
    return struct.pack("<I", STRING) + text(value)


def array(kind: str, values: Sequence[object], *, count: int | None = None) -> bytes:
    """An array value; `count` writes a length that need not be true."""
    length = len(values) if count is None else count
    if kind == "string":
        return struct.pack("<IIQ", ARRAY, STRING, length) + b"".join(text(str(v)) for v in values)
    number, code = SCALARS[kind]
    return struct.pack("<IIQ", ARRAY, number, length) + struct.pack(f"<{len(values)}{code}", *values)


@dataclass
class Tensor:
    """One tensor record. `shape` is row-major; `offset` None places it behind the one before."""

    name: str | bytes
    shape: tuple[int, ...]
    ggml_id: int = 0
    num_bytes: int | None = None
    offset: int | None = None

    @property
    def size(self) -> int:
        if self.num_bytes is not None:
            return self.num_bytes
        total = 4
        for n in self.shape:
            total *= n
        return total


@dataclass
class File:
    """A GGUF file. `keys` pairs names with already encoded values, so that doubles and nonsense can be written."""

    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32
    num_keys: int | None = None
    num_tensors: int | None = None

    def header(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", self.version, num_tensors, num_keys))
        for key, value in self.keys:
            out += text(key) + value
        offset = 0
        for tensor in self.tensors:
            at = offset if tensor.offset is None else tensor.offset
            dims = tuple(reversed(tensor.shape))
            out += text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.ggml_id, at)
            offset = -(-(at + tensor.size) // self.alignment) * self.alignment
        return bytes(out)

    def data_bytes(self) -> int:
        offset = 0
        for tensor in self.tensors:
            at = offset if tensor.offset is None else tensor.offset
            offset = -(-(at + tensor.size) // self.alignment) * self.alignment
        return offset

    def encode(self) -> bytes:
        header = self.header()
        header += bytes(-len(header) % self.alignment)
        data = bytearray(self.data_bytes())
        for idx in range(len(data)):
            data[idx] = idx % 251
        return header + bytes(data)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path


def small_file() -> File:
    """A valid file: scalars, arrays, strings, and three tensors of 4,096 bytes each."""
    return File(
        keys=[
            ("general.architecture", string("qwen4exp")),
            ("general.name", string("small")),
            ("a.u32", scalar("u32", 7)),
            ("a.words", array("string", ["one", "two", "drei"])),
            ("a.numbers", array("u64", [1, 2**63, 3])),
        ],
        tensors=[Tensor(f"t{i}.weight", (16, 64)) for i in range(3)],
    )
