"""How large the expert cache is: the reserve ladder, slots of one size or of many, and the checks when it is opened.

Device memory is spent in a fixed order and the cache is the only elastic consumer: it takes what is free less what
comes after it (planning notes 2.1-2.3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata_jax.memory.strata.request import MIB, Card, StrataRequest
from strata_jax.memory.strata.sizes import PackSizes

F32_BYTES = 4
MIN_KEPT_SLOTS = 128
FIT_FLOOR_MIB = 300
SLACK_BYTES = 64 * MIB
TOUCH_ATTEMPTS = 6
NOTHING_LEFT_BYTES = 16 * MIB
NOTHING_LEFT_GIVE_BYTES = 1024 * MIB
FINAL_OK_BYTES = 256 * MIB
LOW_TARGET_MIB = 512


@dataclass(frozen=True, slots=True)
class Prices:
    """What is allocated after the cache and therefore kept out of it.

    Attributes:
        bind_bytes: draft vocabulary rows and logits of the verify windows.
        prompt_bytes: own prompt buffers; 0 when they borrow slots.
        smallest_loan_bytes: buffers of the smallest chunk that may borrow.
    """

    bind_bytes: int
    prompt_bytes: int
    smallest_loan_bytes: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The expert cache of a plan.

    Attributes:
        bytes: of all slots. budget_bytes: what they could take.
        reserve_mib: the reserve kept, perhaps smaller than the default. reserve_bytes: all that is kept out.
        short_bytes: what is missing for the slots that must be there; 0 when they fit.
        notes: what was decided that the settings do not say.
    """

    slots: int
    bytes: int
    uniform: bool
    budget_bytes: int
    reserve_mib: int
    reserve_bytes: int
    short_bytes: int
    notes: tuple[str, ...]


def bind_bytes(sizes: PackSizes, request: StrataRequest) -> int:
    """Return the bytes of window logits and of the draft vocabulary's rows (planning notes 1.6)."""
    logits = request.window_rows * sizes.vocab_size * F32_BYTES
    rows = request.draft_vocab * (sizes.head_row_bytes + F32_BYTES) if request.mtp else 0
    return logits + rows


def is_auto(request: StrataRequest) -> bool:
    """Whether the cache takes what is free; 0 slots with a profile mean that too (planning notes 2.2)."""
    return not request.expert_cache


def most_slots(sizes: PackSizes, request: StrataRequest) -> int:
    """Return the ceiling of slots: the pairs that the profile ranks, or all experts."""
    if request.profile and request.ranked is not None:
        return min(sizes.num_ranks, request.ranked)
    return sizes.num_ranks


