"""Programs on disk: found without tracing, and only where everything that they are made from is the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import program_store
from strata_jax.engine.cell_store import fetch_pages, new_store, spill_pages
from strata_jax.engine.engine import bank_sharding
from strata_jax.engine.program_store import ProgramStore, Unstored
from strata_jax.engine.programs import Programs
from tests.engine.shared_programs import SharedPrograms
from tests.engine.test_programs import new_programs

TRACES: list[float] = []


def scaled(x: jax.Array, k: float) -> tuple[dict[str, jax.Array], jax.Array]:
    TRACES.append(k)
    return {"y": x * k}, x + 1


def programs_in(folder: Path) -> Programs:
    programs = new_programs()
    programs.store = ProgramStore.under(folder)
    assert isinstance(programs.store, ProgramStore)
    return programs


def new_function() -> partial[Any]:
    """One that no cache has seen."""
    TRACES.clear()
    return partial(scaled, k=random.random())


def call(programs: Programs, f: partial[Any], x: Any) -> Any:
    return programs.call(("scaled",), f, (x,), ("x",))


def test_a_later_program_of_the_same_making_is_not_traced(tmp_path: Path) -> None:
    f = new_function()
    first, x = call(programs_in(tmp_path), f, jnp.arange(4.0)), jnp.arange(4.0)
    found = call(programs_in(tmp_path), f, x)
    assert len(TRACES) == 1
    assert x.is_deleted()  # donated
    assert jax.tree.map(lambda a: a.tolist(), found) == jax.tree.map(lambda a: a.tolist(), first)

    ahead = programs_in(tmp_path)
    with ahead.shapes_only():
        shapes = call(ahead, f, jax.ShapeDtypeStruct((4,), jnp.float32))
    assert jax.tree.map(lambda s: s.shape, shapes) == ({"y": (4,)}, (4,))
    assert call(ahead, f, jnp.ones(4))[1].tolist() == [2, 2, 2, 2]
    assert len(TRACES) == 1


def test_engines_of_a_test_file_share_programs_while_the_package_is_as_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    f, shared = new_function(), SharedPrograms()

    def traces() -> int:
        programs = new_programs()
        programs.store = shared
        call(programs, f, jnp.arange(4.0))
        return len(TRACES)

    assert (traces(), traces()) == (1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(program_store, "MOST_BYTES", "something else")
        assert traces() == 2
    assert traces() == 2


def test_whatever_changes_a_program_changes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, x = ProgramStore.under(tmp_path), jnp.ones(4)

    def adds(n: int) -> Any:
        return lambda x: x + n

    f = partial(scaled, k=2.0)
    names = [
        store.name(*made_from)
        for made_from in (
            (f, (x,), (0,), None), (f, (x,), (), None), (partial(scaled, k=3.0), (x,), (0,), None),
            (f, (jnp.ones(5),), (0,), None), (f, (x.astype(jnp.int32),), (0,), None), (f, ([x],), (0,), None),
            (adds(1), (x,), (), None), (adds(2), (x,), (), None), (jax.jit(f), (x, 1), (), None),
        )
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    same = store.name(jax.jit(f), (jax.ShapeDtypeStruct((4,), jnp.float32),), (0,), None)
    assert same == names[0]
    monkeypatch.setattr(program_store, "SOURCE", "another version")
    assert store.name(f, (x,), (0,), None) not in names
    table = partial(scaled, k=jnp.ones(4))
    assert store.name(table, (x,), (), None) != store.name(partial(scaled, k=jnp.zeros(4)), (x,), (), None)
    monkeypatch.setattr(program_store, "_settings", lambda: [("jax_enable_x64", "True")])
    assert store.name(f, (x,), (0,), None) != names[0]


class Twice:
    """Can be called and traced, and is no function."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x


def test_what_cannot_be_named_or_kept_is_computed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("Compilation does not support serialization")

    programs = programs_in(tmp_path)
    assert programs.call(("twice",), Twice(), (jnp.ones(1),)).tolist() == [2]
    monkeypatch.setattr(program_store.serialize_executable, "serialize", refuse)
    assert call(programs, new_function(), jnp.ones(4))[1].tolist() == [2, 2, 2, 2]
    assert "has no name and is not kept" in caplog.text
    assert "is not kept: Compilation does not" in caplog.text
    assert not list(tmp_path.glob("*/*"))


def test_a_folder_that_cannot_be_used_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert isinstance(ProgramStore.under(tmp_path / "file"), Unstored)
    assert "are not kept" in caplog.text


def pick(a: jax.Array, b: jax.Array, *, which: int, k: float) -> jax.Array:
    return (a, b)[which] * k


def test_programs_of_one_text_with_other_arguments_are_apart(tmp_path: Path) -> None:
    programs, k = programs_in(tmp_path), new_function().keywords["k"]
    for which, expected in ((0, k), (1, 2 * k)):
        found = programs.call((which,), partial(pick, which=which, k=k), (jnp.ones(3), 2 * jnp.ones(3)))
        np.testing.assert_allclose(found, np.full(3, expected), rtol=1e-6)


