"""Walk over the bytes of a GGUF header: every length is checked against what is left before it is used."""

from __future__ import annotations

import codecs
import mmap
import struct
from pathlib import Path
from typing import NoReturn

from strata_jax.errors import FormatError

Buffer = mmap.mmap | bytes

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING_STEP = 1 << 20


class Cursor:
    """A position in a buffer that never moves past the end."""

    def __init__(self, buffer: Buffer, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.pos = 0
        self.end = len(buffer)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise FormatError(f"{self.path}: {message} (at byte {self.pos if at is None else at})")

    def need(self, num_bytes: int, what: str) -> int:
        """Move over `num_bytes` bytes and return where they start."""
        if num_bytes > self.end - self.pos:
            self.fail(
                f"the header is cut off: {what} needs {num_bytes} bytes, {self.end - self.pos} of the file's "
                f"{self.end} are left. Download or copy the file again"
            )
        start = self.pos
        self.pos += num_bytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.buffer, self.need(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.buffer, self.need(8, what))[0]

    def count(self, what: str, min_bytes: int, limit: int) -> int:
        """Read a u64 count of entries that take at least `min_bytes` each."""
        at = self.pos
        count = self.u64(what)
        if count > limit:
            self.fail(f"{what} is {count}; the limit is {limit}", at)
        if count * min_bytes > self.end - self.pos:
            self.fail(
                f"{what} is {count}, which needs at least {count * min_bytes} bytes; "
                f"{self.end - self.pos} are left in the file of {self.end}",
                at,
            )
        return count

    def name(self, what: str, limit: int) -> str:
        at = self.pos
        length = self.u64(f"the length of {what}")
        if not 0 < length <= limit:
            self.fail(f"{what} has a name of {length} bytes; expected 1 to {limit}", at)
        start = self.need(length, f"the name of {what}")
        raw = bytes(self.buffer[start : start + length])
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"the name of {what} is not UTF-8: {raw[:40]!r}, byte {error.start}", start)

    def skip_strings(self, count: int, what: str) -> None:
        """Move over `count` strings, checking lengths and UTF-8 without keeping anything."""
        buffer, end, pos, unpack = self.buffer, self.end, self.pos, _U64.unpack_from
        for idx in range(count):
            if end - pos < 8:
                self.pos = pos
                self.need(8, f"the length of string {idx} of {what}")
            (length,) = unpack(buffer, pos)
            pos += 8
            if length > end - pos:
                self.pos = pos
                self.need(length, f"string {idx} of {what}")
            try:
                if length <= _STRING_STEP:
                    buffer[pos : pos + length].decode()
                else:
                    self._check_long_utf8(pos, pos + length)
            except UnicodeDecodeError as error:
                self.fail(f"string {idx} of {what} is not UTF-8 ({error.reason})", pos)
            pos += length
        self.pos = pos

    def _check_long_utf8(self, start: int, stop: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for pos in range(start, stop, _STRING_STEP):
            decoder.decode(self.buffer[pos : min(pos + _STRING_STEP, stop)], pos + _STRING_STEP >= stop)
