"""The engine: a loaded model on one device, laid out as the memory plan says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine import attention, gdn, ple
from strata_jax.engine.arena import CellLayout, Segments, Tables
from strata_jax.engine.cell_store import new_store
from strata_jax.engine.chunk import compile_programs
from strata_jax.engine.compiled import Watch
from strata_jax.engine.decode import tail_of
from strata_jax.engine.experts import LayerBank
from strata_jax.engine.load import load_model
from strata_jax.engine.mailbox import Mailbox
from strata_jax.engine.matrix import NATIVE_DTYPES, Matrix
from strata_jax.engine.model import ModelSpec, State, Weights, without_table
from strata_jax.engine.program_store import ProgramStore, Unstored
from strata_jax.engine.programs import Programs
from strata_jax.engine.replacement import Kept, UseValues, kept_before, start_values
from strata_jax.engine.residency import Fill, Residency, first_residency
from strata_jax.engine.rounds import RoundAhead, withdraw
from strata_jax.engine.staging import Staging
from strata_jax.geometry import Geometry
from strata_jax.gguf.layout import PLE_TABLE
from strata_jax.gguf.source import WeightSource
from strata_jax.kv_types import cell_bytes
from strata_jax.memory.ledger import MIB, Owner
from strata_jax.memory.plan import MemoryPlan
from strata_jax.sampling import Sampling

LEDGER_TOLERANCE_FRAC = 0.01


@dataclass
class Engine:
    """Weights, bank, arena and programs. Sequences are run by `strata_jax.engine.session.Session`.

    Attributes:
        weights: dense weights, packed as stored or, for kernels, in planes.
        banks: packed experts of every block (MTP block last when drafting).
        known: who sits where in the arena, as the host last knew it: see `residency`.
        tables: the same on the device.
        arena: the core u32[P, page_words]; owned by the engine, lent to the running step.
        segments: the segments u32[Pi, page_words] that are there; the others are lent.
        block_kind: the number of each trunk block's signature; blocks of one kind share their programs.
        owner: the sequence that the K/V cells belong to; a new sequence takes them over.
        stopped: why nothing can run any more, if so.
        cell_store: u32[A * N, page_words] in host memory, a row for every group of cells; those that `residency` has no
            page for are valid. None: all cells are on the device.
        mover: who carries out moves that a session asks for; the last `Mover` made for the engine.
        values: what experts are worth, where rounds keep residency up; None: they do not.
        behind: rounds have changed residents on the device since the host read them.
        staging: what copies experts ahead of prompt chunks; None: nothing does.
        mailbox: what rounds are told. ahead: the round that is to follow the one that runs, if it has been started.
        in_rounds: whose rounds these are, an object for each of `rounds`.
    """

    file: WeightSource
    geometry: Geometry
    plan: MemoryPlan
    weights: Weights
    banks: tuple[LayerBank, ...]
    known: Residency
    tables: Tables
    arena: jax.Array
    segments: Segments
    programs: Programs
    block_kind: tuple[int, ...]
    owner: object = field(default=None)
    stopped: str | None = None
    cell_store: jax.Array | None = None
    mover: Any = None
    values: UseValues | None = None
    behind: bool = False
    staging: Staging | None = None
    mailbox: Mailbox = field(default_factory=Mailbox)
    ahead: RoundAhead | None = None
    in_rounds: object = None

    @classmethod
    def load(
        cls,
        file: WeightSource,
        geometry: Geometry,
        plan: MemoryPlan,
        watch: Watch | None = None,
        loans: Collection[tuple[int, int]] | None = None,
        min_p: float = 0.0,
        sampling: Sampling | None = None,
        program_store: ProgramStore | Unstored | None = None,
    ) -> Engine:
        """Read the model as planned: dense weights, bank, arena, resident experts.

        Args:
            loans: if given, all programs are compiled before the arena takes its memory (see `compile_programs`);
                else each at its first call.
            sampling: by which rounds that are compiled beforehand choose tokens; None: greedy.
            program_store: where compiled programs are found and kept; None: nowhere.

        Raises:
            FormatError: a tensor's type is one that the engine cannot decode.
        """
        geometry.check_engine_types()
        weights, banks = load_model(
            file, geometry, plan.num_blocks, plan.page_bytes, bank_sharding(), with_draft=plan.with_draft,
            kernels=plan.request.expert_kernels,
        )  # fmt: skip
        return cls.lay_out(file, geometry, plan, weights, banks, watch, loans, min_p, sampling, program_store)

    @classmethod
    def lay_out(
        cls,
        file: WeightSource,
        geometry: Geometry,
        plan: MemoryPlan,
        weights: Weights,
        banks: tuple[LayerBank, ...],
        watch: Watch | None = None,
        loans: Collection[tuple[int, int]] | None = None,
        min_p: float = 0.0,
        sampling: Sampling | None = None,
        program_store: ProgramStore | Unstored | None = None,
    ) -> Engine:
        """As `load`, for weights and banks that were read for a plan of the same blocks, page and kernels."""
        sharding = bank_sharding()
        k_bytes, v_bytes = cell_bytes(plan.kv_type, geometry.num_kv_heads, geometry.head_dim)
        cells = CellLayout(
            plan.kv_type, plan.cells_per_page, k_bytes // 4, v_bytes // 4, plan.context_cells,
            kernels=plan.request.expert_kernels,
        )  # fmt: skip
        decay = plan.request.moving.replacement_decay
        spec = ModelSpec(geometry, cells, replacement_decay=decay or 0.0, kernels=plan.request.expert_kernels)
        programs = Programs(spec, sampling=sampling or Sampling(), store=program_store or Unstored())
        if watch is not None:
            programs.watch = watch
        layout, store = plan.arena, None
        if plan.keeps_cells_in_host:
            store = new_store(plan.num_kv_layers * layout.num_groups, plan.page_bytes, sharding)
        residency = first_residency(layout, plan.pages_per_expert, geometry.num_experts, plan.resident_pairs())
        arrays: Any = [jax.ShapeDtypeStruct((pages, plan.page_bytes // 4), jnp.uint32) for pages in layout.array_pages]
        engine = cls(
            file, geometry, plan, weights, banks, residency, device_tables(residency), arrays[0], tuple(arrays[1:]),
            programs, _block_kinds(weights, banks), cell_store=store,
            values=None if decay is None else start_values(plan.order, plan.num_blocks),
        )  # fmt: skip
        if loans is not None:
            compile_programs(engine, loans, min_p)
        if plan.stage_bytes:
            engine.staging = Staging.of(banks)
        # the segments last and next to each other, so that the allocator gets them back in one piece
        for idx, pages in enumerate(layout.array_pages):
            engine.set_array(idx, new_pages(pages, plan.page_bytes))
        engine.copy_experts(residency.residents(range(residency.num_slots)))
        return engine

    @property
    def residency(self) -> Residency:
        """Who sits where in the arena; the master of ``tables``.

        Rounds with replacement change residents on the device alone. Whoever asks for them next reads the table, once.
        """
        if self.behind:
            withdraw(self)
            self.known, self.behind = self.known.with_experts(np.array(self.tables.slot_of)), False
        return self.known

    def after_turns(self, kept: Kept | None) -> None:
        """Take over what a round has changed besides the arena's core; None: it has no replacement."""
        if kept is not None:
            self.segments, self.values = kept.segments, kept.values
            self.tables, self.behind = replace(self.tables, slot_of=kept.tables.slot_of), True

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays of the arena that are there: its core, then segments."""
        return (self.arena, *self.segments)

    @property
    def program_tables(self) -> Tables:
        """The tables as programs take them: with the store of cells, if there is one."""
        return self.tables if self.cell_store is None else replace(self.tables, cell_store=self.cell_store)

    def round_tables(self) -> tuple[Tables, Segments, Kept | None]:
        """Tables and segments as a round takes them; with replacement it changes segments and the table of slots, which
        come apart and are used up: written over, they stay where they are."""
        if self.values is None:
            return self.program_tables, self.segments, None
        kept = kept_before(self.values, self.tables, self.segments)
        return replace(self.program_tables, slot_of=cast("Any", None)), (), kept

    def set_array(self, idx: int, array: jax.Array) -> None:
        """Replace one of `arrays`."""
        if idx == 0:
            self.arena = array
        else:
            self.segments = (*self.segments[: idx - 1], array, *self.segments[idx:])

    def copy_experts(self, fills: Iterable[Fill]) -> int:
        """Copy experts from the bank into slots; the tables stay as they are. Returns the bytes copied."""
        runs: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for fill in fills:
            array, page = self.residency.layout.locate(self.residency.layout.slot_first_page[fill.slot])
            experts, pages = runs[array, fill.layer]
            experts.append(fill.expert)
            pages.append(page)
        copied = 0
        for (array, layer), (experts, pages) in runs.items():
            bank = self.banks[layer]
            self.set_array(array, self.programs.fill(self.arrays[array], bank, experts, pages))
            copied += len(experts) * bank.blobs.shape[1] * bank.blobs.dtype.itemsize
        return copied

    def publish(self, residency: Residency) -> None:
        """Make tables the valid ones, on the host and on the device, in one step: after an exception none changed.

        Raises:
            RuntimeError: they were made before rounds changed residents, which the host has not read since.
        """
        if self.behind:
            raise RuntimeError("these tables are older than the device's: rounds have replaced experts since")
        tables = device_tables(residency, self.known, self.tables)
        self.known, self.tables = residency, tables

    def check_tables(self) -> None:
        """Verify the tables.

        Raises:
            ValueError: see `Residency.check`, or the device's tables differ from the host's.
        """
        self.residency.check()
        for name in ("slot_of", "slot_page", "kv_pages"):
            found, expected = np.asarray(getattr(self.tables, name)), getattr(self.residency, name)
            if name == "slot_page" and not len(expected):
                continue
            if not np.array_equal(found, expected):
                raise ValueError(f"{name} on the device differs from the host's")
        shapes = [array.shape[0] for array in self.arrays]
        if shapes != list(self.residency.layout.array_pages[: 1 + self.residency.segments]):
            raise ValueError(
                f"the arena's arrays have {shapes} pages; the tables name {self.residency.segments} segments"
            )

    def head(self) -> Matrix:
        """The output head.

        Raises:
            RuntimeError: it is unloaded.
        """
        if self.weights.head is None:
            raise RuntimeError("the output head is unloaded")
        return self.weights.head

    def stop_if_lost(self, what: str, error: BaseException) -> None:
        """After a failure of ``what``: nothing can run any more if it has taken an array of the arena or the store."""
        if any(array.is_deleted() for array in self.arrays):
            self.stopped = f"{what} failed and left no arena ({error})"
        if self.cell_store is not None and self.cell_store.is_deleted():
            self.stopped = f"{what} failed and left no K/V in host memory ({error})"

    def check_running(self) -> None:
        """Raise RuntimeError if the engine has stopped."""
        if self.stopped is not None:
            raise RuntimeError(f"the engine has stopped: {self.stopped}")

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """Within the context rounds follow each other; what the last one has left is given back when it ends.

        Where others have begun since, such as after a generator that was left and is collected later, that is theirs.
        """
        mine = self.in_rounds = object()
        try:
            yield
        finally:
            if self.in_rounds is mine:
                withdraw(self)
                self.programs.places.clear()

    def empty_state(self) -> State:
        """The state before the first token."""
        g, cells = self.geometry, self.plan.context_cells
        states = [
            gdn.empty_state(g) if g.recurrent[i] else attention.empty_state(g, g.compress_ratio[i], cells)
            for i in range(len(self.banks))
        ]
        draft = states.pop() if self.plan.with_draft else None
        width = g.num_streams * g.embed_width
        history = None if g.ple_layer is None else jnp.zeros((ple.history_rows(g), width), jnp.float32)
        tail = None if draft is None else tail_of(attention.empty_state(g, g.compress_ratio[-1], cells))
        return State(tuple(states), draft, tail, history, jnp.zeros(width, jnp.float32))

    def ple_rows(self, before: list[int], tokens: list[int], num_rows: int) -> np.ndarray | None:
        """Packed n-gram rows of ``tokens``, which follow ``before``, padded to ``num_rows``; None without a table."""
        if self.geometry.ple_layer is None:
            return None
        table = self.file.data(PLE_TABLE)
        context = before[len(before) - min(len(before), self.geometry.ple_ngram_size - 1) :]
        rows = table[ple.table_rows(context + tokens, len(context), len(tokens), self.geometry)]
        packed = np.zeros((num_rows, *rows.shape[1:]), np.uint8)
        packed[: len(tokens)] = rows
        type_name = self.file.tensors[PLE_TABLE].type_name
        return packed.view(NATIVE_DTYPES[type_name]) if type_name in NATIVE_DTYPES else packed

    @property
    def device_name(self) -> str:
        device = jax.devices()[0]
        return f"{device.platform}: {device.device_kind}"

    def bytes_in_use(self) -> int | None:
        """The device's own count of the memory that it has handed out; None on a CPU, which keeps none."""
        counts = _device_counts()
        return None if counts is None else counts["bytes_in_use"]

    def peak_device_bytes(self) -> int:
        """The device's own peak; on a CPU, which keeps no count, the bytes of live arrays now."""
        counts = _device_counts()
        return counts["peak_bytes_in_use"] if counts else sum(x.nbytes for x in jax.live_arrays())

    def past_limit(self) -> str | None:
        """Say by how much the device's own peak was past what the plan leaves to JAX; None: it was not, or a CPU.

        CUDA's pool does not stop at that limit where the card is larger.
        """
        counts, budget = _device_counts(), self.plan.request.device_budget_bytes
        if counts is None or budget is None:
            return None
        limit, peak = budget - self.plan.request.reserve_bytes, counts["peak_bytes_in_use"]
        if peak <= limit:
            return None
        return (
            f"device memory: {peak:,} bytes were in use at once, {limit:,} are planned beside the reserve; a card of"
            f" {budget / MIB:,.0f} MiB may have no room for this run. Raise hardware.vram_reserve_mib by"
            f" {-(-(peak - limit) // MIB):,}"
        )

    def check_memory(self, state: State) -> dict[str, int]:
        """Compare the plan with the device's own count while one sequence is at rest.

        Returns:
            ``planned_bytes`` and ``found_bytes``, for the record.

        Raises:
            RuntimeError: they differ by more than `LEDGER_TOLERANCE_FRAC`.
        """
        owners = {Owner.RESERVE}
        planned = sum(e.phase_bytes[0] for e in self.plan.ledger.entries if e.owner not in owners)
        trees = (self.weights, self.banks, self.program_tables, self.values, self.arrays, state)
        found = sum({id(x): x.nbytes for x in jax.tree.leaves(trees)}.values())
        if abs(found - planned) > LEDGER_TOLERANCE_FRAC * planned:
            raise RuntimeError(f"the ledger says {planned:,} bytes, the engine's arrays have {found:,}")
        return {"planned_bytes": planned, "found_bytes": found}

    def arena_bytes(self) -> dict[Owner, int]:
        """Bytes of the arena's arrays by owner; pages that nobody owns count as slots."""
        r = self.residency
        cells = r.mapped_groups * len(r.kv_pages) * r.layout.page_bytes
        return {Owner.EXPERT_SLOTS: sum(array.nbytes for array in self.arrays) - cells, Owner.KV: cells}

    def live_bytes(self) -> Iterator[tuple[str, int]]:
        """Bytes of the engine's long-lived arrays by owner, as the device holds them."""
        trees = [("weights", self.weights), ("bank", self.banks), ("arena", self.arrays)]
        if self.cell_store is not None:
            trees.append(("K/V in host memory", self.cell_store))
        for owner, tree in trees:
            yield owner, sum({id(x): x.nbytes for x in jax.tree.leaves(tree)}.values())  # a tied head is one array


