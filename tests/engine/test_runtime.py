"""Policies at work on the engine: whatever moves, not a bit of what the model computes changes, and accounts agree."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.moves import Mover
from strata_jax.engine.residency import Fill
from strata_jax.engine.runtime import Runtime
from strata_jax.engine.session import Session
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.ledger import MIB, Owner
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.memory.request import MovingMemory, PlanRequest
from strata_jax.policies.device import NO_SWAPS, DeviceSettings
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.policy import AdaptSettings
from strata_jax.policies.prompt_segments import CheckpointRule, segments
from tests.oracle.models import ModelStore, sample_tokens

POLICIES = ("borrow", "own", "head_alias", "kv_grow", "conversations", "adaptive", "short_reads")
SUBSETS = [(), *(s for n in (1, 2) for s in combinations(POLICIES, n)), POLICIES]
SMALL: dict[str, object] = {"num_layers": 2, "full_attention_interval": 2, "ple_layer": 0}
NUM_BLOCKS, NUM_EXPERTS = 3, 16
REQUEST: dict[str, Any] = {
    "context_cells": 512, "chunk_tokens": 16, "kv_type": "f32", "page_bytes": 5120, "spec_window": 4,
}  # fmt: skip
RULE = CheckpointRule(every=64, root=32)
SHORT_TOKENS = 12

Op = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Ask:
    """A request: a conversation, its fresh tokens, how many tokens come out."""

    conversation: str
    fresh: tuple[int, ...]
    output: int = 12


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(sample_tokens(seed, count, 512, 480))


# A, a longer B, A again with a few tokens (so that cells are trimmed and A comes back), B again, A with more, a chat
ASKS = (
    Ask("a", tokens(44, 1)), Ask("b", tokens(200, 2)), Ask("a", tokens(9, 3), 24), Ask("b", tokens(40, 4)),
    Ask("a", tokens(30, 5)), Ask("c", tokens(8, 6), 64),
)  # fmt: skip


@pytest.fixture(scope="module")
def path(models: ModelStore) -> Path:
    """A model whose drafts are right some of the time."""
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL)


def planned(path: Path, policies: Sequence[str]) -> MemoryPlan:
    moving = MovingMemory(
        lend="borrow" in policies,
        own="auto" if "own" in policies else "off",
        head_alias="head_alias" in policies,
        grow_init_cells=16 if "kv_grow" in policies else None,
        floor_slots=6,
        conversation_bytes=64 * MIB if "conversations" in policies else 0,
        checkpoints=4 if "conversations" in policies else 0,
    )
    geometry = Geometry.from_gguf(open_gguf(path))
    return plan(geometry, PlanRequest(**REQUEST, expert_slots=40, device_budget_bytes=2**30, moving=moving))


def settings_of(policies: Sequence[str]) -> DeviceSettings:
    return DeviceSettings(
        grow_step_cells=16,
        request_margin_cells=16,
        round_margin_cells=8,
        alias_min_fresh_tokens=0,
        short_read_tokens=SHORT_TOKENS if "short_reads" in policies else 0,
        conversation_min_free_mib=1,
        adapt=AdaptSettings(every_rounds=2, least_usage=1.0, gap=0.5) if "adaptive" in policies else NO_SWAPS,
    )


class Engines:
    """Engines by the shape of their arena, and the resident one: compiled programs are the slow part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[Any, Engine] = {}
        geometry = Geometry.from_gguf(open_gguf(path))
        whole = plan(geometry, PlanRequest(**REQUEST, expert_slots=NUM_BLOCKS * NUM_EXPERTS))
        self.reference = Reference(Engine.load(open_gguf(path), geometry, whole))

    def get(self, policies: Sequence[str]) -> Engine:
        """An engine as loaded, with the plan of these policies."""
        made = planned(self.path, policies)
        shape = made.arena
        if shape not in self.kept:
            file = open_gguf(self.path)
            self.kept[shape] = Engine.load(file, Geometry.from_gguf(file), made)
        else:
            as_loaded(self.kept[shape])
        self.kept[shape].plan = made
        return self.kept[shape]


