"""Let the prebuilt llama.cpp libraries load where glibc is older than the 2.38 they ask for (Debian 12 has 2.36).

They need glibc 2.38 only for `__isoc23_strtol` and siblings, which are `strtol` etc. with C23 parsing of `0b` prefixes;
llama.cpp does not depend on that. For each such undefined symbol the name reference is moved past the prefix, its
version is bound to the base version, and the 2.38 requirement is marked weak. The installed files stay untouched: the
change is made in a copy. Layout of the sections: ELF-64, System V ABI, and the symbol-versioning chapter of the LSB.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WANTED_GLIBC = (2, 38)
_WANTED_VERSION = b"GLIBC_2.38"
_BASE_VERSION = b"GLIBC_2.2.5"
_PREFIX = b"__isoc23_"
_FLAG_WEAK = 0x2
_SYMBOL_BYTES = 24


class _Section(NamedTuple):
    offset: int
    size: int
    info: int


class _Requirement(NamedTuple):
    """One version that the library needs of another one; `at` is where its record starts in the file."""

    at: int
    library: bytes
    version: bytes
    idx: int


def loadable_library_dir() -> Path:
    """Return a folder with loadable libraries: the wheel's own, or rebound copies in the user's cache."""
    installed = _installed_library_dir()
    name, release = platform.libc_ver()
    if name == "glibc" and tuple(int(part) for part in release.split(".")[:2]) >= WANTED_GLIBC:
        return installed
    libraries = sorted(path for path in installed.glob("lib*.so*") if "mtmd" not in path.name)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in libraries)).hexdigest()[:16]
    target = _cache_dir() / digest
    if not target.is_dir():
        _publish_rebound_copies(libraries, target)
    return target


def rebind(data: bytes) -> tuple[bytes, int]:
    """Return a library's bytes without their need for glibc 2.38, and the number of symbols that had it.

    Raises `ValueError` when a symbol has no older form.
    """
    out = bytearray(data)
    sections = _sections(data)
    if not {".dynsym", ".dynstr", ".gnu.version", ".gnu.version_r"} <= set(sections):
        return data, 0
    requirements = list(_requirements(data, sections))
    base = next((r.idx for r in requirements if r.library == b"libc.so.6" and r.version == _BASE_VERSION), None)
    dropped = [r for r in requirements if r.library == b"libc.so.6" and r.version == _WANTED_VERSION]
    dropped_idx = {r.idx for r in dropped}
    symbols, names, versions = sections[".dynsym"], sections[".dynstr"], sections[".gnu.version"]
    num_rebound = 0
    for i in range(symbols.size // _SYMBOL_BYTES):
        at = symbols.offset + i * _SYMBOL_BYTES
        name_offset, _, _, section_idx = struct.unpack_from("<IBBH", data, at)
        version_at = versions.offset + 2 * i
        if section_idx != 0 or (struct.unpack_from("<H", data, version_at)[0] & 0x7FFF) not in dropped_idx:
            continue
        name = _text(data, names.offset + name_offset)
        if not name.startswith(_PREFIX) or base is None:
            raise ValueError(f"{name.decode()} needs glibc 2.38 and has no older form")
        struct.pack_into("<I", out, at, name_offset + len(_PREFIX))
        struct.pack_into("<H", out, version_at, base)
        num_rebound += 1
    for requirement in dropped:
        flags_at = requirement.at + 4
        struct.pack_into("<H", out, flags_at, struct.unpack_from("<H", data, flags_at)[0] | _FLAG_WEAK)
    return bytes(out), num_rebound


def _installed_library_dir() -> Path:
    spec = importlib.util.find_spec("llama_cpp_py_sync")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("llama_cpp_py_sync is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "strata-jax" / "oracle"


def _publish_rebound_copies(libraries: list[Path], target: Path) -> None:
    """Write the copies to a scratch folder and move it into place; of several processes, the first one wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for library in libraries:
            (scratch / library.name).write_bytes(rebind(library.read_bytes())[0])
            (scratch / library.name).chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sections(data: bytes) -> dict[str, _Section]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, num_entries, names_idx = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_bytes) for i in range(num_entries)]
    names_at = heads[names_idx][4]
    return {_text(data, names_at + head[0]).decode(): _Section(head[4], head[5], head[7]) for head in heads}


def _requirements(data: bytes, sections: dict[str, _Section]) -> Iterator[_Requirement]:
    names = sections[".dynstr"].offset
    at = sections[".gnu.version_r"].offset
    for _ in range(sections[".gnu.version_r"].info):  # sh_info counts the libraries
        _, num_versions, library, first, next_library = struct.unpack_from("<HHIII", data, at)
        record = at + first
        for _ in range(num_versions):
            _, _, idx, version, next_record = struct.unpack_from("<IHHII", data, record)
            yield _Requirement(record, _text(data, names + library), _text(data, names + version), idx)
            record += next_record
        at += next_library


def _text(data: bytes, at: int) -> bytes:
    return data[at : data.index(0, at)]
