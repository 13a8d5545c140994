"""Requests on an engine whose policies move memory, each compared bit by bit with one in which nothing moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from strata_jax.engine.engine import Engine
from strata_jax.engine.moves import Mover
from strata_jax.engine.residency import Fill
from strata_jax.engine.runtime import Runtime
from strata_jax.engine.session import Session
from strata_jax.engine.snapshots import state_hash
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.memory.request import MovingMemory, PlanRequest
from strata_jax.policies.device import NO_SWAPS, DeviceSettings
from strata_jax.policies.policy import AdaptSettings
from strata_jax.policies.prompt_segments import CheckpointRule, segments
from tests.engine.shared_programs import PROGRAMS
from tests.oracle.models import sample_tokens

POLICIES = ("borrow", "own", "head_alias", "kv_grow", "conversations", "adaptive", "short_reads", "vram_elastic")
SMALL: dict[str, object] = {"num_layers": 2, "full_attention_interval": 2, "ple_layer": 0}
NUM_BLOCKS, NUM_EXPERTS = 3, 16
REQUEST: dict[str, Any] = {
    "context_cells": 512, "chunk_tokens": 16, "kv_type": "f32", "page_bytes": 5120, "spec_window": 4,
}  # fmt: skip
RULE = CheckpointRule(every=64, root=32)
SHORT_TOKENS = 12
SEGMENT_BYTES = 500_000  # ten slots

Op = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Ask:
    """A request: a conversation, its fresh tokens, how many tokens come out."""

    conversation: str
    fresh: tuple[int, ...]
    output: int = 12


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(sample_tokens(seed, count, 512, 480))


class Injected(Exception):
    """The fault of a test."""


def planned(path: Path, policies: Sequence[str], spec_window: int = REQUEST["spec_window"]) -> MemoryPlan:
    moving = MovingMemory(
        lend="borrow" in policies,
        own="auto" if "own" in policies else "off",
        head_alias="head_alias" in policies,
        grow_init_cells=16 if "kv_grow" in policies else None,
        floor_slots=6,
        elastic_bytes=SEGMENT_BYTES if "vram_elastic" in policies else 0,
        resident_cells=104 if "residence" in policies else 0,
        conversation_bytes=64 * MIB if "conversations" in policies else 0,
        checkpoints=4 if "conversations" in policies else 0,
        replacement_decay=0.5 if "replacement" in policies else None,
    )
    geometry = Geometry.from_gguf(open_gguf(path))
    request = REQUEST | {"spec_window": spec_window}
    return plan(geometry, PlanRequest(**request, expert_slots=40, device_budget_bytes=2**30, moving=moving))


def settings_of(policies: Sequence[str]) -> DeviceSettings:
    return DeviceSettings(
        grow_anywhere="under_loan" not in policies,
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

    def __init__(self, path: Path, spec_window: int = REQUEST["spec_window"]) -> None:
        self.path, self.spec_window = path, spec_window
        self.kept: dict[Any, Engine] = {}
        geometry = Geometry.from_gguf(open_gguf(path))
        request = REQUEST | {"spec_window": spec_window}
        whole = plan(geometry, PlanRequest(**request, expert_slots=NUM_BLOCKS * NUM_EXPERTS))
        self.reference = Reference(Engine.load(open_gguf(path), geometry, whole, program_store=PROGRAMS))

    def get(self, policies: Sequence[str]) -> Engine:
        """An engine as loaded, with the plan of these policies."""
        made = planned(self.path, policies, self.spec_window)
        shape = made.arena, made.request.moving.replacement_decay
        if shape not in self.kept:
            file = open_gguf(self.path)
            self.kept[shape] = Engine.load(file, Geometry.from_gguf(file), made, program_store=PROGRAMS)
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
    if not layout.has_window:  # a window goes where the next sequence begins
        mover.trim_cells(layout.cells(layout.start_groups))
    mover.evict(range(layout.num_slots))
    mover.refill([Fill(*pair, slot) for slot, pair in enumerate(engine.plan.resident_pairs())])


HEADS: dict[int, Any] = {}


@dataclass
class Reference:
    """What a sequence of chunks and windows gives where every expert is resident.

    A decode operation is ``(max_tokens,)``, or ``(max_tokens, rounds)`` where it was left after so many records.
    """

    engine: Engine
    known: dict[tuple[Op, ...], tuple[bytes, tuple[int, ...], str]] = field(default_factory=dict)
    _session: Session | None = None
    _done: tuple[Op, ...] = ()

    def result(self, ops: tuple[Op, ...], output: int, rounds: int | None = None) -> tuple[bytes, tuple[int, ...], str]:
        """The first logits and the tokens after ``ops``, and a hash of the state after these."""
        last: Op = ("decode", (output,) if rounds is None else (output, rounds))
        if (*ops, last) not in self.known:
            session = self._replayed(ops)
            logits = session.last_logits()
            emitted = self._carry_out(session, last)
            self.known[*ops, last] = (logits.tobytes(), emitted, hash_of(session))
        return self.known[*ops, last]

    def state(self, ops: tuple[Op, ...]) -> str:
        """A hash of the state after ``ops``."""
        return hash_of(self._replayed(ops))

    def _replayed(self, ops: tuple[Op, ...]) -> Session:
        """A session after ``ops``: the last one goes on where it can, else they are done from the start."""
        session = self._session
        if session is None or self.engine.owner is not session or self._done != ops[: len(self._done)]:
            session, self._done = Session(self.engine), ()
        self._session = session
        for op in ops[len(self._done) :]:
            self._carry_out(session, op)
        return session

    def _carry_out(self, session: Session, op: Op) -> tuple[int, ...]:
        kind, ids = op
        emitted: tuple[int, ...] = ()
        if kind == "decode":
            records = session.decode(session.last_logits(), max_tokens=ids[0])
            rounds = ids[1] if len(ids) > 1 else None
            emitted = tuple(t for record in islice(records, rounds) for t in record.emitted)
        elif kind == "windows":
            session.read_windows(ids)
        else:
            list(session.chunks(ids))
        self._done += (op,)
        return emitted


def hash_of(session: Session) -> str:
    """A hash of everything that a session carries on the device and that later tokens can depend on."""
    return " ".join(f"{section}:{found}" for section, found in state_hash(session).items())


@dataclass
class Sink:
    """Events, counted."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def event(self, kind: str, **values: Any) -> None:
        self.events.append((kind, values))

    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, values in self.events if "cause" in values)


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
