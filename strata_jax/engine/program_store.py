"""Compiled programs on disk, found again without being traced: a warm start reads files.

JAX's own cache saves XLA's work only: to ask it, a program has to be traced and lowered, which takes longer than
compiling where kernels are many. Here a program is found by the digest of what it is made from: this package's source,
the function, its static values, the shapes of its arguments. After a change of the source, one that is lowered to the
same text is still found by that. Programs of other devices, drivers, versions of JAX or flags of XLA lie in other
folders. Files are pickles, as JAX's are executables: they belong in a folder that nobody else can write to.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from strata_jax.hardware import cpu_model

log = logging.getLogger(__name__)

MOST_BYTES = 4 * 2**30  # of the programs of one device; those not used for longest are removed
NOT_KEPT = "@mosaic_gpu"  # kernels whose host code looks for symbols that only tracing them loads (jax 0.11.2)
_HIT = "/jax/compilation_cache/cache_hits"
# settings of JAX that change what is traced
_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_debug_nans",
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
    """A folder of programs for one device: executables by their text, and which of them a name stands for."""

    folder: Path

    @classmethod
    def under(cls, root: Path) -> ProgramStore:
        """Open the folder for this device. Raises OSError where it cannot be made."""
        folder = root / _digest(_surroundings())
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        left = MOST_BYTES
        for path in sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime):
            left -= path.stat().st_size
            if left < 0:
                path.unlink(missing_ok=True)
        return cls(folder)

    def name(self, f: Callable, args: tuple, donate: tuple[int, ...], out_shardings: Any) -> str:
        """Return the digest of what a program is made from: ``f`` and its arguments without the values of arrays."""
        return _digest((_source(), _described(f), _described(args), donate, _described(out_shardings)))

    def find(self, name: str, args: tuple) -> StoredProgram | None:
        """Return the program of a name; None: it is not there, or cannot be read."""
        try:
            text, shapes = pickle.loads((self.folder / name).read_bytes())
            if not (self.folder / text).exists():
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
        text = _digest(code)
        program = self._load(text, args, shapes) if (self.folder / text).exists() else None
        if program is None:
            found_by_jax = _watch_hits()
            found_by_jax.here = False
            program = lowered.compile()
            # what JAX has read from its cache lacks what a file needs, on a CPU
            if found_by_jax.here or NOT_KEPT in code:
                return program
            executable, _, _ = serialize_executable.serialize(program)
            self._write(text, executable)
        self._write(name, pickle.dumps((text, shapes)))
        return program

    def _load(self, text: str, args: tuple, shapes: Any) -> Any:
        """The program of a text; None: it cannot be read."""
        path = self.folder / text
        try:
            os.utime(path)
            trees = jax.tree.structure((args, {})), jax.tree.structure(shapes)
            return serialize_executable.deserialize_and_load(path.read_bytes(), *trees)
        except Exception as error:  # whatever XLA stops at
            log.warning("a stored program is compiled again: %s: %s", path, error)
            path.unlink(missing_ok=True)
            return None

    def _write(self, name: str, content: bytes) -> None:
        """Readers see the whole file or none of it; where none can be written, the next start takes longer."""
        unfinished = self.folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            unfinished.write_bytes(content)
            unfinished.replace(self.folder / name)
        except OSError as error:
            log.warning("a compiled program is not kept: %s", error)
            unfinished.unlink(missing_ok=True)


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
    """Everything about a value that a program depends on, to be pickled: arrays by their shapes, functions by name."""
    if isinstance(x, partial):
        return "partial", _described(x.func), _described(x.args), _described(x.keywords)
    if callable(x):
        inner = getattr(x, "__wrapped__", x)
        if isinstance(inner, partial):
            return _described(inner)
        if not isinstance(inner, FunctionType):
            raise TypeError(f"a program is made from functions and their partial applications, not from {inner}")
        seen = [cell.cell_contents for cell in inner.__closure__ or ()], inner.__defaults__, inner.__kwdefaults__
        return inner.__module__, inner.__qualname__, inner.__code__.co_firstlineno, _described(seen)
    leaves, tree = jax.tree.flatten(x, is_leaf=callable)
    return tree, [_described(leaf) if callable(leaf) else _leaf(leaf) for leaf in leaves]


def _leaf(x: Any) -> Any:
    if not hasattr(x, "shape"):
        return x
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return x.shape, str(x.dtype), getattr(x, "weak_type", False), "" if kind in (None, _default_kind()) else kind


@cache
def _default_kind() -> str:
    return str(jax.devices()[0].default_memory().kind)


@cache
def _source() -> str:
    """The digest of this package."""
    package = Path(__file__).resolve().parents[1]
    return _digest([(str(path.relative_to(package)), path.read_bytes()) for path in sorted(package.rglob("*.py"))])


def _surroundings() -> list[Any]:
    """What programs depend on besides their text."""
    device = jax.devices()[0]
    return [
        jax.__version__, jaxlib.__version__, device.client.platform, device.client.platform_version,
        device.device_kind, len(jax.devices()), cpu_model(), os.environ.get("XLA_FLAGS", ""),
        [(name, str(getattr(jax.config, name))) for name in _SETTINGS],
    ]  # fmt: skip