def as_loaded(engine: Engine) -> None:
    """Bring an engine back to how it was loaded."""
    engine.stopped = None
    mover, layout = Mover(engine, check=True), engine.residency.layout
    if engine.weights.head is None:
        mover.head_copy = HEADS[id(engine)]
        mover.load_head()
    mover.take_back(layout.num_segments - engine.residency.segments)
    mover.trim_cells(layout.cells(layout.start_groups))
    mover.evict(range(layout.num_slots))
    mover.refill([Fill(*pair, slot) for slot, pair in enumerate(engine.plan.resident_pairs())])


HEADS: dict[int, Any] = {}


@dataclass
class Reference:
    """What a sequence of chunks and windows gives where every expert is resident."""

    engine: Engine
    known: dict[tuple[Op, ...], tuple[bytes, tuple[int, ...], str]] = field(default_factory=dict)

    def result(self, ops: tuple[Op, ...], output: int) -> tuple[bytes, tuple[int, ...], str]:
        """The first logits and the tokens after ``ops``, and a hash of the state after these."""
        key = (*ops, ("decode", (output,)))
        if key not in self.known:
            session = Session(self.engine)
            for kind, ids in ops:
                if kind == "decode":
                    list(session.decode(session.last_logits(), max_tokens=ids[0]))
                elif kind == "windows":
                    session.read_windows(ids)
                else:
                    list(session.chunks(ids))
            logits = session.last_logits()
            emitted = [t for record in session.decode(logits, max_tokens=output) for t in record.emitted]
            self.known[key] = (logits.tobytes(), tuple(emitted), hash_of(session))
        return self.known[key]


def hash_of(session: Session) -> str:
    """A hash of everything that a session carries on the device besides its cells."""
    leaves = (np.asarray(x).tobytes() for x in jax.tree.leaves(session.state))
    return hashlib.sha256(b"".join(leaves)).hexdigest()