def size_cache(sizes: PackSizes, request: StrataRequest, free_bytes: int, prices: Prices) -> CacheSize:
    """Size the cache from the device memory that is free when its turn comes (planning notes 2.2).

    A fixed cache is a budget of `expert_cache` largest blobs; like auto it never takes from the reserve.
    """
    notes: list[str] = []
    reserve_mib = _small_card_reserve(sizes, request, free_bytes, prices)
    if reserve_mib != request.reserve_mib:
        notes.append(
            f"the default reserve shrinks from {request.reserve_mib:,} to {reserve_mib:,} MiB, so that the cache holds"
            " the loan of the smallest chunk and the slots that stay"
        )
    reserve_bytes = reserve_mib * MIB + prices.prompt_bytes + prices.bind_bytes
    room = free_bytes - reserve_bytes
    ceiling = most_slots(sizes, request)
    auto_slots = min(max(0, room) // sizes.max_blob_bytes, ceiling)
    if is_auto(request):
        budget = auto_slots * sizes.max_blob_bytes
        wanted_bytes = sizes.max_blob_bytes
    else:
        wanted_bytes = (request.expert_cache or 0) * sizes.max_blob_bytes
        budget = min(wanted_bytes, max(0, room))
        if request.cap_expert_cache:
            if budget < wanted_bytes:
                notes.append(
                    f"cache.slots={request.expert_cache:,} asks for {wanted_bytes / MIB:,.1f} MiB; {budget / MIB:,.1f}"
                    " MiB are free above the reserve, and the cache takes no more"
                )
            wanted_bytes = min(wanted_bytes, sizes.max_blob_bytes)
    slots, num_bytes, uniform = fill(sizes, request, budget, ceiling)
    if slots == ceiling < sizes.num_ranks:
        notes.append(f"the profile ranks {ceiling:,} experts, which is the most slots there can be")
    if request.cache_per_layer:
        wanted_bytes = max(wanted_bytes, sizes.num_layers * sizes.max_blob_bytes)
    short = max(0, wanted_bytes - room)
    return CacheSize(slots, num_bytes, uniform, budget, reserve_mib, reserve_bytes, short, tuple(notes))


def fill(sizes: PackSizes, request: StrataRequest, budget_bytes: int, ceiling: int) -> tuple[int, int, bool]:
    """Return (slots, their bytes, whether they are uniform) within a budget.

    Slots have the sizes of their experts when a profile ranks these; otherwise each holds the largest blob. Equal
    slots per layer need uniform ones.
    """
    if request.profile and sizes.mixed and not request.cache_per_layer:
        slots = sizes.slots_within(budget_bytes, ceiling)
        return slots, sizes.slots_bytes(0, slots), False
    slots = sizes.uniform_slots_within(budget_bytes, ceiling)
    if request.cache_per_layer:
        slots = slots // sizes.num_layers * sizes.num_layers
    return slots, slots * sizes.max_blob_bytes, True


def open_cache(
    sizes: PackSizes, request: StrataRequest, card: Card, cache: CacheSize, free_bytes: int
) -> tuple[CacheSize, tuple[str, ...]]:
    """Return the cache after its slots have been written and free memory was read again, with warnings.

    What was promised and is missing then (`Card.touch_bytes`) is given back from the cache, in at most six attempts
    (planning notes 2.3). free_bytes: free when the cache was sized.
    """
    warnings: list[str] = []
    slots, num_bytes, reserve = cache.slots, cache.bytes, cache.reserve_bytes
    attempts = emptied = 0
    while attempts < TOUCH_ATTEMPTS and slots:
        free = max(0, free_bytes - card.touch_bytes - num_bytes)
        give = give_back_bytes(free, reserve, num_bytes, emptied)
        if not give:
            break
        attempts += 1
        emptied += free < NOTHING_LEFT_BYTES
        slots, num_bytes, _ = fill(sizes, request, max(0, num_bytes - give), most_slots(sizes, request))
    if attempts:
        warnings.append(
            f"only {max(0, free_bytes - card.touch_bytes - cache.bytes) / MIB:,.0f} MiB free once the slots are"
            f" written: the cache gave back {cache.slots - slots:,} slots ({(cache.bytes - num_bytes) / MIB:,.1f} MiB)"
        )
    free = max(0, free_bytes - card.touch_bytes - num_bytes)
    if slots and free < FINAL_OK_BYTES:
        needed = cache.reserve_mib + LOW_TARGET_MIB - free // MIB
        warnings.append(
            f"LOW: {free / MIB:,.0f} MiB are free beside the filled cache and requests may stall; set"
            f" hardware.vram_reserve_mib={needed}"
        )
    return replace(cache, slots=slots, bytes=num_bytes), tuple(warnings)


def give_back_bytes(free_bytes: int, reserve_bytes: int, cache_bytes: int, emptied: int) -> int:
    """Return what the cache gives back after a reading of free memory; 0 when enough is free (planning notes 2.3).

    emptied: earlier readings with next to nothing free, which say little: the first two of them give at least 1 GiB,
    later ones a quarter of the cache.
    """
    if free_bytes >= reserve_bytes - SLACK_BYTES:
        return 0
    give = reserve_bytes - free_bytes + SLACK_BYTES
    if free_bytes < NOTHING_LEFT_BYTES:
        give = max(give, NOTHING_LEFT_GIVE_BYTES) if emptied < 2 else cache_bytes // 4
    return give


def _small_card_reserve(sizes: PackSizes, request: StrataRequest, free_bytes: int, prices: Prices) -> int:
    """Return the reserve in MiB; a default one shrinks for the least useful cache (#496, planning notes 2.2)."""
    if request.reserve_given or request.reserve_mib <= FIT_FLOOR_MIB or not is_auto(request):
        return request.reserve_mib
    least = least_slots(sizes, request, prices.smallest_loan_bytes)
    after_cache = prices.prompt_bytes + prices.bind_bytes
    slots = (free_bytes - request.reserve_mib * MIB - after_cache) // sizes.max_blob_bytes
    if slots >= least:
        return request.reserve_mib
    fit = (free_bytes - after_cache - least * sizes.max_blob_bytes) // MIB
    return min(fit, request.reserve_mib) if fit >= FIT_FLOOR_MIB else request.reserve_mib


def least_slots(sizes: PackSizes, request: StrataRequest, smallest_loan_bytes: int) -> int:
    """Return the slots below which a default reserve shrinks: the smallest loan and those that stay, or one."""
    return slots_for(sizes, smallest_loan_bytes) if request.borrow and request.profile else 1


def slots_for(sizes: PackSizes, loan_bytes: int) -> int:
    """Return the slots of the largest blob that hold a loan beside the 128 that stay."""
    return -(-loan_bytes // sizes.max_blob_bytes) + MIN_KEPT_SLOTS
