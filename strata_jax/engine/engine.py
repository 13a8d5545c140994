"""The engine: a loaded model on one device, laid out as the memory plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.engine import attention, gdn, ple
from strata_jax.engine.arena import CellLayout, Tables
from strata_jax.engine.decode import tail_of
from strata_jax.engine.experts import LayerBank
from strata_jax.engine.load import load_bank, load_weights
from strata_jax.engine.matrix import NATIVE_DTYPES
from strata_jax.engine.model import ModelSpec, State, Weights
from strata_jax.engine.programs import Programs, Watch
from strata_jax.geometry import Geometry
from strata_jax.gguf.layout import PLE_TABLE
from strata_jax.gguf.reader import GGUFFile
from strata_jax.kv_types import cell_bytes
from strata_jax.memory.ledger import Owner
from strata_jax.memory.plan import MemoryPlan

LEDGER_TOLERANCE_FRAC = 0.01


@dataclass
class Engine:
    """Weights, bank, arena and programs. Sequences are run by `strata_jax.engine.session.Session`.

    Attributes:
        weights: dense weights, packed as stored.
        banks: packed experts of every block (MTP block last when drafting).
        tables: who sits where in the arena.
        arena: u32[P, page_words]; owned by the engine, lent to the running step.
        block_kind: the number of each trunk block's signature; blocks of one kind share their programs.
        owner: the sequence that the K/V cells belong to; a new sequence takes them over.
    """

    file: GGUFFile
    geometry: Geometry
    plan: MemoryPlan
    weights: Weights
    banks: tuple[LayerBank, ...]
    tables: Tables
    arena: jax.Array
    programs: Programs
    block_kind: tuple[int, ...]
    owner: object = field(default=None)

    @classmethod
    def load(cls, file: GGUFFile, geometry: Geometry, plan: MemoryPlan, watch: Watch | None = None) -> Engine:
        """Read the model as planned: dense weights, bank, arena, resident experts.

        Raises:
            FormatError: a tensor's type is one that the engine cannot decode.
        """
        geometry.check_engine_types()
        weights = load_weights(file, geometry, with_draft=plan.with_draft)
        sharding = bank_sharding()
        banks = tuple(load_bank(file, layer, plan.page_bytes, sharding) for layer in range(plan.num_blocks))
        k_bytes, v_bytes = cell_bytes(plan.kv_type, geometry.num_kv_heads, geometry.head_dim)
        cells = CellLayout(plan.kv_type, plan.cells_per_page, k_bytes // 4, v_bytes // 4, plan.context_cells)
        programs = Programs(ModelSpec(geometry, cells))
        if watch is not None:
            programs.watch = watch
        engine = cls(
            file, geometry, plan, weights, banks, _tables(geometry, plan),
            jnp.zeros((plan.num_pages, plan.page_bytes // 4), jnp.uint32), programs,
            _block_kinds(weights, banks),
        )  # fmt: skip
        for layer, expert in plan.resident_pairs():
            engine.fill_slot(layer, expert)
        return engine

    def fill_slot(self, layer: int, expert: int) -> None:
        """Copy an expert's blob from the bank into its slot."""
        slot = int(self.tables.slot_of[layer, expert])
        page = np.int32(self.tables.slot_page[slot])
        bank = self.banks[layer]
        self.arena = self.programs.fill_slot(self.arena, bank, np.int32(expert), page)

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

    def peak_device_bytes(self) -> int:
        """The device's own peak; on a CPU, which keeps no count, the bytes of live arrays now."""
        stats = jax.devices()[0].memory_stats()
        return stats["peak_bytes_in_use"] if stats else sum(x.nbytes for x in jax.live_arrays())

    def check_memory(self, state: State) -> dict[str, int]:
        """Compare the plan with the device's own count while one sequence is at rest.

        Returns:
            ``planned_bytes`` and ``found_bytes``, for the record.

        Raises:
            RuntimeError: they differ by more than `LEDGER_TOLERANCE_FRAC`.
        """
        owners = {Owner.RESERVE}
        planned = sum(e.phase_bytes[0] for e in self.plan.ledger.entries if e.owner not in owners)
        trees = (self.weights, self.banks, self.tables, self.arena, state)
        found = sum({id(x): x.nbytes for x in jax.tree.leaves(trees)}.values())
        if abs(found - planned) > LEDGER_TOLERANCE_FRAC * planned:
            raise RuntimeError(f"the ledger says {planned:,} bytes, the engine's arrays have {found:,}")
        return {"planned_bytes": planned, "found_bytes": found}

    def live_bytes(self) -> Iterator[tuple[str, int]]:
        """Bytes of the engine's long-lived arrays by owner, as the device holds them."""
        for owner, tree in (("weights", self.weights), ("bank", self.banks), ("arena", self.arena)):
            yield owner, sum({id(x): x.nbytes for x in jax.tree.leaves(tree)}.values())  # a tied head is one array


def bank_sharding() -> jax.sharding.Sharding:
    """Where the bank lives: pinned host memory beside a GPU, the device's own memory on a CPU."""
    device = jax.devices()[0]
    kind = "device" if device.platform == "cpu" else "pinned_host"
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def _tables(g: Geometry, plan: MemoryPlan) -> Tables:
    """The tables at the start: slots and K/V pages where the plan puts them."""
    slot_of = np.full((plan.num_blocks, g.num_experts), -1, np.int32)
    for slot, (layer, expert) in enumerate(plan.resident_pairs()):
        slot_of[layer, expert] = slot
    slot_page = [plan.slot_first_page(slot) for slot in range(plan.expert_slots)]
    kv_pages = plan.kv_first_page + np.arange(plan.kv_pages, dtype=np.int32)
    return Tables(
        jnp.asarray(slot_of),
        jnp.asarray(slot_page or [0], jnp.int32),  # a table without slots still needs a row to be indexed
        jnp.asarray(kv_pages.reshape(plan.num_kv_layers, plan.kv_pages_per_layer)),
    )


def _block_kinds(weights: Weights, banks: tuple[LayerBank, ...]) -> tuple[int, ...]:
    """Number the distinct signatures (types and shapes) of the trunk's blocks, PLE aside."""
    seen: dict = {}
    kinds = []
    for w, bank in zip(weights.blocks, banks, strict=False):
        tree = (w.attn_mixer, w.ffn_mixer, w.token_mixer, w.experts, bank)
        leaves, structure = jax.tree.flatten(tree)
        kinds.append(seen.setdefault((structure, tuple((x.shape, x.dtype) for x in leaves)), len(seen)))
    return tuple(kinds)