@dataclass
class Sink:
    """Events, counted."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def event(self, kind: str, **values: Any) -> None:
        self.events.append((kind, values))

    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, values in self.events if "cause" in values)


@pytest.fixture(scope="module")
def engines(path: Path) -> Engines:
    return Engines(path)


@dataclass
class Run:
    """Requests on a runtime, each compared with the reference."""

    runtime: Runtime
    reference: Reference
    histories: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ops: dict[str, list[tuple[Op, int]]] = field(default_factory=dict)  # with the length that each led to
    differences: list[str] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    windows: int = 0

    def serve(self, ask: Ask) -> None:
        runtime, who = self.runtime, ask.conversation
        prompt = (*self.histories.get(who, ()), *ask.fresh)
        turns = (len(prompt) - len(ask.fresh),) if who in self.histories else ()
        reading = runtime.read(prompt, conversation=who, turns=turns, output_tokens=ask.output)
        HEADS[id(runtime.engine)] = runtime.mover.head_copy
        reused = reading.facts.reused_tokens
        done = [(op, end) for op, end in self.ops.get(who, ()) if end <= reused]
        assert reused == (done[-1][1] if done else 0), "an unknown state was reused"
        for part in segments(len(prompt), turns, reused, runtime.rule):
            windows = runtime.stack.reads_by_windows(reading.facts, part.tokens)
            self.windows += windows
            done += [(("windows" if windows else "chunks", prompt[a:b]), b) for a, b in part.parts()]
        emitted = tuple(t for record in runtime.decode(reading, max_tokens=ask.output) for t in record.emitted)
        runtime.finish(reading)
        found = hash_of(reading.session)
        logits, expected, state = self.reference.result(tuple(op for op, _ in done), ask.output)
        if reading.first_logits.tobytes() != logits:
            self.differences.append(f"first logits of {who} after {len(prompt)} tokens")
        if emitted != expected:
            self.differences.append(f"tokens of {who} after {len(prompt)} tokens")
        if found != state:
            self.differences.append(f"state of {who} after {len(reading.session.tokens)} tokens")
        self.reused.append(reused)
        self.ops[who] = [*done, (("decode", (ask.output,)), len(reading.session.tokens))]
        self.histories[who] = (*reading.session.tokens, emitted[-1])


def start(engines: Engines, policies: Sequence[str], sink: Sink | None = None, **more: Any) -> Run:
    engine = engines.get(policies)
    runtime = Runtime.start(engine, settings_of(policies), rule=RULE, sink=sink, check=True, **more)
    HEADS[id(engine)] = runtime.mover.head_copy
    return Run(runtime, engines.reference)


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
    return found


@pytest.mark.parametrize("policies", SUBSETS, ids=lambda policies: "+".join(policies) or "baseline")
def test_no_policy_changes_a_bit(engines: Engines, policies: tuple[str, ...]) -> None:
    sink = Sink()
    run = start(engines, policies, sink)
    for ask in ASKS:
        run.serve(ask)
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
    lent, own = engine.plan.lent_bytes(len(engine.plan.segment_slots)), runtime.stack.ctx.plan.prompt.own_bytes
    assert lent > 0
    assert own > 0
    assert len(seen) > 10
    for arrays, unloaded, owners in seen:
        assert (arrays, unloaded, owners[Owner.HEAD]) == (whole - lent, True, 0)
        assert owners[Owner.PROMPT_BUFFERS] == lent + own
    assert sum(x.nbytes for x in engine.arrays) == whole
    assert engine.weights.head is not None
    runtime.finish(reading)


FAULTS = [
    (MoveKind.EVICT, "prepared"), (MoveKind.MAP_CELLS, "prepared"), (MoveKind.TRIM_CELLS, "prepared"),
    (MoveKind.LEND, "prepared"), (MoveKind.LEND, "published"), (MoveKind.RETURN, "prepared"),
    (MoveKind.RETURN, "copied"), (MoveKind.REFILL, "copied"), (MoveKind.REFILL, "prepared"),
    (MoveKind.UNLOAD_HEAD, "prepared"), (MoveKind.UNLOAD_HEAD, "published"), (MoveKind.LOAD_HEAD, "prepared"),
    (MoveKind.LOAD_HEAD, "copied"), (MoveKind.PARK, "prepared"), (MoveKind.PARK, "copied"),
    (MoveKind.RESTORE, "prepared"), (MoveKind.RESTORE, "copied"), (MoveKind.CHECKPOINT, "prepared"),
    (MoveKind.CHECKPOINT, "copied"), (MoveKind.SWAP_EXPERT, "prepared"), (MoveKind.SWAP_EXPERT, "copied"),
]  # fmt: skip


class Injected(Exception):
    """The fault of a test."""


@pytest.mark.parametrize(("kind", "stage"), FAULTS, ids=lambda value: str(value))
def test_after_a_move_that_fails_requests_go_on_with_the_same_bits(
    engines: Engines, kind: MoveKind, stage: str
) -> None:
    policies = tuple(p for p in POLICIES if p != "own")
    armed = [False]

    def fault(at: MoveKind, where: str) -> None:
        if armed[0] and (at, where) == (kind, stage):
            armed[0] = False
            raise Injected

    run = start(engines, policies, fault=fault)
    run.serve(ASKS[0])
    run.serve(ASKS[1])
    armed[0], failed = True, 0
    for ask in ASKS[2:]:
        try:
            run.serve(ask)
        except Injected:
            failed += 1
            run.runtime.verify()
            run.histories.pop(ask.conversation, None)
            run.ops.pop(ask.conversation, None)
            run.serve(Ask(ask.conversation, tokens(50, 9)))
    assert failed == 1
    assert run.differences == []
    run.runtime.verify()
