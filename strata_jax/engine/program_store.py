"""Compiled programs on disk, found again without being traced: a warm start reads files.

JAX's own cache saves XLA's work only: to ask it, a program has to be traced and lowered, which takes longer than
compiling where kernels are many. Here a program is found by the digest of what it is made from: this package's source,
the function, its static values, the shapes of its arguments. After a change of the source, one that is lowered to the
same text is still found by that. Programs of other devices, versions of JAX and CUDA or flags of XLA lie in other
folders. Files are pickles, as JAX's are executables: they belong in a folder that nobody else can write to.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable

from strata_jax.files import replaced_on_success
from strata_jax.hardware import cpu_model

log = logging.getLogger(__name__)

MOST_BYTES = 4 * 2**30  # of the programs of one device and version of JAX; those not used for longest are removed
_HIT = "/jax/compilation_cache/cache_hits"
# settings of JAX that change what is traced or compiled
_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_debug_nans", "jax_disable_most_optimizations", "jax_optimization_level",
)  # fmt: skip


@dataclass(frozen=True)
class StoredProgram:
    """A program on disk: the shapes of its results, a tree of `jax.ShapeDtypeStruct`, and what loads it."""

    shapes: Any
    load: Callable[[], Any]


class Unstored:
    """Where programs are kept for this process alone: the methods of `ProgramStore` without files."""

    def name(self, f: Callable, args: tuple, donate: tuple[int, ...], out_shardings: Any) -> str:
        return ""

    def find(self, name: str, args: tuple) -> StoredProgram | None:
        return None

    def compile(self, name: str, lowered: Any, args: tuple) -> Any:
        return lowered.compile()


@dataclass(frozen=True)
class ProgramStore:
    """A folder of programs for one device: executables by their text, and which of them a name stands for.

    What cannot be named, written or read is compiled, with a line in the log.
    """

    folder: Path

    @classmethod
    def under(cls, root: Path) -> ProgramStore | Unstored:
        """Open the folder for this device, or none where it cannot be used."""
        try:
            folder = root / _digest(_surroundings())
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_room(folder)
        except OSError as error:
            log.warning("compiled programs are not kept: %s", error)
            return Unstored()
        if jax.default_backend() == "gpu":
            with suppress(ImportError):  # it says where the library is that programs with Mosaic's kernels look for
                importlib.import_module("jax.experimental.mosaic.gpu")
        return cls(folder)

    def name(self, f: Callable, args: tuple, donate: tuple[int, ...], out_shardings: Any) -> str:
        """Return the digest of what a program is made from: ``f`` and its arguments without the values of arrays."""
        try:
            what = _described(f), _described(args), donate, _memory_kind(out_shardings)
            return _digest((SOURCE, _settings(), what))
        except Exception as error:  # whatever pickling stops at
            log.warning("a program has no name and is not kept: %s", error)
            return ""

    def find(self, name: str, args: tuple) -> StoredProgram | None:
        """Return the program of a name; None: it is not there, or cannot be read."""
        try:
            text, shapes = pickle.loads((self.folder / name).read_bytes()) if name else ("", None)
            if not text or not (self.folder / text).exists():
                return None
            os.utime(self.folder / name)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever unpickling stops at
            log.warning("a stored program is compiled again: %s: %s", self.folder / name, error)
            return None
        return StoredProgram(shapes, partial(self._load, text, args, shapes))

    def compile(self, name: str, lowered: Any, args: tuple) -> Any:
        """Return a lowered program, compiled unless one of the same text is there; the name stands for it from now."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)
        code = lowered.as_text()
        text = _digest((_settings(), code))
        program = self._load(text, args, shapes) if (self.folder / text).exists() else None
        if program is None:
            found_by_jax = _watch_hits()
            found_by_jax.here = False
            program = lowered.compile()
            # what JAX has read from its cache lacks what a file needs, on a CPU
            if not name or found_by_jax.here:
                return program
            try:
                executable, _, _ = serialize_executable.serialize(program)
            except Exception as error:  # whatever XLA stops at
                log.warning("a compiled program is not kept: %s", error)
                return program
            self._write(text, executable)
        self._write(name, pickle.dumps((text, shapes)))
        return program

    def _load(self, text: str, args: tuple, shapes: Any) -> Any:
        """The program of a text; None: it cannot be read."""
        path = self.folder / text
        try:
            content = path.read_bytes()
            with suppress(OSError):
                os.utime(path)
            trees = jax.tree.structure((args, {})), jax.tree.structure(shapes)
            return serialize_executable.deserialize_and_load(content, *trees, execution_devices=jax.devices()[:1])
        except Exception as error:  # whatever XLA stops at
            log.warning("a stored program is compiled again: %s: %s", path, error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def _write(self, name: str, content: bytes) -> None:
        """Readers see the whole file or none of it; where none can be written, the next start takes longer."""
        try:
            with replaced_on_success(self.folder / name) as unfinished:
                unfinished.write_bytes(content)
        except OSError as error:
            log.warning("a compiled program is not kept: %s", error)


def open_store(cache_dir: Path | None) -> ProgramStore | Unstored:
    """The programs of a cache directory; without one they are kept nowhere."""
    return Unstored() if cache_dir is None else ProgramStore.under(cache_dir / "programs")


def _make_room(folder: Path) -> None:
    """Remove the files not used for longest, as far as a folder has more than `MOST_BYTES`."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # of another process
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    left = MOST_BYTES
    for _, size, path in sorted(found, reverse=True):
        left -= size
        if left < 0:
            path.unlink(missing_ok=True)


def _digest(value: Any) -> str:
    content = io.BytesIO()
    pickler = pickle.Pickler(content)
    pickler.fast = True  # equal values give equal bytes, whether or not parts of them are one object
    pickler.dump(value)
    return hashlib.sha256(content.getvalue()).hexdigest()


@cache
def _watch_hits() -> threading.local:
    """What says of each thread whether JAX has found a program in its own cache."""
    found = threading.local()
    jax.monitoring.register_event_listener(lambda event, **_: setattr(found, "here", True) if event == _HIT else None)
    return found


def _described(x: Any) -> Any:
    """Everything about a value that a program depends on, to be pickled: arrays by their shapes, functions by name.

    Raises TypeError for what can be called and is no function, such as a method.
    """
    if isinstance(x, partial):
        return "partial", _described(x.func), _described(x.args), {name: _fixed(v) for name, v in x.keywords.items()}
    if callable(x):
        inner = getattr(x, "__wrapped__", x)
        if isinstance(inner, partial):
            return _described(inner)
        if not isinstance(inner, FunctionType):
            raise TypeError(f"a program is made from functions and their partial applications, not from {inner}")
        code, cells = inner.__code__, [cell.cell_contents for cell in inner.__closure__ or ()]
        fixed = _fixed(cells), _fixed(inner.__defaults__), _fixed(inner.__kwdefaults__)
        return inner.__module__, inner.__qualname__, code.co_firstlineno, code.co_code, fixed
    return _each(x, _leaf)


def _fixed(x: Any) -> Any:
    """As `_described`, arrays by their values: what a program has inside."""
    return _each(x, lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf)


def _each(x: Any, describe: Callable[[Any], Any]) -> Any:
    """The structure of a value and its leaves, described; what can be called is described as everywhere."""
    leaves, tree = jax.tree.flatten(x, is_leaf=callable)
    return tree, [_described(leaf) if callable(leaf) else describe(leaf) for leaf in leaves]


def _leaf(x: Any) -> Any:
    if not hasattr(x, "shape"):
        return x
    return x.shape, str(x.dtype), getattr(x, "weak_type", False), _memory_kind(getattr(x, "sharding", None))


def _memory_kind(sharding: Any) -> str:
    """Where an array lies, "" for the device's own memory: there is one device."""
    kind = None if sharding is None else sharding.memory_kind
    return "" if kind in (None, _default_kind()) else str(kind)


@cache
def _default_kind() -> str:
    return str(jax.devices()[0].default_memory().kind)


def _read_source() -> str:
    package = Path(__file__).resolve().parents[1]
    return _digest([(str(path.relative_to(package)), path.read_bytes()) for path in sorted(package.rglob("*.py"))])


SOURCE = _read_source()  # now: what is traced later was imported about now, whatever the files become


def _settings() -> list[tuple[str, str]]:
    return [(name, str(getattr(jax.config, name, None))) for name in _SETTINGS]


def _surroundings() -> list[Any]:
    """What programs depend on besides their text."""
    device = jax.devices()[0]
    return [
        jax.__version__, jaxlib.__version__, device.client.platform, device.client.platform_version,
        device.device_kind, len(jax.devices()), cpu_model(), os.environ.get("XLA_FLAGS", ""),
    ]  # fmt: skip
