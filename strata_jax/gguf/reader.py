"""Open GGUF files: bounds-checked headers, memory-mapped data, split sets as one file.

Opening reads headers only. Tensor data is a view on the mapping and costs no memory of its own until it is touched.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import FormatError
from strata_jax.gguf.cursor import Buffer
from strata_jax.gguf.header import Header, parse_header
from strata_jax.gguf.metadata import Metadata
from strata_jax.gguf.shards import open_shards
from strata_jax.gguf.tensors import TensorInfo

__all__ = ["GGUFFile", "TensorInfo", "open_gguf"]


class GGUFFile:
    """An open model: one file, or all shards of a split set. Metadata is that of the first shard."""

    def __init__(self, paths: tuple[Path, ...], buffers: tuple[Buffer, ...], headers: tuple[Header, ...]) -> None:
        self.paths = paths
        self.version = headers[0].version
        self.metadata: Metadata = Metadata(buffers[0], headers[0].values)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {info.name: info for header in headers for info in header.tensors}
        )
        self._buffers = buffers

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return the packed bytes of a tensor as a read-only view, u8[*shape[:-1], row_bytes].

        Raises KeyError for a name that is not in the file, FormatError for a type of unknown size.
        """
        if not self._buffers:
            raise ValueError(f"{self.paths[0]} was closed before tensor {name!r} was read")
        info = self.tensors[name]
        flat = np.frombuffer(self._buffers[info.shard_idx], np.uint8, info.num_bytes, info.offset_bytes)
        return flat.reshape(*info.shape[:-1], info.row_bytes)

    def close(self) -> None:
        """Let go of the data. Views and metadata handed out stay valid: the pages go with the last of them."""
        self._buffers = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file, or the split set that it is a shard of. Raises FormatError, naming what is wrong and where."""
    paths, opened = open_shards(Path(path), _open_one)
    return GGUFFile(paths, tuple(buffer for buffer, _ in opened), tuple(header for _, header in opened))


def _open_one(path: Path) -> tuple[Buffer, Header]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise FormatError(_directory_message(path))
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            raise FormatError(f"{path}: not a regular file; expected a GGUF file")
        with path.open("rb") as file:
            if status.st_size == 0:
                raise FormatError(
                    f"{path}: the file is empty (0 bytes); expected a GGUF file. Download or copy it again"
                )
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file (folder: {path.absolute().parent})") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be opened: {error}") from error
    return buffer, parse_header(buffer, len(buffer), path)


def _directory_message(path: Path) -> str:
    try:
        found = sorted(entry.name for entry in path.iterdir() if entry.suffix == ".gguf")
    except OSError:
        found = []
    inside = f"it holds {', '.join(found[:4])}{' ...' if len(found) > 4 else ''}" if found else "it holds no .gguf file"
    return f"{path}: this is a directory, expected a GGUF file; {inside}"
