"""Policies at work on the engine: whatever moves, not a bit of what the model computes changes, and accounts agree."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.memory.ledger import Owner
from strata_jax.policies.device import bytes_beyond_plan
from strata_jax.policies.moves import MoveKind
from tests.engine.policy_runs import (
    HEADS,
    NUM_EXPERTS,
    POLICIES,
    SMALL,
    Ask,
    Engines,
    Injected,
    Run,
    Sink,
    start,
    tokens,
)
from tests.oracle.models import ModelStore

# Each number of segments that are away compiles its own programs, so the elastic cache is here only beside all others;
# `bench/policy_matrix.py` runs it alone and in every pair.
OTHERS = [policy for policy in POLICIES if policy != "vram_elastic"]
SUBSETS = [(), *((policy,) for policy in OTHERS), *combinations(OTHERS, 2), POLICIES]
# A, a longer B, A again with a few tokens (so that cells are trimmed and A comes back), B again, A with more, a chat
ASKS = (
    Ask("a", tokens(44, 1)), Ask("b", tokens(200, 2)), Ask("a", tokens(9, 3), 24), Ask("b", tokens(40, 4)),
    Ask("a", tokens(30, 5)), Ask("c", tokens(8, 6), 64),
)  # fmt: skip


@pytest.fixture(scope="module")
def path(models: ModelStore) -> Path:
    """A model whose drafts are right some of the time."""
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL)


@pytest.fixture(scope="module")
def engines(path: Path) -> Engines:
    return Engines(path, spec_window=2)


def expected_kinds(policies: Sequence[str]) -> set[MoveKind]:
    """The moves that policies must have made in `ASKS`."""
    found: set[MoveKind] = set()
    if "borrow" in policies and "own" not in policies:
        found |= {MoveKind.LEND, MoveKind.RETURN, MoveKind.REFILL}
    if "own" in policies and "head_alias" not in policies:
        found |= {MoveKind.ALLOC_BUFFERS}
    if "head_alias" in policies:
        found |= {MoveKind.UNLOAD_HEAD, MoveKind.LOAD_HEAD}
        found |= set() if "own" in policies else {MoveKind.ALLOC_BUFFERS, MoveKind.FREE_BUFFERS}
    if "kv_grow" in policies:
        found |= {MoveKind.EVICT, MoveKind.MAP_CELLS, MoveKind.TRIM_CELLS, MoveKind.REFILL}
    if "conversations" in policies:
        found |= {MoveKind.PARK, MoveKind.RESTORE, MoveKind.CHECKPOINT}
    if "adaptive" in policies:
        found |= {MoveKind.EVICT, MoveKind.SWAP_EXPERT}
    if "vram_elastic" in policies:
        found |= {MoveKind.GIVE_SEGMENT, MoveKind.TAKE_SEGMENT, MoveKind.REFILL}
    if "under_loan" in policies:
        found |= {MoveKind.MOVE_EXPERT}
    return found


def change_vram(run: Run, wish: int | None) -> None:
    """Let other programs find so many bytes more than they do with the whole cache."""
    runtime, engine = run.runtime, run.runtime.engine
    if wish is None or "vram_elastic" not in runtime.stack.names:
        return
    whole = bytes_beyond_plan(engine.plan)
    runtime.vram_change(whole + wish)
    arena, sizes = engine.residency.layout, engine.residency.layout.array_pages
    away = sum(sizes[len(sizes) - runtime.state.segments_given :]) if runtime.state.segments_given else 0
    assert sum(x.nbytes for x in engine.arrays) == (arena.num_pages - away) * arena.page_bytes
    assert runtime.free_bytes() == whole + away * arena.page_bytes
    assert (wish > 0) == (away > 0)


WISHES = (1, None, 0, 1, None, None)  # after each of `ASKS`
UNDER_LOAN = [("kv_grow", "under_loan", "vram_elastic"), (*POLICIES, "under_loan")]


@pytest.mark.parametrize("policies", [*SUBSETS, *UNDER_LOAN], ids=lambda policies: "+".join(policies) or "baseline")
def test_no_policy_changes_a_bit(engines: Engines, policies: tuple[str, ...]) -> None:
    sink = Sink()
    run = start(engines, policies, sink)
    for ask, wish in zip(ASKS, WISHES, strict=True):
        run.serve(ask)
        change_vram(run, wish)
    assert run.differences == []
    kinds = sink.kinds()
    assert expected_kinds(policies) <= set(kinds)
    assert ("short_reads" in policies) == (run.windows > 0)
    assert ("conversations" in policies) == (run.reused[2] > 0)
    if "borrow" not in policies or "own" in policies:
        assert MoveKind.LEND not in kinds
    run.runtime.verify()


def test_runs_of_one_policy_are_the_same_move_by_move(engines: Engines) -> None:
    logs = []
    for _ in range(2):
        sink = Sink()
        run = start(engines, POLICIES, sink)
        for ask in ASKS[:4]:
            run.serve(ask)
        logs.append([(kind, values["bytes"], values["cause"]) for kind, values in sink.events if "cause" in values])
    assert logs[0] == logs[1]


def test_an_expert_that_comes_back_wrong_is_noticed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: where a refill copies other experts' bytes the logits differ."""
    run = start(engines, ("borrow",))
    run.serve(ASKS[0])
    assert run.differences == []
    copy = Engine.copy_experts

    def wrong(engine: Engine, fills: Any) -> int:
        return copy(engine, [replace(fill, expert=(fill.expert + 1) % NUM_EXPERTS) for fill in fills])

    monkeypatch.setattr(Engine, "copy_experts", wrong)
    run.serve(ASKS[1])
    assert run.differences


