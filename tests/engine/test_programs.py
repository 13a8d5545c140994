"""When programs are compiled, and that several are compiled at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

from strata_jax.engine import compiled
from strata_jax.engine.arena import CellLayout
from strata_jax.engine.model import ModelSpec
from strata_jax.engine.programs import Programs
from strata_jax.presets import preset_geometry

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)


def new_programs() -> Programs:
    geometry = preset_geometry("synthetic_small", "iq2_xs")
    return Programs(ModelSpec(geometry, CellLayout("f32", 16, 8, 8, 64)))


def test_programs_known_beforehand_are_compiled_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compilation waits until another has begun, so one after the other would never end."""
    programs, seen, both = new_programs(), list[str](), threading.Barrier(2, timeout=60)
    monkeypatch.setattr(compiled.os, "cpu_count", lambda: 2)

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        seen.append(name)
        both.wait()
        yield

    programs.watch = watch
    with programs.shapes_only():
        doubled = programs.call(("double", 3), lambda x: 2 * x, (SHAPE,))
        again = programs.call(("double", 3), lambda x: 2 * x, (SHAPE,))
        total = programs.call(("sum", 3), jnp.sum, (doubled,))
    assert (doubled.shape, again.shape, total.shape) == ((3,), (3,), ())
    assert sorted(seen) == ["double 3", "sum 3"]
    assert programs.compile_s > 0

    compiled_s, ones = programs.compile_s, jnp.ones(3)
    assert float(programs.call(("sum", 3), jnp.sum, (programs.call(("double", 3), jnp.copy, (ones,)),))) == 6
    assert programs.compile_s == compiled_s  # both were there


def test_a_compilation_that_fails_is_reported_and_leaves_nothing_behind() -> None:
    programs = new_programs()

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        if name == "bad":
            raise RuntimeError("the compiler fell over")
        yield

    programs.watch = watch

    def compile_both() -> None:
        with programs.shapes_only():
            programs.call(("good",), jnp.negative, (SHAPE,))
            programs.call(("bad",), jnp.sum, (SHAPE,))

    with pytest.raises(RuntimeError, match="fell over"):
        compile_both()
    assert not programs.compiled
    assert programs.call(("good",), jnp.negative, (jnp.ones(3),)).tolist() == [-1, -1, -1]


def test_arrays_that_are_used_up_are_named() -> None:
    programs, x, y = new_programs(), jnp.ones(3), jnp.ones(3)

    def total(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b

    assert programs.call(("total",), total, (x, y), ("b",)).tolist() == [2, 2, 2]
    assert (x.is_deleted(), y.is_deleted()) == (False, True)
    with pytest.raises(ValueError, match="'c' is not in list"):
        programs.call(("other",), total, (x, x), ("c",))
