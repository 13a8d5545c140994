"""Packs with stated expert blobs for the tests of prices and choosers, and the published 8 GB card."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from strata_jax.memory.strata.request import Card, StrataRequest
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.presets import preset_geometry

MIB = 2**20
IQ2_XS = (1_049_600, 460_800)  # gate and up, down of the largest expert: 1,510,400 bytes
IQ3_XXS = (1_254_400, 460_800)
IQ3_S = (1_740_800, 921_600)
Q2_0 = (921_600, 460_800)

PINNED = Card("pinned", 8 << 30, pinned_share=1.0)
UNPINNED = Card("unpinned", 8 << 30, pinned_share=0.0)
STREAMED_Q4 = StrataRequest(kv_type="q4_0", kv_resident_cells=32_768)
"""The 8 GB laptop of the head-alias source: 262,144 cells of q4_0, streamed."""


@lru_cache(maxsize=16)
def pack(parts: tuple[int, int] = IQ3_XXS) -> PackSizes:
    """Return the full model with experts of one size, so that prices do not depend on a preset's mix."""
    sizes = pack_sizes(preset_geometry("qwen38_flash", "iq3_xxs"))
    blob, n = sum(parts), sizes.num_layers
    slot_bytes = np.full(sizes.num_ranks, -(-blob // 256) * 256, dtype=np.int64)
    return replace(
        sizes,
        blob_bytes=(blob,) * n,
        gate_up_bytes=(parts[0],) * n,
        down_bytes=(parts[1],) * n,
        rank_bytes=slot_bytes,
        rank_end_bytes=np.cumsum(slot_bytes),
    )


def preset(quant: str) -> PackSizes:
    """Return the full model as the preset has it, experts of several sizes included."""
    return pack_sizes(preset_geometry("qwen38_flash", quant))
