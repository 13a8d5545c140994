"""Plans small enough to step through, a driver of requests, and a ledger that knows nothing but moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from strata_jax.memory.ledger import MIB, Owner
from strata_jax.memory.strata.plan import plan_strata
from strata_jax.memory.strata.request import Card, GrowSettings, StrataRequest
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.policies.invariants import check_state
from strata_jax.policies.ledger_now import overcommit_bytes, owner_bytes
from strata_jax.policies.moves import Move, MoveKind
from strata_jax.policies.policy import PolicyParameters
from strata_jax.policies.stack import PolicyStack, policy_stack
from strata_jax.policies.state import MemoryState, RequestFacts, Step
from strata_jax.presets import preset_geometry

RAM = 200 * 1024 * MIB
GROW = GrowSettings(enabled=True)


def sizes_of(quant: str = "iq2_xs") -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", quant))


def card(vram_mib: int = 16_384, **changes: Any) -> Card:
    given = {"taken_bytes": 1_000 * MIB, "ram_bytes": RAM, "ram_available_bytes": RAM, **changes}
    return Card(name="test card", vram_bytes=vram_mib * MIB, **given)


@lru_cache(maxsize=64)
def make_plan(quant: str = "iq2_xs", on: Card | None = None, request: StrataRequest | None = None) -> StrataPlan:
    return plan_strata(sizes_of(quant), on or card(), request or StrataRequest())


def make_stack(
    quant: str = "iq2_xs", on: Card | None = None, *, parameters: PolicyParameters | None = None, **settings: Any
) -> PolicyStack:
    return policy_stack(sizes_of(quant), make_plan(quant, on, StrataRequest(**settings)), parameters=parameters)


def ready(stack: PolicyStack) -> MemoryState:
    return checked(stack, stack.on_start(stack.initial_state())).state


def ask(
    name: str, prompt: int, *, reused: int = 0, output: int = 0, switches: bool = False, **more: Any
) -> RequestFacts:
    return RequestFacts(name, name, prompt, output, reused, prompt - reused, switches, **more)


def checked(stack: PolicyStack, step: Step) -> Step:
    """Return the step; its state must keep every invariant."""
    check_state(stack.ctx.sizes, stack.ctx.plan, step.state)
    return step


def serve(stack: PolicyStack, state: MemoryState, facts: RequestFacts) -> Step:
    """Run one whole request through the hooks, checking every state on the way."""
    step = checked(stack, stack.on_request(state, facts))
    step = step.then(checked(stack, stack.before_read(step.state, facts, facts.fresh_tokens)))
    step = step.then(checked(stack, stack.after_read(step.state, facts)))
    end = facts.prompt_tokens + facts.output_tokens
    for position in range(facts.prompt_tokens, end + 1, max(1, facts.output_tokens // 4)):
        step = step.then(checked(stack, stack.before_round(step.state, position, 4)))
    return step.then(checked(stack, stack.after_request(step.state, facts, end)))


def kinds(moves: Iterable[Move]) -> list[MoveKind]:
    return [move.kind for move in moves]


def one(moves: Iterable[Move], kind: MoveKind) -> Move:
    (found,) = [move for move in moves if move.kind is kind]
    return found


def detail(move: Move, name: str) -> int:
    return dict(move.detail)[name]


def fingerprint(state: MemoryState) -> tuple[Any, ...]:
    """Everything of a state as values, to see that nothing was changed in place."""
    plain = replace(state, slots=None, usage=None)  # type: ignore[arg-type]
    parts = [getattr(plain, name) for name in type(plain).__slots__ if name not in ("slots", "usage")]
    usage = b"" if state.usage is None else state.usage.tobytes()
    table = state.slots
    return (
        *parts, usage, table.occupant.tobytes(), table.low, table.top, table.end, table.unmapped_from,
        table.unmapped_chunks,
    )  # fmt: skip


class MoveLedger:
    """Device memory by owner, changed by moves alone: what an executor would count."""

    def __init__(self, stack: PolicyStack, state: MemoryState) -> None:
        self.stack = stack
        owners = owner_bytes(stack.ctx.sizes, stack.ctx.plan, state)
        self.slots, self.kv = owners[Owner.EXPERT_SLOTS], owners[Owner.KV]
        self.buffers, self.head = owners[Owner.PROMPT_BUFFERS], owners[Owner.HEAD]
        self.free = owners[Owner.FREE] - overcommit_bytes(state)
        self.parked = sum(c.bytes for c in state.parked)

    def apply(self, moves: Iterable[Move]) -> None:
        for move in moves:
            parts = dict(move.detail)
            match move.kind:
                case MoveKind.LEND:
                    self.slots, self.buffers = self.slots - move.bytes, self.buffers + move.bytes
                case MoveKind.RETURN:
                    self.slots, self.buffers = self.slots + move.bytes, self.buffers - move.bytes
                case MoveKind.ALLOC_BUFFERS:
                    self.free, self.buffers = self.free - move.bytes, self.buffers + move.bytes
                case MoveKind.FREE_BUFFERS:
                    self.free, self.buffers = self.free + move.bytes, self.buffers - move.bytes
                case MoveKind.UNLOAD_HEAD:
                    self.free, self.head = self.free + move.bytes, self.head - move.bytes
                case MoveKind.LOAD_HEAD:
                    self.free, self.head = self.free - move.bytes, self.head + move.bytes
                case MoveKind.EVICT:
                    given = parts.get("unmapped_bytes", 0)
                    self.slots, self.kv = self.slots - given, self.kv + given
                case MoveKind.MAP_CELLS:
                    assert move.bytes == parts["spare_bytes"] + parts["new_bytes"]
                    self.free, self.kv = self.free - parts["new_bytes"], self.kv + parts["new_bytes"]
                case MoveKind.TRIM_CELLS:
                    assert move.bytes == parts["slot_bytes"] + parts["free_bytes"] + parts["spare_bytes"]
                    self.slots, self.free = self.slots + parts["slot_bytes"], self.free + parts["free_bytes"]
                    self.kv -= parts["slot_bytes"] + parts["free_bytes"]
                case MoveKind.GIVE_SEGMENT:
                    self.slots, self.free = self.slots - move.bytes, self.free + move.bytes
                case MoveKind.TAKE_SEGMENT:
                    self.slots, self.free = self.slots + move.bytes, self.free - move.bytes
                case MoveKind.PARK:
                    self.parked += move.bytes
                case MoveKind.DROP:
                    self.parked -= move.bytes
                case MoveKind.RESTORE:
                    self.parked -= parts["image_bytes"]

    def check(self, state: MemoryState) -> None:
        owners = owner_bytes(self.stack.ctx.sizes, self.stack.ctx.plan, state)
        assert owners[Owner.EXPERT_SLOTS] == self.slots
        assert owners[Owner.KV] == self.kv
        assert owners[Owner.PROMPT_BUFFERS] == self.buffers
        assert owners[Owner.HEAD] == self.head
        assert owners[Owner.FREE] - overcommit_bytes(state) == self.free
        assert sum(c.bytes for c in state.parked) == self.parked


def spread(values: np.ndarray) -> set[int]:
    return {int(v) for v in values}
