"""The tensor records of a GGUF header: name, shape, type and place of each, checked against the file's size."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise

from strata_jax.errors import FormatError
from strata_jax.gguf.blocks import BLOCK_TYPES, BlockType, row_bytes
from strata_jax.gguf.cursor import Cursor

MAX_DIMS = 4
MAX_NAME_BYTES = 64  # GGML_MAX_NAME, of the GGUF specification

Record = tuple[str, tuple[int, ...], int, int, int]
"""Name, row-major shape, type number, offset in the data section, and where the record lies in the header."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. `shape` is row-major, the reverse of the order in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_id: int
    shard_idx: int
    offset_bytes: int

    @property
    def type_name(self) -> str:
        found = BLOCK_TYPES.get(self.ggml_id)
        return found.name if found else f"unknown({self.ggml_id})"

    @property
    def block_type(self) -> BlockType:
        """Raises FormatError for a type number whose block size is not known here."""
        found = BLOCK_TYPES.get(self.ggml_id)
        if found is None:
            raise FormatError(
                f"tensor {self.name!r} has type number {self.ggml_id}, whose block size is not known here; "
                f"known numbers: {', '.join(map(str, sorted(BLOCK_TYPES)))}. Its bytes cannot be sized, read or planned"
            )
        return found

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.block_type, self.shape[-1])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


def place_tensors(
    cursor: Cursor, records: list[Record], *, data_start: int, alignment: int, shard_idx: int, file_bytes: int
) -> tuple[TensorInfo, ...]:
    """Turn records into tensors with absolute offsets, none of them unaligned, outside the file or overlapping."""
    tensors = tuple(
        TensorInfo(name, shape, ggml_id, shard_idx, data_start + offset) for name, shape, ggml_id, offset, _ in records
    )
    for (name, _, _, offset, at), info in zip(records, tensors, strict=True):
        if offset % alignment:
            cursor.fail(f"tensor {name!r} has offset {offset}, not a multiple of the alignment {alignment}", at)
        _check_bounds(cursor, info, file_bytes, at)
    _check_overlap(cursor, tensors)
    return tensors


def read_tensors(cursor: Cursor, num_tensors: int) -> list[tuple[str, tuple[int, ...], int, int, int]]:
    """Return (name, row-major shape, type number, offset in the data section, where the record lies) per tensor."""
    records: list[tuple[str, tuple[int, ...], int, int, int]] = []
    seen: set[str] = set()
    for idx in range(num_tensors):
        at = cursor.pos
        name = cursor.name(f"tensor {idx} of {num_tensors}", MAX_NAME_BYTES)
        if name in seen:
            cursor.fail(f"tensor {name!r} appears twice", at)
        seen.add(name)
        num_dims = cursor.u32(f"the number of dimensions of tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            cursor.fail(f"tensor {name!r} has {num_dims} dimensions; expected 1 to {MAX_DIMS}", at)
        stored = struct.unpack_from(f"<{num_dims}Q", cursor.buffer, cursor.need(8 * num_dims, f"the shape of {name!r}"))
        shape = tuple(reversed(stored))
        if 0 in shape:
            cursor.fail(f"tensor {name!r} has shape {shape}; every dimension must be at least 1", at)
        if math.prod(shape) > 2**63 - 1:
            cursor.fail(f"tensor {name!r} has shape {shape}: {math.prod(shape)} elements, the limit is 2^63 - 1", at)
        ggml_id = cursor.u32(f"the type of tensor {name!r}")
        block = BLOCK_TYPES.get(ggml_id)
        if block is not None and shape[-1] % block.block_len:
            cursor.fail(
                f"tensor {name!r} has rows of {shape[-1]} weights; {block.name} needs a multiple of {block.block_len}",
                at,
            )
        records.append((name, shape, ggml_id, cursor.u64(f"the offset of tensor {name!r}"), at))
    return records


def _check_bounds(cursor: Cursor, info: TensorInfo, file_bytes: int, at: int) -> None:
    """Check that the tensor lies in the file; of a type of unknown size only the start can be checked."""
    known = info.ggml_id in BLOCK_TYPES
    need = info.num_bytes if known else 0
    stop = info.offset_bytes + need
    if stop > file_bytes:
        size = f"{need} bytes" if known else "an unknown number of bytes"
        cursor.fail(
            f"tensor {info.name!r} lies outside the file: its {size} ({info.type_name}) run from byte "
            f"{info.offset_bytes} to {stop}, the file has {file_bytes} bytes: {stop - file_bytes} are missing. "
            f"The file is cut off or its offsets are wrong; download or copy it again",
            at,
        )


def _check_overlap(cursor: Cursor, tensors: tuple[TensorInfo, ...]) -> None:
    for first, second in pairwise(sorted(tensors, key=lambda info: info.offset_bytes)):
        stop = first.offset_bytes + (first.num_bytes if first.ggml_id in BLOCK_TYPES else 1)
        if stop > second.offset_bytes:
            cursor.fail(
                f"tensors {first.name!r} and {second.name!r} overlap: the first takes bytes {first.offset_bytes} to "
                f"{stop}, the second starts at {second.offset_bytes}",
                second.offset_bytes,
            )
