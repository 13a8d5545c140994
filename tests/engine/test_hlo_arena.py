"""No compiled program makes a second copy of the arena: neither an instruction, nor a temporary, nor an output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.runtime import Runtime
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from tests.engine.policy_runs import RULE, SMALL, planned, settings_of, tokens
from tests.oracle.models import ModelStore

KINDS = {
    "attention", "counts", "decode", "decode end", "draft", "embed", "fill", "first_window", "gdn", "head",
    "places", "ple", "rows in", "rows out", "sample", "second",
}  # fmt: skip
# growth just under the loan moves experts between arrays, a trim moves pages, a restore writes rows
RUNS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "growth": (("borrow", "kv_grow", "under_loan", "conversations"), KINDS | {"copy", "pages"}),
    "residence": (("borrow", "residence", "conversations"), KINDS | {"spill", "fetch"}),
}
CASES = [(name, kind) for name, (_, kinds) in RUNS.items() for kind in sorted(kinds)]
# what may have an array of the arena as its result without being one: it is passed on, or written to in place
IN_PLACE = {
    "bitcast", "conditional", "dynamic-update-slice", "fusion", "get-tuple-element", "parameter", "scatter", "while",
}  # fmt: skip
RESULT = re.compile(r"^.* = (\S+?)(?:\{\S*)? ([\w-]+)\(.*$", re.MULTILINE)


def second_copies(program: Any, arrays: Sequence[jax.Array]) -> list[str]:
    """What in a compiled program is as large as an array of the arena and is not that array itself."""
    shapes = {f"u32[{a.shape[0]},{a.shape[1]}]" for a in arrays}
    found = [f"{op} of {shape}" for shape, op in RESULT.findall(program.as_text()) if shape in shapes]
    found = [text for text in found if text.split()[0] not in IN_PLACE]
    memory, largest = program.memory_analysis(), max(a.nbytes for a in arrays)
    sizes = {"temporaries": memory.temp_size_in_bytes}
    sizes["outputs"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return found + [f"{size:,} bytes of {what}" for what, size in sizes.items() if size >= largest]


@dataclass(frozen=True)
class Used:
    """An engine on which requests have run, with moves of every kind that copies.

    Attributes:
        arrays: those that no program may copy, the K/V in host memory among them.
    """

    engine: Engine
    arrays: tuple[jax.Array, ...]


@pytest.fixture(scope="module")
def used(models: ModelStore) -> dict[str, Used]:
    path, found = models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL), {}
    for name, (policies, _) in RUNS.items():
        file = open_gguf(path)
        engine = Engine.load(file, Geometry.from_gguf(file), planned(path, policies, spec_window=2))
        runtime = Runtime.start(engine, settings_of(policies), rule=RULE)
        histories: dict[str, tuple[int, ...]] = {"a": (), "b": ()}
        for who, count, output in (("a", 44, 12), ("b", 200, 12), ("a", 9, 24), ("b", 40, 12)):
            before = histories[who]
            reading = runtime.read((*before, *tokens(count, 1)), conversation=who, turns=(len(before),))
            emitted = [record.emitted for record in runtime.decode(reading, max_tokens=output)]
            runtime.finish(reading)
            histories[who] = (*reading.session.tokens, emitted[-1][-1])
        arrays = (*engine.arrays, *jax.tree.leaves(engine.cell_store))
        pages = set(engine.residency.layout.slot_num_pages)
        assert not pages & {a.shape[0] for a in arrays}, "an expert looks like an array of the arena"
        found[name] = Used(engine, arrays)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_requests_with_moves_have_compiled_every_kind_of_program(used: dict[str, Used], name: str) -> None:
    keys = used[name].engine.programs.compiled
    assert {key[0] for key in keys} == RUNS[name][1]
    assert len({key[-1] for key in keys if str(key[-1]).startswith("+")}) == 2  # while segments are lent, and not


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_program_copies_an_array_of_the_arena(used: dict[str, Used], name: str, kind: str) -> None:
    programs = {key: made for key, made in used[name].engine.programs.compiled.items() if key[0] == kind}
    assert programs
    for key, program in programs.items():
        assert second_copies(program, used[name].arrays) == [], key


COPIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "an update that is not in place": lambda a: a.at[3, 5].set(0),
    "a select over all pages": lambda a: jnp.where(a > 5, a, 7),
    "a broadcast": lambda a: jnp.full(a.shape, 3, a.dtype) + a[0],
    "a concatenation": lambda a: jnp.concatenate([a[5:], a[:5]]),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_the_arena_would_be_found(used: dict[str, Used], make: Callable[[jax.Array], jax.Array]) -> None:
    engine = used["growth"].engine
    found = second_copies(jax.jit(make).lower(engine.arena).compile(), engine.arrays)
    assert any("outputs" in text for text in found)
    assert len(found) > 1


def test_a_temporary_of_the_arenas_size_would_be_found(used: dict[str, Used]) -> None:
    engine = used["growth"].engine
    program = jax.jit(lambda a: jnp.sort(a.reshape(-1))[::7].sum()).lower(engine.arena).compile()
    assert any("temporaries" in text for text in second_copies(program, engine.arrays))