def test_lent_bytes_go_back_to_the_allocator_while_a_prompt_is_read(engines: Engines) -> None:
    run = start(engines, ("borrow", "head_alias"))
    engine, runtime = run.runtime.engine, run.runtime
    whole, seen = sum(x.nbytes for x in engine.arrays), []

    def on_chunk(record: Any) -> None:
        seen.append((sum(x.nbytes for x in engine.arrays), engine.weights.head is None, runtime.owners()))

    reading = runtime.read(ASKS[1].fresh, conversation="x", on_chunk=on_chunk)
    HEADS[id(engine)] = runtime.mover.head_copy
    lent, own = engine.plan.lent_bytes(engine.plan.lent_segments), runtime.stack.ctx.plan.prompt.own_bytes
    assert lent > 0
    assert own > 0
    assert len(seen) > 10
    for arrays, unloaded, owners in seen:
        assert (arrays, unloaded, owners[Owner.HEAD]) == (whole - lent, True, 0)
        assert owners[Owner.PROMPT_BUFFERS] == lent + own
    assert sum(x.nbytes for x in engine.arrays) == whole
    assert engine.weights.head is not None
    runtime.finish(reading)


def test_segments_go_and_come_back_as_far_as_the_loan_lets_them(engines: Engines) -> None:
    """More is wished for, then less: as few segments as that takes, the last ones first, the loan moving."""
    sink = Sink()
    run = start(engines, ("borrow", "vram_elastic"), sink)
    runtime, layout = run.runtime, run.runtime.engine.residency.layout
    sizes = [pages * layout.page_bytes for pages in layout.array_pages]
    loan = runtime.engine.plan.lent_bytes(runtime.engine.plan.lent_segments)
    arrays = runtime.engine.arrays
    seen: list[tuple[int, int]] = []
    totals: list[int] = []
    for ask, wish in zip(ASKS[:5], (1, 2**40, 2**40, 1, 0), strict=True):
        run.serve(ask)
        change_vram(run, wish)
        given = runtime.state.segments_given
        seen.append((given, runtime.state.slots.num_present))
        gc.collect()
        totals.append(sum(x.nbytes for x in jax.live_arrays()) + sum(sizes[len(sizes) - given :] if given else []))
    assert run.differences == []
    most = max(given for given, _ in seen)
    assert [given for given, _ in seen] == [1, most, most, 1, 0]
    assert most > 2
    assert sum(sizes[1 : len(sizes) - most]) >= loan > sum(sizes[1 : len(sizes) - most - 1])
    assert [present for _, present in seen][-1] == layout.num_slots
    assert all(x.is_deleted() for x in arrays[len(arrays) - most :])
    assert max(totals) - min(totals) < loan // 100, "what is given must leave the allocator, and nothing else"
    notes = [values["text"] for kind, values in sink.events if kind == "note"]
    assert sum("less than wished are free" in text for text in notes) == 2
    assert runtime.owners()[Owner.FREE] == 0


