"""Random requests, faults, cancels and changes of RAM on an engine whose policies move memory.

Whatever happens, the next request gives the bits of an engine in which nothing moves, accounts agree, and nothing is
left behind when all conversations are gone. Which chunks and windows led to a state is recorded by its tokens; where
several sequences led to the same tokens, each of them is a legitimate state.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

import jax
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata_jax.engine.runtime import Reading, Runtime
from strata_jax.engine.session import ChunkRecord
from strata_jax.engine.snapshots import Checkpoint, Image
from strata_jax.errors import DoesNotFit
from strata_jax.memory.ledger import MIB
from strata_jax.policies.device import bytes_beyond_plan
from strata_jax.policies.moves import MoveKind
from strata_jax.policies.prompt_segments import segments
from tests.engine.policy_runs import (
    HEADS,
    POLICIES,
    REQUEST,
    RULE,
    Engines,
    Injected,
    Op,
    hash_of,
    settings_of,
    tokens,
)

NAMES = ("a", "b", "c", "d", "e", "f")  # more than may be parked
CONTEXT, CHUNK = REQUEST["context_cells"], REQUEST["chunk_tokens"]
OF_THE_STORE = (MoveKind.PARK, MoveKind.RESTORE, MoveKind.CHECKPOINT)  # they never take the arena with them

Point = tuple[MoveKind, str]
Ops = tuple[Op, ...]

# where moves can fail
STAGES: dict[MoveKind, tuple[str, ...]] = {
    MoveKind.EVICT: ("prepared",), MoveKind.MAP_CELLS: ("prepared",), MoveKind.TRIM_CELLS: ("copied", "prepared"),
    MoveKind.LEND: ("prepared", "published"), MoveKind.RETURN: ("prepared", "copied"),
    MoveKind.REFILL: ("copied", "prepared"), MoveKind.SWAP_EXPERT: ("prepared", "copied"),
    MoveKind.MOVE_EXPERT: ("prepared", "copied"), MoveKind.UNLOAD_HEAD: ("prepared", "published"),
    MoveKind.LOAD_HEAD: ("prepared", "copied"), MoveKind.PARK: ("prepared", "copied"),
    MoveKind.RESTORE: ("prepared", "copied"), MoveKind.CHECKPOINT: ("prepared", "copied"),
    MoveKind.GIVE_SEGMENT: ("prepared", "published"), MoveKind.TAKE_SEGMENT: ("prepared", "copied"),
    MoveKind.SPILL_CELLS: ("copied", "prepared"), MoveKind.FETCH_CELLS: ("copied", "prepared"),
}  # fmt: skip
FAULT_POINTS: tuple[Point, ...] = tuple((kind, stage) for kind, stages in STAGES.items() for stage in stages)
MOVING = tuple(policy for policy in POLICIES if policy != "own")  # own buffers leave a loan nothing to do
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "all": MOVING,
    "under the loan": (*MOVING, "under_loan"),
    "residence": (*(policy for policy in MOVING if policy != "kv_grow"), "residence"),
}


class Cancelled(Exception):
    """The one who asked has gone."""


@dataclass
class Faults:
    """Faults to come: each at the n-th point from the one before, or the n-th time at one kind of point."""

    tally: Tally
    runtime: Runtime | None = None
    plan: list[tuple[int, Point | None, bool]] = field(default_factory=list)

    def __call__(self, kind: MoveKind, stage: str) -> None:
        self.tally.points[kind, stage] += 1
        if not self.plan:
            return
        left, point, loses = self.plan[0]
        if (point is not None and point != (kind, stage)) or (loses and kind in OF_THE_STORE):
            return
        if left > 1:
            self.plan[0] = (left - 1, point, loses)
            return
        self.plan.pop(0)
        self.tally.faults[kind, stage] += 1
        if loses and self.runtime is not None:
            self.runtime.engine.arena.delete()
        raise Injected(f"{kind} {stage}")


@dataclass
class Tally:
    """What has been done and found, over all runs of a machine."""

    operations: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)  # by how they ended
    moves: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)  # by source
    points: Counter[Point] = field(default_factory=Counter)
    faults: Counter[Point] = field(default_factory=Counter)
    runtimes: int = 0
    stops: int = 0
    compared: int = 0
    differences: int = 0
    arrays_left: int = 0
    bytes_left: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def event(self, kind: str, **values: object) -> None:
        if "cause" in values:
            self.moves[kind] += 1


@dataclass(frozen=True)
class Ask:
    """A request of the machine.

    Attributes:
        of: whose tokens it begins with, and which share of them in eighths; a prompt that does not fit begins anew.
        cancel_at: the chunk after which the one who asked goes away. leave_after: records after which decoding is left.
        faults: see `Faults.plan`.
    """

    who: str
    of: tuple[str, int]
    fresh: tuple[int, ...]
    output: int
    cancel_at: int | None = None
    leave_after: int | None = None
    finishes: bool = True
    faults: tuple[tuple[int, Point | None, bool], ...] = ()


@dataclass
class Agents:
    """Conversations on one runtime, each request compared with the reference."""

    engines: Engines
    policies: Sequence[str]
    tally: Tally

    def __post_init__(self) -> None:
        self.histories: dict[str, tuple[int, ...]] = {}
        self.paths: dict[tuple[int, ...], list[Ops]] = {(): [()]}
        self.available: int | None = 64 * MIB
        self.start()
        self.serve(Ask("first", ("first", 0), tokens(20, 1), 8))
        gc.collect()
        self.rest = self.live_arrays()

    def start(self) -> None:
        """A runtime at its start; where the engine has stopped, a new one."""
        shape = next((s for s, e in self.engines.kept.items() if e.stopped is not None), None)
        lost = None if shape is None else self.engines.kept.pop(shape)
        engine = self.engines.get(self.policies)
        if lost is not None:
            HEADS.pop(id(lost), None)
            engine.programs.compiled.update(lost.programs.compiled)
        self.faults = Faults(self.tally)
        self.runtime = Runtime.start(
            engine, settings_of(self.policies), rule=RULE, sink=self.tally, check=True, fault=self.faults,
            available_ram=lambda: self.available,
        )  # fmt: skip
        self.faults.runtime = self.runtime
        HEADS[id(engine)] = self.runtime.mover.head_copy
        self.tally.runtimes += 1

    # --- requests

    def serve(self, ask: Ask) -> None:
        """Carry a request out as far as it gets, then compare what it gave and left."""
        self.sound, runtime = False, self.runtime
        prompt = self.prompt(ask)
        turns = (len(prompt) - len(ask.fresh),) if len(prompt) > len(ask.fresh) else ()
        reused = runtime.store.match(prompt).tokens
        starts = self.paths.get(prompt[:reused])
        assert starts is not None, f"{reused} tokens of {ask.who} were reused, which no request has read"
        done: Ops = ()
        self.faults.plan = list(ask.faults)
        try:
            reading = runtime.read(
                prompt, conversation=ask.who, turns=turns, output_tokens=ask.output, on_chunk=cancel_at(ask.cancel_at)
            )
            assert reading.facts.reused_tokens == reused
            self.tally.reused[reading.source] += 1
            done = self.read_ops(prompt, turns, reading)
            ending = self.decode(ask, reading, starts, done)
        except (Injected, Cancelled) as error:
            ending = type(error).__name__.lower()
            self.stopped_reading(prompt, turns, reused, starts)
        self.faults.plan = []
        self.tally.requests[ending] += 1
        self.tally.prompt_tokens += len(prompt) - reused
        HEADS[id(runtime.engine)] = runtime.mover.head_copy
        self.sound = True

    def vram(self, wish: int, faults: Sequence[tuple[int, Point | None, bool]] = ()) -> None:
        """Other programs want so many bytes more than they find with the whole cache."""
        self.sound, self.faults.plan = False, list(faults)
        with suppress(Injected):
            self.runtime.vram_change(bytes_beyond_plan(self.runtime.engine.plan) + wish)
        self.faults.plan, self.sound = [], True

    def prompt(self, ask: Ask) -> tuple[int, ...]:
        of, eighths = ask.of
        history = self.histories.get(of, ())
        history = history[: len(history) * eighths // 8]
        return (*history, *ask.fresh) if len(history) + len(ask.fresh) <= CONTEXT else ask.fresh

    def read_ops(self, prompt: tuple[int, ...], turns: tuple[int, ...], reading: Reading) -> Ops:
        done, reused = list[Op](), reading.facts.reused_tokens
        for part in segments(len(prompt), turns, reused, self.runtime.rule):
            windows = self.runtime.stack.reads_by_windows(reading.facts, part.tokens)
            for first, last in part.parts():
                done.append(("windows" if windows else "chunks", prompt[first:last]))
                self.note(prompt[:last], [(*start, *done) for start in self.paths[prompt[:reused]]])
        return tuple(done)

    def decode(self, ask: Ask, reading: Reading, starts: list[Ops], done: Ops) -> str:
        """Decode, compare with each state that the reused tokens may have had, keep those that agree."""
        runtime, session, emitted, records = self.runtime, reading.session, list[int](), 0
        failed = False
        steps = runtime.decode(reading, max_tokens=ask.output)
        try:
            for record in steps:
                emitted += record.emitted
                records += 1
                if records == ask.leave_after:
                    break
            if ask.finishes or records != ask.leave_after:
                runtime.finish(reading)
        except Injected:
            failed = True
        steps.close()
        if runtime.engine.stopped is not None:
            return "injected"
        ended = not failed and records != ask.leave_after
        rounds = None if ended else records
        if records == 0:
            return "injected"
        found = (reading.first_logits.tobytes(), tuple(emitted), hash_of(session))
        expected = {start: self.engines.reference.result((*start, *done), ask.output, rounds) for start in starts}
        agreed = [start for start, what in expected.items() if what == found]
        self.tally.differences += not agreed
        assert agreed, self.differences(ask, found, list(expected.values()))
        self.tally.compared += 1
        self.tally.output_tokens += len(emitted)
        last: Op = ("decode", (ask.output,) if rounds is None else (ask.output, rounds))
        self.note(tuple(session.tokens), [(*start, *done, last) for start in agreed])
        self.histories[ask.who] = (*session.tokens, emitted[-1])
        return "injected" if failed else "left" if rounds else "whole"

    def stopped_reading(self, prompt: tuple[int, ...], turns: tuple[int, ...], reused: int, starts: list[Ops]) -> None:
        """Note and compare the state that a prompt has been left in."""
        runtime, live = self.runtime, self.runtime.store.live
        if runtime.engine.stopped is not None or live is None:
            return
        now = tuple(live.session.tokens)
        if now == prompt[: len(now)] and len(now) >= reused:
            done: list[Op] = []
            for first, last in (p for part in segments(len(prompt), turns, reused, runtime.rule) for p in part.parts()):
                part = prompt[first : min(last, len(now))]
                windows = bool(part) and self.by_windows(prompt, turns, reused, first)
                done += [("windows" if windows else "chunks", part)] if part else []
                self.note(prompt[: min(last, len(now))], [(*start, *done) for start in starts])
        assert now in self.paths, f"the live session has {len(now)} tokens that no request has read"
        found = hash_of(live.session)
        assert any(self.engines.reference.state(ops) == found for ops in self.paths[now]), "state after a failure"
        self.tally.compared += 1

    def by_windows(self, prompt: tuple[int, ...], turns: tuple[int, ...], reused: int, first: int) -> bool:
        part = next(s for s in segments(len(prompt), turns, reused, self.runtime.rule) if s.start <= first < s.end)
        return "short_reads" in self.policies and part.tokens <= self.runtime.stack.ctx.plan.request.short_read_tokens

    def note(self, reached: tuple[int, ...], ways: list[Ops]) -> None:
        known = self.paths.setdefault(reached, [])
        known += [way for way in ways if way not in known]

    def differences(self, ask: Ask, found: tuple, expected: list[tuple]) -> str:
        names = ("first logits", "tokens", "state")
        wrong = [[name for name, a, b in zip(names, found, one, strict=True) if a != b] for one in expected]
        return f"{ask} differs from the reference in {wrong}"

    # --- accounts

    def check(self) -> None:
        """Accounts agree, or the engine says that it has stopped and a new one is started."""
        self.sound = False
        if self.runtime.engine.stopped is not None:
            self.tally.stops += 1
            self.start()
        engine, store = self.runtime.engine, self.runtime.store
        self.runtime.verify()
        whole = engine.residency.num_present == engine.residency.num_slots and engine.weights.head is not None
        if whole and store.live is not None:
            found = self.live_arrays()
            if found != self.rest:
                gc.collect()
                found = self.live_arrays()
            assert found == self.rest, f"{found} live arrays and bytes at rest; at the start there were {self.rest}"
        self.sound = True

    def live_arrays(self) -> tuple[int, int]:
        """How many arrays there are, and their bytes."""
        arrays = jax.live_arrays()
        return len(arrays), sum(x.nbytes for x in arrays)

    def leave(self) -> None:
        """Drop all conversations: neither arrays nor stored states are left."""
        runtime = self.runtime
        self.faults.plan, self.available = [], None
        self.vram(0)
        for name in [conversation.name for conversation in runtime.store.parked]:
            runtime.store.pin(name, False)
            runtime.store.drop(name)
        self.serve(Ask("last", ("last", 0), tokens(20, 3), 8))
        self.check()
        assert runtime.store.parked == ()
        gc.collect()
        live = runtime.store.live
        assert live is not None
        found = self.live_arrays()
        self.tally.arrays_left += abs(found[0] - self.rest[0])
        self.tally.bytes_left += abs(found[1] - self.rest[1])
        assert found == self.rest, f"{found} live arrays and bytes at the end; at the start there were {self.rest}"
        stored = [x for x in gc.get_objects() if isinstance(x, (Checkpoint, Image))]
        assert len(stored) == len(live.checkpoints), f"{len(stored)} stored states are left"
        assert runtime.store.host_bytes() == sum(c.bytes for c in live.checkpoints)


def cancel_at(chunk: int | None) -> Callable[[ChunkRecord], None]:
    """Raises after the n-th chunk of a prompt."""
    left = [chunk]

    def on_chunk(record: ChunkRecord) -> None:
        if left[0] is not None:
            left[0] -= 1
            if left[0] <= 0:
                raise Cancelled

    return on_chunk


NTH = st.tuples(st.integers(1, 14), st.none(), st.just(False))
AT_A_POINT = st.tuples(st.integers(1, 2), st.sampled_from(FAULT_POINTS), st.just(False))
LOSING = st.tuples(st.integers(1, 9), st.none(), st.just(True))
FRESH = st.one_of(st.integers(1, 12), st.integers(13, 60), st.integers(61, 200))


class Machine(RuleBasedStateMachine):
    """Agents in hypothesis's hands."""

    engines: ClassVar[Engines]
    policies: ClassVar[Sequence[str]]
    tally: ClassVar[Tally]

    @initialize()
    def begin(self) -> None:
        self.refused = 0
        self.agents = Agents(self.engines, self.policies, self.tally)

    def ask(self, what: str, who: str, count: int, seed: int, output: int, **more: object) -> None:
        self.tally.operations[what] += 1
        of = more.pop("of", (who, 8))
        self.agents.serve(Ask(who, of, tokens(max(count, 8), seed)[:count], output, **more))  # type: ignore[arg-type]

    WHO, SEED, OUTPUT = st.sampled_from(NAMES), st.integers(2, 40), st.integers(1, 24)

    @rule(who=WHO, count=FRESH, seed=SEED, output=OUTPUT)
    def goes_on(self, who: str, count: int, seed: int, output: int) -> None:
        self.ask("go on", who, count, seed, output)

    @rule(who=WHO, count=FRESH, seed=SEED, output=OUTPUT, of=st.tuples(WHO, st.integers(0, 8)))
    def branches(self, who: str, count: int, seed: int, output: int, of: tuple[str, int]) -> None:
        self.ask("branch", who, count, seed, output, of=of)

    @rule(who=WHO, count=st.integers(20, 200), seed=SEED, output=OUTPUT, chunk=st.integers(1, 8), faults=st.lists(
        NTH, max_size=1))  # fmt: skip
    def cancels_a_prompt(self, who: str, count: int, seed: int, output: int, chunk: int, faults: list) -> None:
        self.ask("cancel", who, count, seed, output, cancel_at=chunk, faults=tuple(faults))

    @rule(who=WHO, count=FRESH, seed=SEED, output=st.integers(8, 64), leave=st.integers(1, 8), finishes=st.booleans())
    def leaves_decoding(self, who: str, count: int, seed: int, output: int, leave: int, finishes: bool) -> None:
        self.ask("leave", who, count, seed, output, leave_after=leave, finishes=finishes)

    @rule(who=WHO, count=FRESH, seed=SEED, output=OUTPUT, faults=st.lists(
        st.one_of(NTH, AT_A_POINT, AT_A_POINT, LOSING), min_size=1, max_size=2))  # fmt: skip
    def meets_faults(self, who: str, count: int, seed: int, output: int, faults: list) -> None:
        self.ask("fault", who, count, seed, output, faults=tuple(faults))

    @rule(mib=st.sampled_from((None, 0, 1, 2, 64)))
    def ram_changes(self, mib: int | None) -> None:
        self.tally.operations["ram"] += 1
        self.agents.available = None if mib is None else mib * MIB

    @rule(wish=st.sampled_from((0, 0, 1, 500_000, 2**40)), faults=st.lists(st.tuples(
        st.integers(1, 4), st.none(), st.booleans()), max_size=1))  # fmt: skip
    def others_want_memory(self, wish: int, faults: list) -> None:
        self.tally.operations["vram"] += 1
        self.agents.vram(wish, faults)

    @rule(who=WHO, pinned=st.booleans())
    def pins(self, who: str, pinned: bool) -> None:
        self.tally.operations["pin"] += 1
        self.agents.runtime.store.pin(who, pinned)

    @rule(who=WHO)
    def drops(self, who: str) -> None:
        self.tally.operations["drop"] += 1
        self.agents.runtime.store.drop(who)

    @precondition(lambda self: self.refused < 2)
    @rule(count=st.integers(CONTEXT + 1, CONTEXT + 50))
    def asks_too_much(self, count: int) -> None:
        self.tally.operations["too long"] += 1
        self.refused += 1
        before = self.agents.runtime.state
        try:
            self.agents.runtime.read(tokens(count, 1), conversation="g")
        except DoesNotFit:
            assert self.agents.runtime.state is before
        else:
            raise AssertionError(f"{count} tokens fit into {CONTEXT} cells")

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "agents"):
            self.agents.check()

    def teardown(self) -> None:
        if hasattr(self, "agents"):
            agents = self.agents
            del self.agents
            if agents.sound:
                agents.leave()
            else:  # what has been found holds on to the engine
                agents.engines.kept.clear()
