"""Experts that are copied to the device for the chunk that needs them: how large the buffers are, who goes there. Pure.

While blocks are computed, the link to host memory is free for the experts that they miss (`engine/staging.py`). There
are two buffers: the experts in one are computed while the other is filled. Until a block is routed the likeliest of its
missing experts are copied, as many as both buffers hold; after that, those which it needs and which are not there. What
is expected to miss little reads it where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import ConfigError
from strata_jax.memory.expert_kernels import kernel_layers
from strata_jax.memory.ledger import MIB
from strata_jax.memory.sizes import ModelSizes

LINE_BYTES = 512  # experts start at whole lines of 128 words
NUM_BUFFERS = 2
MIN_MEAN_ROWS = 4  # rows of an expert, on average, below which chunks use too few experts to copy any unasked
MIN_ODDS = 0.75  # of an expert to be used by a chunk, from which on it is copied unasked
MIN_GROUP = 8  # experts of a buffer below which auto has none: every group is a program to start
AUTO_SHARE = 8  # auto takes this part of what expert slots could have
# ... or, for long chunks, up to a larger part what the link brings while a block is computed up to its routing: 1.1 us
# a token at 50 GB/s. With less, the link waits for the routing with full buffers (bench/LOG.md: 16,384 tokens by 8,192
# in 1.84 s with 448 MiB, in 2.25 s with 156 MiB and 206 slots more).
AUTO_TOKEN_BYTES, AUTO_MOST_SHARE = 56 * 1024, 3
# What a block is expected to miss, below which it is read where it lies, 2.2 ms at 45 GB/s: copied, it would come after
# the host has seen the routing, and nothing is started ahead of that. That cost 3.6 ms a block with 38 MB to come (an
# H200, chunks of 2,048 tokens: 6.7 ms a block of which some 3.1 are computed; bench/LOG.md).
IN_PLACE_BYTES = 96 * MIB
UNSEEN_USES = 0.25  # counted for every expert: one that nobody has used yet may still be used


@dataclass(frozen=True, slots=True)
class StageNeed:
    """What a model's blocks could stage.

    Attributes:
        expert_bytes: of the largest expert that kernels compute. layer_bytes: of the largest block of such experts.
        num_blocks: that share the expert slots.
        mean_rows: of an expert per token of a chunk: K / X.
    """

    expert_bytes: int
    layer_bytes: int
    num_blocks: int
    mean_rows: float

    def stages(self, num_tokens: int) -> bool:
        """Whether programs for so many tokens take staged experts."""
        return self.expert_bytes > 0 and num_tokens * self.mean_rows >= MIN_MEAN_ROWS


@lru_cache(maxsize=64)
def stage_need(sizes: ModelSizes, *, with_draft: bool, expert_kernels: bool) -> StageNeed:
    """Return what the blocks of a model could stage."""
    g, num_blocks = sizes.geometry, sizes.blocks(with_draft)
    by_kernel = kernel_layers(g, num_blocks) if expert_kernels else (False,) * num_blocks
    largest = max((blob for blob, used in zip(sizes.blobs, by_kernel) if used), default=0)
    layer_bytes = expert_lines(largest) * LINE_BYTES * g.num_experts
    return StageNeed(largest, layer_bytes, num_blocks, g.num_experts_used / g.num_experts)


def expert_lines(num_bytes: int) -> int:
    """Return the lines of a buffer that an expert takes."""
    return -(-num_bytes // LINE_BYTES)


def buffer_lines(stage_bytes: int) -> int:
    """Return the lines of each buffer."""
    return stage_bytes // (NUM_BUFFERS * LINE_BYTES)


def choose_stage_bytes(
    wanted: int | None, need: StageNeed, room_bytes: int | None, num_tokens: int = 0, slot_bytes: int | None = None,
    *, lends: bool = False,
) -> int:  # fmt: skip
    """Return the bytes of both buffers together; 0: nothing is staged.

    Args:
        wanted: as given; None: auto.
        room_bytes: device memory that everything but slots leaves; None where the device has none of its own.
        num_tokens: of a chunk.
        slot_bytes: of the slots, if given; None: as many as fit beside the buffers.
        lends: whether slots make room for a prompt: else the buffers get no more than given ones leave.

    Raises:
        ConfigError: the given bytes hold no expert, or no block has experts that kernels compute.
    """
    if wanted == 0:
        return 0
    least = NUM_BUFFERS * expert_lines(need.expert_bytes) * LINE_BYTES
    if wanted is not None:
        given = f"prefill.stage_mib={wanted / MIB:g}"
        if not need.expert_bytes:
            raise ConfigError(
                f"{given} and engine.kernels: only kernels read staged experts, and here they compute none. Set"
                " engine.kernels=triton if the model has blocks for it, or prefill.stage_mib=auto"
            )
        if wanted < least:
            raise ConfigError(
                f"{given} and experts of {need.expert_bytes / MIB:.2f} MiB: each of {NUM_BUFFERS} buffers holds one at"
                f" least. Set prefill.stage_mib={-(-least // MIB)} or more, or 0"
            )
        return NUM_BUFFERS * buffer_lines(wanted) * LINE_BYTES
    if room_bytes is None or not need.expert_bytes:
        return 0
    share = max(room_bytes // AUTO_SHARE, min(num_tokens * AUTO_TOKEN_BYTES, room_bytes // AUTO_MOST_SHARE))
    if slot_bytes is not None and not lends:
        share = min(share, max(0, room_bytes - slot_bytes))
    resident = max(0, room_bytes - share) if slot_bytes is None else slot_bytes
    missing = max(0, need.layer_bytes - resident // need.num_blocks)
    most = min(NUM_BUFFERS * missing, share)
    return NUM_BUFFERS * buffer_lines(most) * LINE_BYTES if most >= MIN_GROUP * least else 0


def odds_of_use(uses: NDArray[np.float64], num_tokens: float, chunk_tokens: int, num_used: int
                ) -> NDArray[np.float64]:  # fmt: skip
    """Return f64[X], how likely a chunk uses each expert of a block.

    Args:
        uses: f64[X], how many of ``num_tokens`` tokens have used each expert, 0 of 0 at first.
        num_used: experts per token.
    """
    odds = (uses + UNSEEN_USES) / (num_tokens + UNSEEN_USES * len(uses) / num_used)
    return 1 - (1 - np.minimum(odds, 1.0)) ** chunk_tokens


def choose_ahead(missing: NDArray[np.bool_], odds: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Return the experts to copy before a block is routed, ascending: the likeliest of the missing ones.

    Args:
        missing: bool[X], experts that are not resident. odds: f64[X], as of `odds_of_use`. most: so many at most.
    """
    likely = np.flatnonzero(missing & (odds >= MIN_ODDS))
    return np.sort(likely[np.argsort(-odds[likely], kind="stable")[:most]])


def reads_in_place(missing: NDArray[np.bool_], odds: NDArray[np.float64], expert_bytes: int) -> bool:
    """Whether a block misses so little that nothing is copied for it; arguments as of `choose_ahead`."""
    return float(odds[missing].sum()) * expert_bytes <= IN_PLACE_BYTES


def groups_of(experts: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """Cut experts into as few groups as can be, alike in size, of ``most`` at most: what a buffer holds."""
    return np.array_split(experts, -(-len(experts) // most)) if len(experts) else []
