"""Compiled programs: when they are compiled, where they are kept, what compiling cost, what they write over.

Programs are compiled ahead of their first call, beside each other where several are known, and kept by a key (kind,
number of rows, signature of the block).
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.engine.program_store import ProgramStore, Unstored

Watch = Callable[[str], AbstractContextManager[None]]

FROM_DISK = "(from disk)"  # after the name of a program that is read
_LOWERING = threading.Lock()  # filters of warnings belong to the process
_MAX_COMPILERS = 16  # threads; XLA takes some hundred MB in each


@dataclass(kw_only=True)
class CompiledPrograms:
    """Compiles on demand.

    Attributes:
        watch: a context that each compilation runs in, and each program is read in, made from its name; several may run
            at a time.
        compile_s: seconds spent compiling and reading programs so far.
        store: where programs are kept for later processes.
        places: what the rounds before have left, by the parts of a round that write over it.
    """

    watch: Watch = lambda name: nullcontext()
    store: ProgramStore | Unstored = field(default_factory=Unstored)
    compiled: dict[Hashable, Any] = field(default_factory=dict)
    compile_s: float = 0.0
    places: dict[Hashable, Any] = field(default_factory=dict)
    _compiler: _Compiler | None = None

    def clock_s(self) -> float:
        """Seconds on a clock that stands still while a program is compiled."""
        return time.perf_counter() - self.compile_s

    def call(
        self, key: Hashable, f: Callable, args: tuple, donate: tuple[str, ...] = (),
        out_shardings: jax.sharding.Sharding | None = None,
    ) -> Any:  # fmt: skip
        """Run the program of a key, compiled from ``f`` at its first call.

        donate: the parameters of ``f`` whose arrays are used up.

        Raises:
            ValueError: ``f`` has no such parameter.
        """
        numbers = () if key in self.compiled else argument_numbers(f, donate)
        return self._call(key, f, args, numbers, out_shardings)

    def in_place(
        self,
        part: tuple[Hashable, ...],
        key: Hashable,
        f: Callable,
        args: tuple,
        donate: tuple[str, ...],
        fresh: Callable[[Any], Any],
    ) -> Any:
        """`call`, of which what is new (``fresh`` of the results) is written over that of this part's round before.

        A round then takes no memory but for temporaries, and all of it finds the same addresses as the one before: a
        GPU changes each recorded launch of which an address has moved, which takes the host longer than the launch.
        """
        if key not in self.compiled:
            f = jax.jit(f)  # traced once, for the shapes of places and for the program
        places = None if self._compiler else self.places.pop(part, None)
        if places is None:
            places = self.call(("places", *part), partial(_empty, f, args, fresh), ())
        numbers = () if key in self.compiled else (0, *(idx + 1 for idx in argument_numbers(f, donate)))
        out = self._call(key, partial(_into, f), (places, *args), numbers)
        if self._compiler is None:
            self.places[part] = fresh(out)
        return out

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Within the context programs are not run: arguments may be shapes, results are.

        They are compiled beside each other, and are all there when the context ends.
        """
        with ThreadPoolExecutor(min(_MAX_COMPILERS, os.cpu_count() or 1)) as pool:
            self._compiler = compiler = _Compiler(pool)
            try:
                yield
                started = time.perf_counter()
                self.compiled |= {key: program.result() for key, (_, program) in compiler.started.items()}
                self.compile_s += time.perf_counter() - started
            finally:
                self._compiler = None
                pool.shutdown(cancel_futures=True)

    def _call(
        self, key: Hashable, f: Callable, args: tuple, donate: tuple[int, ...],
        out_shardings: jax.sharding.Sharding | None = None,
    ) -> Any:  # fmt: skip
        program, compiler = self.compiled.get(key), self._compiler
        if program is None and (compiler is None or key not in compiler.started):
            started = time.perf_counter()
            lower = partial(self._lower, f, args, donate, out_shardings)
            name = self.store.name(f, args, donate, out_shardings)
            stored = self.store.find(name, args)

            def make() -> Any:
                program = None
                if stored is not None:
                    with self.watch(f"{_name(key)} {FROM_DISK}"):
                        program = stored.load()
                return self._compile(key, lower, name, args) if program is None else program

            if compiler is None:
                self.compiled[key] = make()
            elif stored is not None:
                compiler.start(key, stored.shapes, make)
            else:
                lowered = lower()
                compiler.start(key, lowered.out_info, partial(self._compile, key, lambda: lowered, name, args))
            self.compile_s += time.perf_counter() - started
        if compiler is not None:
            shapes = compiler.started[key][0] if program is None else program.out_info
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
        return self.compiled[key](*args)

    def _lower(
        self, f: Callable, args: tuple, donate: tuple[int, ...], out_shardings: jax.sharding.Sharding | None
    ) -> Any:
        with _LOWERING, warnings.catch_warnings():
            # the backend that the kernels are written for; docs/kernels.md says what follows it
            warnings.filterwarnings("ignore", message=".*Pallas Triton backend is deprecated.*")
            # a donation that cannot be used means a second copy of the state
            warnings.filterwarnings("error", message=".*donated buffers were not usable.*")
            # a function of its own: JAX keeps what it has compiled of one, which may have come from its cache on disk
            # and then cannot be stored (`program_store.py`)
            own = partial(f)
            # what is taken over but not read keeps its place in memory all the same: what a GPU has recorded of a round
            # has the addresses of that round. And a text says what all arguments are (`program_store.py`)
            jitted = jax.jit(own, donate_argnums=donate, keep_unused=True, out_shardings=out_shardings)
            return jitted.lower(*args)

    def _compile(self, key: Hashable, lower: Callable[[], Any], name: str, args: tuple) -> Any:
        with self.watch(_name(key)):
            return self.store.compile(name, lower(), args)


def _name(key: Hashable) -> str:
    return " ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)


@dataclass
class _Compiler:
    """Programs that are being compiled, by their keys: the shapes of their results, and the programs to come."""

    pool: ThreadPoolExecutor
    started: dict[Hashable, tuple[Any, Future[Any]]] = field(default_factory=dict)

    def start(self, key: Hashable, shapes: Any, make: Callable[[], Any]) -> None:
        self.started[key] = shapes, self.pool.submit(make)


def argument_numbers(f: Callable, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the positions of parameters. Raises ValueError for one that ``f`` does not have."""
    if not names:
        return ()
    parameters = list(inspect.signature(f).parameters)
    return tuple(parameters.index(name) for name in names)


def _empty(f: Callable, args: tuple, fresh: Callable[[Any], Any]) -> Any:
    """Zeros in place of what is new of the results of ``f``."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), fresh(jax.eval_shape(f, *args)))


def _into(f: Callable, places: Any, *args: Any) -> Any:
    """``f`` of the other arguments; ``places`` are donated to what it returns."""
    return f(*args)
