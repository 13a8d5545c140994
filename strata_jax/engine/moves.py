"""Moves of memory, carried out on the device: each changes the tables in one step or not at all.

A move prepares (checks the tables it leads to, makes arrays, copies bytes to where no table points), then publishes the
new tables, then frees what they no longer name. What fails before the publication leaves everything as it was; where
bytes must go that a table names (swaps), the tables without these experts are published first, and a failure leaves
those. A failure that takes an array of the arena with it stops the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from strata_jax.engine.cell_store import fetch_pages, spill_pages
from strata_jax.engine.cell_window import slid
from strata_jax.engine.engine import Engine, bank_sharding, new_pages
from strata_jax.engine.matrix import Matrix
from strata_jax.engine.move_report import RELEASE_S, MoveDone, check_change, device_change
from strata_jax.engine.residency import Fill, PageMove, Residency
from strata_jax.engine.rounds import withdraw
from strata_jax.engine.session import Session
from strata_jax.errors import ConfigError, DoesNotFit
from strata_jax.memory.ledger import MIB, Owner
from strata_jax.policies.moves import MoveKind

PAGES_PER_MOVE = 16  # K/V pages that one program moves


@dataclass
class _Job:
    """What a move has done so far."""

    bytes: int = 0
    count: int = 0
    copied: bool = False
    started_s: float = field(default_factory=time.perf_counter)


def _ignore(done: MoveDone) -> None:
    """Report nothing."""


def _no_fault(kind: MoveKind, stage: str) -> None:
    """Let a move go on."""


@dataclass
class Mover:
    """Carries out moves on an engine while no program runs.

    Attributes:
        on_move: is told of every move once it is done.
        fault: is called with the move and ``"copied"`` (some bytes are), ``"prepared"`` (tables are about to change) or
            ``"published"`` (they have) when it gets there; what it raises fails the move. For tests.
        check: verify the tables after every move.
    """

    engine: Engine
    on_move: Callable[[MoveDone], None] = _ignore
    fault: Callable[[MoveKind, str], None] = _no_fault
    check: bool = False
    head_copy: Matrix | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.engine.mover = self

    # --- experts

    def evict(self, slots: Sequence[int], cause: str = "") -> tuple[Fill, ...]:
        """Empty slots; returns the experts that were in them."""
        engine = self.engine
        with self._move(MoveKind.EVICT, Owner.EXPERT_SLOTS, cause) as job:
            gone = engine.residency.residents(slots)
            job.bytes, job.count = engine.residency.slot_bytes(fill.slot for fill in gone), len(gone)
            self._publish(MoveKind.EVICT, engine.residency.evicted(slots))
        return gone

    def refill(self, fills: Sequence[Fill], cause: str = "") -> None:
        """Copy experts from the bank into empty slots."""
        engine = self.engine
        with self._move(MoveKind.REFILL, Owner.EXPERT_SLOTS, cause) as job:
            new = engine.residency.filled(fills)
            self._copy(MoveKind.REFILL, fills, job)
            self._publish(MoveKind.REFILL, new)

    def swap_experts(self, fills: Sequence[Fill], cause: str = "") -> tuple[Fill, ...]:
        """Copy experts from the bank into slots that others leave; returns those others."""
        engine = self.engine
        slots = [fill.slot for fill in fills]
        gone = engine.residency.residents(slots)
        with self._move(MoveKind.SWAP_EXPERT, Owner.EXPERT_SLOTS, cause) as job:
            before, without = engine.residency, engine.residency.evicted(slots)
            new = without.filled(fills)
            with self._emptied(MoveKind.SWAP_EXPERT, before, without, gone):
                self._copy(MoveKind.SWAP_EXPERT, fills, job)
                self._publish(MoveKind.SWAP_EXPERT, new)
        return gone

    def move_experts(self, pairs: Sequence[tuple[int, int]], cause: str = "") -> tuple[Fill, ...]:
        """Copy experts from slot to slot, ``(from, to)``, on the device; returns those that had to leave for them."""
        engine = self.engine
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        if set(sources) & set(targets) or len({*sources, *targets}) < 2 * len(pairs):
            raise ValueError(f"every slot takes part in one move only: {pairs}")
        gone = engine.residency.residents(targets)
        with self._move(MoveKind.MOVE_EXPERT, Owner.EXPERT_SLOTS, cause) as job:
            before, without = engine.residency, engine.residency.evicted(targets)
            moved = without.residents(sources)
            if len(moved) < len(pairs):
                raise ValueError(f"an empty slot has no expert to move: {pairs}")
            fills = [Fill(fill.layer, fill.expert, target) for fill, target in zip(moved, targets)]
            new = without.evicted(sources).filled(fills)
            with self._emptied(MoveKind.MOVE_EXPERT, before, without, gone):
                for fill, source in zip(fills, sources):
                    job.bytes += self._copy_slot(fill, source)
                job.count, job.copied = len(fills), True
                self._wait()
                self.fault(MoveKind.MOVE_EXPERT, "copied")
                self._publish(MoveKind.MOVE_EXPERT, new)
        return gone

    # --- segments

    def lend(self, num_segments: int, cause: str = "", kind: MoveKind = MoveKind.LEND) -> tuple[Fill, ...]:
        """Give the last segments back to the allocator; returns the experts that were in them, for `refill`.

        Args:
            kind: how the move is reported: `MoveKind.GIVE_SEGMENT` where it is for good.
        """
        engine = self.engine
        with self._move(kind, Owner.EXPERT_SLOTS, cause) as job:
            before = engine.residency
            slots, new = before.last_slots(num_segments), before.lent(num_segments)
            gone = before.residents(slots)
            job.bytes, job.count = before.slot_bytes(slots), num_segments
            self._publish(kind, new)
            try:
                self.fault(kind, "published")
                self._wait()  # steps under way still read the segments
            except BaseException:
                engine.publish(before)
                raise
            kept, deleted = engine.segments[: new.segments], engine.segments[new.segments :]
            engine.segments = kept
            for array in deleted:
                array.delete()
        return gone

    def take_back(self, num_segments: int, cause: str = "", kind: MoveKind = MoveKind.RETURN) -> range:
        """Make the next segments again, empty; returns their slots.

        Raises:
            DoesNotFit: the allocator does not have the bytes; the segments stay lent.
        """
        engine = self.engine
        with self._move(kind, Owner.EXPERT_SLOTS, cause) as job:
            old = engine.residency
            slots, new = old.next_slots(num_segments), old.taken_back(num_segments)
            job.bytes, job.count = old.slot_bytes(slots), num_segments
            self.fault(kind, "prepared")
            made: list[jax.Array] = []
            try:
                for pages in old.layout.array_pages[1 + old.segments : 1 + new.segments]:
                    with _device_memory(pages * old.layout.page_bytes, "a segment of the arena"):
                        made.append(new_pages(pages, old.layout.page_bytes).block_until_ready())
                    self.fault(kind, "copied")
                engine.publish(new)
            except BaseException:
                for array in made:
                    array.delete()
                raise
            engine.segments = (*engine.segments, *made)
        return slots

    # --- K/V cells

    def map_cells(self, cells: int, paying: Sequence[int] = (), cause: str = "") -> tuple[Fill, ...]:
        """Map at least ``cells`` cells onto free pages and those of the slots that pay; returns the slots' experts.

        `Residency.slots_to_pay` says how many slots of an order are enough.
        """
        engine = self.engine
        with self._move(MoveKind.MAP_CELLS, Owner.KV, cause) as job:
            before = engine.residency
            gone, new = before.residents(paying), before.mapped(cells, paying)
            pages = (new.mapped_groups - before.mapped_groups) * len(new.kv_pages)
            job.bytes, job.count = pages * before.layout.page_bytes, new.mapped_cells - before.mapped_cells
            self._publish(MoveKind.MAP_CELLS, new)
        return gone

    def trim_cells(self, cells: int, cause: str = "", returning: Sequence[int] | None = None) -> tuple[int, ...]:
        """Unmap the pages past ``cells`` cells and make slots of what is free; returns these slots, empty.

        Pages in use that stand in the way are copied to free ones. A sequence that had tokens in what is unmapped can
        only go on from a state before it (`Session.lost_from`).

        Args:
            returning: the slots to make; None: as many as can be.
        """
        engine = self.engine
        with self._move(MoveKind.TRIM_CELLS, Owner.KV, cause) as job:
            before = engine.residency
            new, moves, slots = before.trimmed(cells, returning)
            pages = (before.mapped_groups - new.mapped_groups) * len(new.kv_pages)
            job.bytes, job.count = pages * before.layout.page_bytes, before.mapped_cells - new.mapped_cells
            if moves:  # to where the cells lie that are given up, also if the move fails afterwards
                self._give_up_cells(new.mapped_cells)
            self._move_pages(MoveKind.TRIM_CELLS, moves)
            self._publish(MoveKind.TRIM_CELLS, new)
            self._give_up_cells(new.mapped_cells)
        return slots

    def _give_up_cells(self, kept: int) -> None:
        owner = self.engine.owner
        if isinstance(owner, Session) and len(owner.tokens) > kept:
            owner.lost_from = kept if owner.lost_from is None else min(owner.lost_from, kept)

    def slide_cells(self, live_cells: int, end: int, cause: str = "") -> None:
        """Move the window of cells on the device to those that are about to be written, ``live_cells`` to ``end``.

        Cells that leave go to host memory if the sequence goes on to them, as do those that come back from there.
        Nothing is done where the window has them already.
        """
        engine = self.engine
        if slid(engine.known, live_cells, end) is None:  # experts do not matter to it
            return
        slide = slid(engine.residency, live_cells, end)
        assert slide is not None
        kind = MoveKind.SPILL_CELLS if slide.forward else MoveKind.FETCH_CELLS
        with self._move(kind, Owner.KV, cause or f"cells {live_cells:,} to {end:,} are written next") as job:
            job.bytes, job.count = len(slide.pages) * engine.residency.layout.page_bytes, slide.num_cells
            job.copied = job.bytes > 0
            assert engine.cell_store is not None
            copy = spill_pages if slide.forward else fetch_pages
            # the rows, and the pages of cells past the sequence's end, are in no use before the publication
            for array in copy(engine.programs, engine.cell_store, engine.arena, slide.pages, slide.rows):
                if slide.forward:
                    engine.cell_store = array
                else:
                    engine.arena = array
                self.fault(kind, "copied")
            self._wait()
            self._publish(kind, slide.residency)

    # --- the head

    def unload_head(self, cause: str = "") -> None:
        """Give the head's bytes back to the allocator; a copy stays in host memory.

        Raises:
            ConfigError: the head is the embedding.
        """
        engine = self.engine
        with self._move(MoveKind.UNLOAD_HEAD, Owner.HEAD, cause) as job:
            weights, head = engine.weights, engine.head()
            if head.data is weights.embed.data:
                raise ConfigError("the head of this model is its embedding: unloading it frees nothing")
            job.bytes, job.count = head.data.nbytes, 1
            if self.head_copy is None:
                data = jax.device_put(head.data, bank_sharding(), may_alias=False)
                self.head_copy = replace(head, data=data.block_until_ready())
            self.fault(MoveKind.UNLOAD_HEAD, "prepared")
            engine.weights = weights.without_head()
            try:
                self.fault(MoveKind.UNLOAD_HEAD, "published")
                self._wait()
            except BaseException:
                engine.weights = weights
                raise
            head.data.delete()

    def load_head(self, cause: str = "") -> None:
        """Bring the head back.

        Raises:
            DoesNotFit: the allocator does not have the bytes; the head stays unloaded.
        """
        engine = self.engine
        with self._move(MoveKind.LOAD_HEAD, Owner.HEAD, cause) as job:
            if engine.weights.head is not None or self.head_copy is None:
                raise ValueError("the head is loaded")
            self.fault(MoveKind.LOAD_HEAD, "prepared")
            copy = self.head_copy
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
            with _device_memory(copy.data.nbytes, "the output head"):
                data = jax.device_put(copy.data, device, may_alias=False).block_until_ready()
            self.fault(MoveKind.LOAD_HEAD, "copied")
            job.bytes, job.count, job.copied = copy.data.nbytes, 1, True
            engine.weights = replace(engine.weights, head=replace(copy, data=data))

    # --- parts of moves

    @contextmanager
    def _move(self, kind: MoveKind, owner: Owner, cause: str) -> Iterator[_Job]:
        engine = self.engine
        engine.check_running()
        withdraw(engine)
        job, in_use = _Job(), engine.bytes_in_use()
        try:
            yield job
        except BaseException as error:
            engine.stop_if_lost(kind, error)
            raise
        seconds = time.perf_counter() - job.started_s
        change = device_change(engine, kind, job.bytes, in_use, RELEASE_S if self.check else 0.0)
        if self.check:
            engine.check_tables()
            check_change(kind, job.bytes, change)
        rate = job.bytes / seconds / 1e9 if job.copied and seconds > 0 else None
        self.on_move(MoveDone(kind, owner, job.bytes, job.count, 1000 * seconds, rate, cause, change))

    @contextmanager
    def _emptied(self, kind: MoveKind, before: Residency, without: Residency, gone: tuple[Fill, ...]) -> Iterator[None]:
        """Write over slots in use: their experts leave the tables first, for good if writing has begun and fails."""
        started = time.perf_counter()
        self._publish(kind, without)
        arrays = self.engine.arrays
        try:
            yield
        except BaseException:
            if all(new is old for new, old in zip(self.engine.arrays, arrays)):
                self.engine.publish(before)
            elif gone:
                num_bytes, ms = before.slot_bytes(fill.slot for fill in gone), 1000 * (time.perf_counter() - started)
                done = MoveDone(MoveKind.EVICT, Owner.EXPERT_SLOTS, num_bytes, len(gone), ms, None, f"{kind} failed")
                self.on_move(done)
            raise

    def _publish(self, kind: MoveKind, residency: Residency) -> None:
        self.fault(kind, "prepared")
        self.engine.publish(residency)

    def _copy(self, kind: MoveKind, fills: Sequence[Fill], job: _Job) -> None:
        """Fill slots, reporting after every block's experts, and wait."""
        by_layer: dict[int, list[Fill]] = {}
        for fill in fills:
            by_layer.setdefault(fill.layer, []).append(fill)
        for some in by_layer.values():
            job.bytes += self.engine.copy_experts(some)
            self.fault(kind, "copied")
        job.count, job.copied = len(fills), True
        self._wait()

    def _copy_slot(self, fill: Fill, source: int) -> int:
        engine, layout = self.engine, self.engine.residency.layout
        num_pages = int(engine.residency.expert_pages[fill.layer])
        from_array, first = layout.locate(layout.slot_first_page[source])
        array, page = layout.locate(layout.slot_first_page[fill.slot])
        arrays = engine.arrays
        engine.set_array(array, engine.programs.copy_run(arrays[array], page, arrays[from_array], first, num_pages))
        return num_pages * layout.page_bytes

    def _move_pages(self, kind: MoveKind, moves: Sequence[PageMove]) -> None:
        engine = self.engine
        for first in range(0, len(moves), PAGES_PER_MOVE):
            some = moves[first : first + PAGES_PER_MOVE]
            sources = np.zeros(PAGES_PER_MOVE, np.int32)
            targets = np.full(PAGES_PER_MOVE, engine.residency.layout.core_pages, np.int32)
            sources[: len(some)] = [move.source for move in some]
            targets[: len(some)] = [move.target for move in some]
            engine.arena = engine.programs.move_pages(engine.arena, sources, targets)
            self.fault(kind, "copied")
        self._wait()

    def _wait(self) -> None:
        jax.block_until_ready((self.engine.arrays, self.engine.cell_store))


@contextmanager
def _device_memory(num_bytes: int, what: str) -> Iterator[None]:
    """Turn the allocator's refusal into an outcome that says what did not fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = f"{what} needs {num_bytes / MIB:,.1f} MiB in one piece; the device does not have them now"
        raise DoesNotFit(message, shortfall_bytes=num_bytes) from error
