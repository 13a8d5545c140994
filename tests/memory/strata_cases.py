"""Cards, packs and requests for the tests of the Strata planner, and the fit of a card to one published plan."""

from __future__ import annotations

from dataclasses import replace

from strata_jax.memory.ledger import MIB
from strata_jax.memory.strata.plan import try_plan_strata
from strata_jax.memory.strata.request import Card, StrataRequest
from strata_jax.memory.strata.result import StrataPlan
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.memory.strata.unfit import StrataUnfit
from strata_jax.presets import preset_geometry

GIB = 2**30
LAPTOP = Card("8 GB laptop", 8_151 * MIB, 1_530 * MIB, 303 * MIB, 64 * GIB, os="windows", pinned_share=0.0)
BIG = Card("32 GB", 32_607 * MIB, 1_685 * MIB, 0, 128 * GIB, os="windows")
SMALL = StrataRequest(
    kv_type="q4_0", kv_resident_cells=32_768, draft_vocab=40_525, reserve_mib=590, checkpoints=3
)  # fmt: skip


def pack(quant: str = "iq2_xs") -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", quant))


def planned(sizes: PackSizes, card: Card, request: StrataRequest) -> StrataPlan:
    found = try_plan_strata(sizes, card, request)
    assert isinstance(found, StrataPlan), found.message()
    return found


def unfit(sizes: PackSizes, card: Card, request: StrataRequest) -> StrataUnfit:
    found = try_plan_strata(sizes, card, request)
    assert isinstance(found, StrataUnfit)
    return found


def fitted(sizes: PackSizes, card: Card, request: StrataRequest, slots: int) -> Card:
    """Return the card with the memory that others hold such that `request` gets `slots`: the one fitted number.

    Of all that give so many, the middle.
    """

    def least_taken(slots: int) -> int:
        low, high = 0, card.vram_bytes
        while low < high:
            middle = (low + high) // 2
            found = try_plan_strata(sizes, replace(card, taken_bytes=middle), request)
            if isinstance(found, StrataPlan) and found.slots > slots:
                low = middle + 1
            else:
                high = middle
        return low

    return replace(card, taken_bytes=(least_taken(slots) + least_taken(slots - 1)) // 2)