def test_cells_go_to_the_store_of_host_memory_and_come_back_by_kept_programs(tmp_path: Path) -> None:
    for _ in range(2):
        programs = programs_in(tmp_path)
        store = new_store(4, 512, bank_sharding())
        arena, rows = jnp.arange(3 * 128, dtype=jnp.uint32).reshape(3, 128), np.array([1, 2], np.int32)
        *_, store = spill_pages(programs, store, arena, rows, rows + 1)
        *_, arena = fetch_pages(programs, store, jnp.zeros_like(arena), rows, rows + 1)
        assert arena[:, 0].tolist() == [0, 128, 256]


def test_a_change_of_source_that_lowers_to_the_same_text_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = new_function()
    call(programs_in(tmp_path), f, jnp.ones(4))
    monkeypatch.setattr(program_store, "SOURCE", "another version")
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: pytest.fail("compiled"))
    for traces in (2, 2):
        f = partial(scaled, **f.keywords)  # JAX remembers what it has traced for the other object
        assert call(programs_in(tmp_path), f, jnp.zeros(4))[1].tolist() == [1, 1, 1, 1]
        assert len(TRACES) == traces


def test_a_broken_file_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for broken in ("executable", "name"):
        f = new_function()
        call(programs_in(tmp_path / broken), f, jnp.ones(4))
        small, large = sorted((tmp_path / broken).glob("*/*"), key=lambda path: path.stat().st_size)
        (large if broken == "executable" else small).write_bytes(b"nonsense")
        assert call(programs_in(tmp_path / broken), f, jnp.zeros(4))[1].tolist() == [1, 1, 1, 1]
        assert "a stored program is compiled again" in caplog.text
        caplog.clear()


def test_a_program_that_cannot_be_written_is_computed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if self.is_relative_to(tmp_path):
            raise OSError(28, "No space left on device")
        return written(self, content)  # JAX's own cache

    programs = programs_in(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert call(programs, new_function(), jnp.ones(4))[1].tolist() == [2, 2, 2, 2]
    assert "a compiled program is not kept" in caplog.text
    assert not list(tmp_path.glob("*/*"))


@pytest.fixture
def all_cached() -> Iterator[None]:
    """JAX's own cache keeps all programs, also where a run in this process has told it to leave out quick ones."""
    least = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, least)
    jax.config.update(least, 0.0)
    yield
    jax.config.update(least, before)


def test_what_jax_read_from_its_own_cache_is_not_kept(tmp_path: Path, all_cached: None) -> None:
    if not jax.config.jax_enable_compilation_cache:
        pytest.skip("JAX has no cache")
    f = new_function()
    call(programs_in(tmp_path / "one"), f, jnp.ones(4))
    jax.clear_caches()
    call(programs_in(tmp_path / "two"), f, jnp.ones(4))
    jax.clear_caches()
    call(new_programs(), f, jnp.ones(4))  # this process has it from there, and remembers it
    call(programs_in(tmp_path / "three"), f, jnp.ones(4))
    assert [len(list((tmp_path / name).glob("*/*"))) for name in ("one", "two", "three")] == [2, 0, 0]


def test_programs_not_used_for_longest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = new_function(), new_function()
    for f in (first, second):
        call(programs_in(tmp_path), f, jnp.ones(4))
    for path in tmp_path.glob("*/*"):
        os.utime(path, (1, 1))
    call(programs_in(tmp_path), second, jnp.ones(4))  # used now
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    monkeypatch.setattr(program_store, "MOST_BYTES", num_bytes - 1)
    left = ProgramStore.under(tmp_path)
    for f, is_there in ((first, False), (second, True)):
        args = (jnp.ones(4),)
        assert (left.find(left.name(f, args, (0,), None), args) is not None) is is_there


SERVE = """
import sys
from pathlib import Path
from strata_jax.engine.engine import Engine
from strata_jax.engine.program_store import ProgramStore
from strata_jax.engine.compiled import FROM_DISK
from strata_jax.engine.session import fresh_session
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from contextlib import contextmanager

compiled = []

@contextmanager
def watch(name):
    compiled.append(not name.endswith(FROM_DISK))
    yield

folder = Path(sys.argv[1])
file = open_gguf(folder / "model.gguf")
geometry = Geometry.from_gguf(file)
made = plan(geometry, PlanRequest(context_cells=128, chunk_tokens=64, expert_slots=8, spec_window=1, kv_type="int8"))
engine = Engine.load(file, geometry, made, watch, (), program_store=ProgramStore.under(folder / "programs"))
session = fresh_session(engine)
logits = session.prefill(list(range(40)))
print([token for record in session.decode(logits, max_tokens=4) for token in record.emitted])
print(sum(compiled), len(compiled))
"""


def test_another_process_serves_the_same_text_and_compiles_nothing(tmp_path: Path) -> None:
    from strata_jax.synthetic import write_synthetic_gguf

    write_synthetic_gguf(
        tmp_path / "model.gguf",
        preset="nano",
        overrides={"num_layers": 2, "full_attention_interval": 2, "ple_layer": 0},
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"  # programs are for the first one
    environ = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    said = []
    for seed in ("1", "2"):  # the order of sets of texts differs
        done = subprocess.run(
            [sys.executable, "-c", SERVE, str(tmp_path)], env=environ | {"PYTHONHASHSEED": seed}, text=True,
            capture_output=True, cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert said[0][0] == said[1][0]
    (first, first_all), (second, second_all) = (map(int, lines[1].split()) for lines in said)
    assert first == first_all > 5
    assert second == 0 < second_all