def _device_counts() -> dict[str, int] | None:
    return jax.devices()[0].memory_stats()


def bank_sharding() -> jax.sharding.Sharding:
    """Where the bank lives: pinned host memory beside a GPU, the device's own memory on a CPU."""
    device = jax.devices()[0]
    kind = "device" if device.platform == "cpu" else "pinned_host"
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def new_pages(num_pages: int, page_bytes: int) -> jax.Array:
    """An array of the arena."""
    return jnp.zeros((num_pages, page_bytes // 4), jnp.uint32)


def device_tables(new: Residency, old: Residency | None = None, on_device: Tables | None = None) -> Tables:
    """The tables on the device; those that are the ones of ``old`` are not copied again."""
    arrays = {}
    for name in ("slot_of", "slot_page", "kv_pages"):
        array = getattr(new, name)
        if on_device is not None and array is getattr(old, name):
            arrays[name] = getattr(on_device, name)
        else:
            # a table without slots still needs a row to be indexed
            arrays[name] = jnp.array(np.zeros(1, np.int32) if name == "slot_page" and not len(array) else array)
    return Tables(**arrays)


def _block_kinds(weights: Weights, banks: tuple[LayerBank, ...]) -> tuple[int, ...]:
    """Number the distinct signatures (types and shapes) of the trunk's blocks, PLE aside."""
    seen: dict = {}
    kinds = []
    for w, bank in zip(weights.blocks, banks, strict=False):
        leaves, structure = jax.tree.flatten((without_table(w), bank))
        kinds.append(seen.setdefault((structure, tuple((x.shape, x.dtype) for x in leaves)), len(seen)))
    return tuple(kinds)
