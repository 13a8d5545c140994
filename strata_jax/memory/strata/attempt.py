"""One pass through the order of allocation: cache, prompt path, RAM, and the plan that these decisions make.

Everything before the expert cache takes what it takes, the cache takes the rest less what comes after it, prompt
buffers borrow from the cache or use what is spare (planning notes 2). What finds no room is a `Shortage`, and so is a
plan of which a phase takes more than the card has, unless the driver pages device memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata_jax.memory.ledger import MIB, PHASES, Entry, Ledger, Memory, Owner, Phase, always, phase_totals
from strata_jax.memory.strata import cache as cache_rules
from strata_jax.memory.strata import entries as ledger_entries
from strata_jax.memory.strata.cache import CacheSize, Prices
from strata_jax.memory.strata.path import choose_path, prompt_price_bytes, smallest_loan_bytes
from strata_jax.memory.strata.ram import RamPlan, available_bytes, plan_ram
from strata_jax.memory.strata.request import Card, StrataRequest
from strata_jax.memory.strata.result import Layout, PromptPath, StrataPlan
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.memory.strata.unfit import WHILE, Shortage

WARN_FREE_BYTES = 1024 * MIB
_AFTER_DECISION = (Owner.DRAFT_BIND, Owner.LATE)


class Attempt:
    """One pass through the order of allocation. `grows`: only the first cells of the K/V are mapped."""

    def __init__(self, sizes: PackSizes, card: Card, request: StrataRequest, grows: bool) -> None:
        self.sizes, self.card, self.request = sizes, card, request
        mapped = min(request.grow.init_cells, request.context_cells) if grows else request.context_cells
        self.mapped_cells = mapped
        self.fixed = ledger_entries.before_cache(sizes, card, request, mapped)
        self.bind = cache_rules.bind_bytes(sizes, request)

    def decide(self) -> Decided | Shortage:
        """Size the cache, choose the prompt path, plan the RAM; a `Shortage` where there is not room for all of it."""
        # With the head lent, its rows are bound before the cache is sized, and its bytes count as free unless the
        # prompt buffers are to lie inside them.
        bound = self.bind if self.request.head_alias else 0
        inside = self.sizes.head_bytes if self.request.head_alias and self.request.alias_inside_head else 0
        free = self.card.vram_bytes - sum(e.phase_bytes[0] for e in self.fixed) - bound - inside
        prices = Prices(
            self.bind - bound,
            prompt_price_bytes(self.sizes, self.request, self.card),
            smallest_loan_bytes(self.sizes, self.request, self.card),
        )
        cache = cache_rules.size_cache(self.sizes, self.request, free, prices)
        if cache.short_bytes:
            return self._no_room_for_cache(cache, prices)
        cache, warnings = cache_rules.open_cache(self.sizes, self.request, self.card, cache, free)
        if not cache.slots:
            lost = replace(cache, short_bytes=self.sizes.max_blob_bytes + self.card.touch_bytes)
            return self._no_room_for_cache(lost, prices)
        after_fill = free - self.card.touch_bytes - cache.bytes
        later = prices.bind_bytes + self.card.late_bytes
        path = choose_path(self.sizes, self.card, self.request, cache, after_fill, later)
        if isinstance(path, int):
            return self._no_room_for_buffers(cache, path, after_fill)
        pinned = ledger_entries.host_before_copies(self.sizes, self.request)
        taken = sum(e.peak_bytes for e in pinned)
        ram = plan_ram(self.sizes, self.card, self.request, cache.slots, path, taken)
        if ram.short_bytes:
            return self._no_room_in_ram(pinned, ram)
        later_entries = ledger_entries.after_cache(self.sizes, self.card, self.request, cache, path, ram)
        short = self._overcommitted((*self.fixed, *later_entries), cache)
        return short or Decided(self, cache, path, ram, pinned, later_entries, free, after_fill, warnings)

    def assemble(self, d: Decided) -> StrataPlan:
        """Return the plan of what has been decided, with its ledger."""
        request, card, cache, path, ram, pinned = self.request, self.card, d.cache, d.path, d.ram, d.pinned
        ledger = Ledger((*self.fixed, *d.later, *pinned, *ledger_entries.host_copies(self.sizes, request, ram)))
        ledger.check()
        left = card.vram_bytes - ledger.total_bytes(Phase.START, Memory.DEVICE)
        over = max(0, ledger.peak(Memory.DEVICE)[1] - card.vram_bytes)
        kv_mapped, kv_max = ledger_entries.kv_bytes(self.sizes, card, request, self.mapped_cells)
        segments = -(-cache.bytes // (request.vram_elastic_mib * MIB)) if request.vram_elastic_mib else 0
        floor = cache_rules.slots_for(self.sizes, smallest_loan_bytes(self.sizes, request, card))
        return StrataPlan(
            pack=self.sizes.name,
            card=card,
            request=request,
            free_for_cache_bytes=d.free_bytes,
            reserve_bytes=cache.reserve_bytes,
            slots=cache.slots,
            cache_bytes=cache.bytes,
            uniform=cache.uniform,
            prompt=path,
            head_bytes=self.sizes.head_bytes,
            head_aliased=request.head_alias,
            kv_mapped_cells=self.mapped_cells,
            kv_mapped_bytes=kv_mapped,
            kv_max_bytes=kv_max,
            kv_pinned_ram_bytes=sum(e.peak_bytes for e in pinned if e.owner is Owner.KV),
            free_after_fill_bytes=max(0, d.after_fill_bytes),
            free_after_start_bytes=max(0, left),
            overcommit_bytes=max(0, -left),
            grow_refusal=d.grow_refusal,
            expert_headroom_bytes=ram.headroom_bytes,
            ram_resident_bytes=ram.resident_bytes,
            ram_resident_experts=ram.resident_experts,
            arena_bytes=ram.arena_bytes,
            conversation_budget_bytes=request.conversation_mib * MIB,
            ledger=ledger,
            notes=(*_growth_note(request, d.grow_refusal), *cache.notes, _chunk_note(path), *ram.notes),
            warnings=(*d.warnings, *self._warnings(ledger, cache, path)),
            reserve_mib=cache.reserve_mib,
            bind_bytes=self.bind,
            tier=ram.tier,
            ram_copies_from_slot=ram.copies_from_slot,
            floor_slots=min(cache.slots, floor) if request.vram_elastic_mib else 0,
            segments=segments,
            peak_overcommit_bytes=over,
        )

    def _warnings(self, ledger: Ledger, cache: CacheSize, path: PromptPath) -> list[str]:
        """Say what a user must see (planning notes, summary 30, 6.1 and 6.2)."""
        free = {p: self.card.vram_bytes - ledger.total_bytes(p, Memory.DEVICE) for p in Phase}
        said: list[str] = []
        if free[Phase.START] < WARN_FREE_BYTES:
            said.append(
                f"{max(0, free[Phase.START]) / MIB:,.0f} MiB of device memory are free when a request starts, less"
                f" than {WARN_FREE_BYTES // MIB:,} MiB: other programs may make it stall"
            )
        for phase, doing in ((Phase.PREFILL, "a prompt is read"), (Phase.DECODE, "decoding")):
            if free[phase] <= 0:
                more = f": {-free[phase] / MIB:,.0f} MiB more than there are must be paged by the driver"
                said.append(f"0 MiB of device memory are free while {doing}{more if free[phase] else ''}")
        ram, (_, in_ram) = available_bytes(self.card), ledger.peak(Memory.HOST)
        if ram is not None and in_ram > ram:
            said.append(
                f"checkpoints find no room in RAM: {(in_ram - ram) / MIB:,.0f} MiB more are planned than the"
                f" {ram / MIB:,.0f} MiB there are; set conversation.prompt_cache.checkpoints smaller"
            )
        later = [e for e in ledger.entries if e.owner in _AFTER_DECISION and e.peak_bytes]
        if path.layout is Layout.HYBRID:
            later = [e for e in later if e.owner is not Owner.DRAFT_BIND]  # it was bound before
        inside = self.sizes.head_bytes if self.request.head_alias and self.request.alias_inside_head else 0
        if path.own_bytes > inside and later and self.request.decide_at == "filled":
            names = ", ".join(f"{e.owner} {e.peak_bytes / MIB:,.0f} MiB" for e in later)
            said.append(
                f"{(path.own_bytes - inside) / MIB:,.0f} MiB of prompt buffers were decided on when the cache had been"
                f" filled; allocated afterwards: {names}. {max(0, free[Phase.PREFILL]) / MIB:,.0f} MiB stay free of the"
                f" reserve of {cache.reserve_mib:,} MiB while a prompt is read"
            )
        return said

    def _no_room_for_cache(self, cache: CacheSize, prices: Prices) -> Shortage:
        request, sizes = self.request, self.sizes
        auto = cache_rules.is_auto(request) or request.cap_expert_cache
        if auto:
            what = "no expert slot is left, and a verify window needs one"
            wanted = sizes.max_blob_bytes * (sizes.num_layers if request.cache_per_layer else 1)
        else:
            wanted = (request.expert_cache or 0) * sizes.max_blob_bytes
            what = (
                f"cache.slots={request.expert_cache} fixes {wanted / MIB:,.1f} MiB of expert slots, so that nothing is"
                " left to fit automatically"
            )
        slots = always(Owner.EXPERT_SLOTS, "slots that must be there", wanted, "of the largest blob (2.2)")
        rest = [slots, *ledger_entries.kept_out(request, cache, prices, self.bind)]
        room = max(0, wanted - cache.short_bytes) // sizes.max_blob_bytes
        return self._device_shortage(what, rest, self.card.vram_bytes + cache.short_bytes, 0 if auto else room)

    def _no_room_for_buffers(self, cache: CacheSize, needed: int, after_fill: int) -> Shortage:
        what = "the prompt buffers can neither borrow slots nor lie beside them"
        if self.request.chunk_tokens is not None:
            what = f"prefill.chunk={self.request.chunk_tokens}: {what}"
        rest = [
            always(Owner.EXPERT_SLOTS, "slots", cache.bytes, f"{cache.slots:,} slots (2.2)"),
            always(Owner.PROMPT_BUFFERS, "own buffers and what must stay free beside them", needed, "2.4, 2.6"),
        ]
        return self._device_shortage(what, rest, self.card.vram_bytes + needed - max(0, after_fill), cache.slots)

    def _overcommitted(self, device: tuple[Entry, ...], cache: CacheSize) -> Shortage | None:
        """Return what the phase that needs most takes beyond the card, where no driver pages it (summary 30, 6.2)."""
        if self.request.spills_on(self.card):
            return None
        totals = phase_totals(device)
        needed = max(totals)
        if needed <= self.card.vram_bytes:
            return None
        phase = PHASES[totals.index(needed)]
        pager = self.card.os if self.request.spill is None else "the driver (policy.head_alias.spill=false)"
        what = f"{WHILE[phase]} it takes more than the card has, and {pager} pages no device memory"
        return Shortage(
            Memory.DEVICE, needed, self.card.vram_bytes, what, Ledger(device), cache.slots, phase, cache.reserve_mib
        )

    def _device_shortage(self, what: str, rest: list[Entry], needed: int, slots: int) -> Shortage:
        return Shortage(Memory.DEVICE, needed, self.card.vram_bytes, what, Ledger((*self.fixed, *rest)), slots)

    def _no_room_in_ram(self, pinned: tuple[Entry, ...], ram: RamPlan) -> Shortage:
        available = available_bytes(self.card) or 0
        entries = [*pinned, *ledger_entries.host_copies(self.sizes, self.request, ram)]
        what = "the experts that must lie in RAM find no room there"
        return Shortage(Memory.HOST, available + ram.short_bytes, available, what, Ledger(tuple(entries)))


@dataclass(frozen=True, slots=True)
class Decided:
    """What one pass has decided; a plan adds the ledger, which questions about what fits do not need.

    Attributes:
        pinned: host memory taken before the experts. later: device memory taken from the cache on.
        free_bytes: free when the cache is sized.
        after_fill_bytes: free when it has been filled. grow_refusal: why the K/V does not grow although asked to.
    """

    attempt: Attempt
    cache: CacheSize
    path: PromptPath
    ram: RamPlan
    pinned: tuple[Entry, ...]
    later: tuple[Entry, ...]
    free_bytes: int
    after_fill_bytes: int
    warnings: tuple[str, ...]
    grow_refusal: str | None = None

    @property
    def slots_that_pay(self) -> int:
        """Slots that growth may take, the floor's included."""
        return self.cache.slots if self.attempt.request.grow.anywhere else self.path.first_lent

    def plan(self) -> StrataPlan:
        return self.attempt.assemble(self)


def _growth_note(request: StrataRequest, refusal: str | None) -> tuple[str, ...]:
    if refusal is None:
        return ()
    mapped = "" if request.kv_streamed else f"; all {request.context_cells:,} cells are mapped at the start"
    return (f"K/V growth is off ({refusal}){mapped}",)


def _chunk_note(path: PromptPath) -> str:
    where = {
        Layout.BORROWED: f"borrows {path.lent_slots:,} cache slots ({path.lent_bytes / 2**30:.2f} GiB)",
        Layout.OWN: f"has its own buffers ({path.own_bytes / MIB:,.0f} MiB)",
        Layout.HYBRID: f"borrows {path.lent_slots:,} cache slots and adds {path.own_bytes / MIB:,.0f} MiB of its own",
    }[path.layout]
    why = f"; {path.why_not_larger}" if path.why_not_larger else ""
    return f"prompt chunk of {path.chunk_tokens:,} tokens, ring of {path.ring_slots:,}: the prompt path {where}{why}"
