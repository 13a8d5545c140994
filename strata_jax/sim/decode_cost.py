"""What a decode round costs: weights and hits read from device memory, while missed experts come by two other roads.

The device computes the hits; of the missed experts a part is read over PCIe by the device, the rest is computed by
the CPU, both at the same time (planning notes 4.1). The numbers are a profile's; the formulas hold for all cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, floor

from strata_jax.memory.strata.kv_pools import kv_token_bytes
from strata_jax.memory.strata.request import ExpertTier
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.sim.prefill_cost import MS_PER_GB_S
from strata_jax.sim.profile import Profile

F32_BYTES = 4
PCIE_BASE = 0.55  # share of misses read over PCIe by native packs, planning notes 4.3
PCIE_FULL_GB_S = 20.0
MAX_MISSES = 400


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One decode round.

    Attributes:
        rows: tokens verified. context: cells before them. hit_rate: share of look-ups with a slot.
        distinct_experts, distinct_misses: experts that a layer is asked for, and those without a slot.
        pcie_frac: share of the missed experts that the device reads itself. file_share: share without a RAM copy.
        drafts: tokens the draft block proposes after the round; None: one less than `rows`.
        draft_vocab: rows of the draft vocabulary, read once per draft.
        tier, pinned_share: where experts without a slot lie.
        free_bytes: device memory that nobody owns, for the effects of the operating system.
    """

    rows: int
    context: int
    hit_rate: float
    distinct_experts: float
    distinct_misses: float
    pcie_frac: float
    file_share: float = 0.0
    kv_type: str = "int8"
    kv_streamed: bool = False
    free_bytes: int = 0
    drafts: float | None = None
    draft_vocab: int = 0
    tier: ExpertTier = ExpertTier.ARENA
    pinned_share: float = 1.0


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Time of one round in ms and where its misses went.

    Attributes:
        gpu_ms: dense layers, drafts and hits. pcie_ms, cpu_ms: the two roads of misses, which run at the same time.
        file_ms: reading what RAM does not hold.
        cpu_experts_per_layer: distinct experts that the CPU computes. pcie_share: of all look-ups, over PCIe.
    """

    total_ms: float
    gpu_ms: float
    pcie_ms: float
    cpu_ms: float
    file_ms: float
    cpu_experts_per_layer: float
    pcie_share: float


def auto_pcie_frac(profile: Profile) -> float:
    """Return the share of misses read over PCIe by default: 0.55, less below 20 GB/s (planning notes 4.3)."""
    return PCIE_BASE * min(1.0, profile["pcie_gb_s"] / PCIE_FULL_GB_S)


def round_cost(profile: Profile, sizes: PackSizes, facts: RoundFacts) -> RoundCost:
    """Return the time of one round.

    total = dense + max(hits + pcie, cpu) + files: in every layer the device works on hits and on the experts it pulls
    while the CPU computes its own.
    """
    layers, blob = sizes.num_layers, sizes.mean_blob_bytes
    hits = (facts.distinct_experts - facts.distinct_misses) * layers * blob
    hits_ms = hits * MS_PER_GB_S / (profile["hbm_gb_s"] * profile["hbm_share"])
    dense = dense_ms(profile, sizes, facts)
    pulled = expected_pulls(round(facts.distinct_misses, 3), facts.pcie_frac)
    computed = facts.distinct_misses - pulled
    pcie_ms = pulled * layers * blob * pull_ms_per_byte(profile, facts.pinned_share, facts.tier)
    cpu_ms = computed * layers * cpu_expert_ms(profile, sizes)
    file_ms = facts.distinct_misses * facts.file_share * layers * blob * MS_PER_GB_S / profile["file_gb_s"]
    if facts.tier is ExpertTier.MMAP:  # what RAM holds is in the page cache, not where a kernel could read it
        cached = facts.distinct_misses * (1 - facts.file_share)
        file_ms += cached * layers * blob * MS_PER_GB_S / profile["page_cache_gb_s"]
    return RoundCost(
        total_ms=dense + max(hits_ms + pcie_ms, cpu_ms) + file_ms,
        gpu_ms=dense + hits_ms,
        pcie_ms=pcie_ms,
        cpu_ms=cpu_ms,
        file_ms=file_ms,
        cpu_experts_per_layer=computed,
        pcie_share=pulled / facts.distinct_experts if facts.distinct_experts else 0.0,
    )


def dense_ms(profile: Profile, sizes: PackSizes, facts: RoundFacts) -> float:
    """Return what a round costs without its experts: launches, dense weights, the context, the drafts."""
    drafts = facts.rows - 1 if facts.drafts is None else facts.drafts
    kv_bytes = (
        facts.rows * min(facts.context, sizes.index_top_k) * kv_token_bytes(sizes, facts.kv_type, with_drafter=False)
    )
    key_bytes = facts.context / max(1, sizes.index_block) * sizes.index_dim * F32_BYTES * sizes.num_attention_layers
    draft_experts = sizes.drafter_expert_bytes * sizes.num_experts_used / sizes.num_experts
    draft = sizes.drafter_dense_bytes + draft_experts + facts.draft_vocab * sizes.head_row_bytes
    num_bytes = sizes.dense_bytes + sizes.head_bytes + kv_bytes + key_bytes + drafts * draft
    read_ms = num_bytes * MS_PER_GB_S / (profile["hbm_gb_s"] * profile["hbm_share"])
    return profile["launch_ms"] + profile["row_ms"] * (facts.rows - 1) + profile["draft_ms"] * drafts + read_ms


def pull_ms_per_byte(profile: Profile, pinned_share: float, tier: ExpertTier) -> float:
    """Return ms per byte of a missed expert that the device reads over PCIe.

    Registered memory is read in place, the rest of an arena at a lower rate; single RAM copies of a low-RAM tier go
    through a buffer that the host fills, at a rate of the host.
    """
    direct = profile["pcie_gb_s"] * min(1.0, profile["copy_share"] * profile["pull_share"])
    if tier is not ExpertTier.ARENA:
        return MS_PER_GB_S / min(direct, profile["bounce_gb_s"])
    return MS_PER_GB_S * (pinned_share / direct + (1 - pinned_share) / (direct * profile["pull_unpinned_share"]))


def cpu_expert_ms(profile: Profile, sizes: PackSizes) -> float:
    """Return the time the CPU's workers need for one expert: bound by its instructions or by its memory."""
    core = profile["cpu_core_gweights_s"] * (profile["cpu_avx512_ratio"] if profile.isa == "avx512" else 1.0)
    weights = 3 * sizes.embed_width * sizes.expert_width
    compute_ms = weights / (profile["cpu_cores"] * core) * MS_PER_GB_S
    return max(compute_ms, sizes.mean_blob_bytes * MS_PER_GB_S / (profile["ram_gb_s"] * profile["ram_share"]))


@lru_cache(maxsize=4096)
def expected_pulls(misses: float, frac: float) -> float:
    """Return the mean of floor(frac x m) over a Poisson number m of misses in a layer: whole experts are pulled."""
    if misses <= 0 or frac <= 0:
        return 0.0
    if frac >= 1 or misses > MAX_MISSES:
        return misses * min(1.0, frac)
    chance, total = exp(-misses), 0.0
    for count in range(1, int(misses + 10 * misses**0.5) + 12):
        chance *= misses / count
        total += chance * floor(frac * count + 1e-9)
    return total