def test_programs_for_a_smaller_cache_are_compiled_when_segments_go(engines: Engines) -> None:
    policies = ("borrow", "vram_elastic")
    run = start(engines, policies, min_p=0.0)
    run.serve(ASKS[0])
    change_vram(run, 1)
    compiled = len(run.runtime.engine.programs.compiled)
    run.serve(ASKS[1])
    assert len(run.runtime.engine.programs.compiled) == compiled
    assert run.differences == []


FAULTS = [
    (MoveKind.EVICT, "prepared"), (MoveKind.MAP_CELLS, "prepared"), (MoveKind.TRIM_CELLS, "prepared"),
    (MoveKind.LEND, "prepared"), (MoveKind.LEND, "published"), (MoveKind.RETURN, "prepared"),
    (MoveKind.RETURN, "copied"), (MoveKind.REFILL, "copied"), (MoveKind.REFILL, "prepared"),
    (MoveKind.UNLOAD_HEAD, "prepared"), (MoveKind.UNLOAD_HEAD, "published"), (MoveKind.LOAD_HEAD, "prepared"),
    (MoveKind.LOAD_HEAD, "copied"), (MoveKind.PARK, "prepared"), (MoveKind.PARK, "copied"),
    (MoveKind.RESTORE, "prepared"), (MoveKind.RESTORE, "copied"), (MoveKind.CHECKPOINT, "prepared"),
    (MoveKind.CHECKPOINT, "copied"), (MoveKind.SWAP_EXPERT, "prepared"), (MoveKind.SWAP_EXPERT, "copied"),
    (MoveKind.GIVE_SEGMENT, "prepared"), (MoveKind.GIVE_SEGMENT, "published"), (MoveKind.TAKE_SEGMENT, "prepared"),
    (MoveKind.TAKE_SEGMENT, "copied"), (MoveKind.MOVE_EXPERT, "prepared"), (MoveKind.MOVE_EXPERT, "copied"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stage"), FAULTS, ids=lambda value: str(value))
def test_after_a_move_that_fails_requests_go_on_with_the_same_bits(
    engines: Engines, kind: MoveKind, stage: str
) -> None:
    policies = tuple(p for p in POLICIES if p != "own")
    policies += ("under_loan",) if kind is MoveKind.MOVE_EXPERT else ()
    armed = [False]

    def fault(at: MoveKind, where: str) -> None:
        if armed[0] and (at, where) == (kind, stage):
            armed[0] = False
            raise Injected

    run = start(engines, policies, fault=fault)
    run.serve(ASKS[0])
    run.serve(ASKS[1])
    armed[0], failed = True, 0
    changes = kind in (MoveKind.GIVE_SEGMENT, MoveKind.TAKE_SEGMENT)
    for ask, wish in zip(ASKS[2:], (1, 0, None, None), strict=True):
        try:
            run.serve(ask)
            change_vram(run, wish if changes else None)
        except Injected:
            failed += 1
            run.runtime.verify()
            run.histories.pop(ask.conversation, None)
            run.ops.pop(ask.conversation, None)
            run.serve(Ask(ask.conversation, tokens(50, 9)))
    assert failed == 1
    assert run.differences == []
    run.runtime.verify()
