"""What the Strata planning rules need of a model, summed once from any geometry: a preset's or a GGUF header's.

Widths under the names of planning notes 1.1, blobs per layer, dense bytes, states, and the popularity profile's ranks
as slots. A *rank* is a place in the profile, 0 the hottest; slot i of a fresh cache holds rank i. Pure, no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata_jax.errors import ConfigError, FormatError
from strata_jax.geometry import Geometry
from strata_jax.gguf.layout import EXPERT_STACKS, OUTPUT, PLE_TABLE, TOKEN_EMBD
from strata_jax.memory.ledger import MIB
from strata_jax.memory.sizes import gdn_channels, gdn_state_bytes, ple_state_bytes
from strata_jax.presets import PresetGeometry, interleave
from strata_jax.quants import HotRanks

SLOT_ALIGN_BYTES = 256
"""A slot of a sized cache is the blob rounded up to this (planning notes 1.2)."""

DRAFTER_BUFFER_BYTES = 55 * MIB
"""The drafter's buffers at the published width: 839 MiB logged less 675 of experts and 109 of dense weights
(planning notes 1.6)."""
DRAFTER_BUFFER_WIDTH = 2560

_DENSE = ("final mixer", "mixers", "GDN", "attention", "indexers", "routers", "shared experts", "PLE layer")


@dataclass(frozen=True, slots=True, eq=False)
class PackSizes:
    """Sizes of one model as the Strata rules see it. Compared by identity, so that results can be cached.

    Attributes:
        embed_width: N; residual_width: D = streams x N; mixer_rank: LR; gate_up, down: of one routed expert.
        query_width: all query heads; kv_width: all K/V heads of one side; gdn_channels: inputs of the convolution.
        index_block: cells that share one pooled index key, which is also a K/V page.
        num_attention_layers, num_recurrent_layers: of the trunk; num_draft_layers: draft blocks, each with K/V.
        blob_bytes: one routed expert, per layer; gate_up_bytes, down_bytes: its parts.
        dense_bytes: weights on the device besides experts, head and draft block; the embedding is in host memory.
        head_bytes: the head's rows, whether or not the file has a tensor of its own for them.
        drafter_expert_bytes, drafter_dense_bytes, drafter_buffer_bytes: the draft block, without its K/V.
        ple_row_bytes: one row of the n-gram table; ple_rows_per_token: rows that a token reads.
        recurrent_state_bytes: all GDN layers of one sequence; ple_history_bytes: the n-gram convolution's inputs.
        rank_layer, rank_bytes, rank_end_bytes: layer, slot bytes and running sum of slot bytes of each profile rank.
    """

    name: str
    num_layers: int
    num_draft_layers: int
    num_experts: int
    num_experts_used: int
    vocab_size: int
    context_length: int
    embed_width: int
    expert_width: int
    shared_expert_width: int
    num_streams: int
    residual_width: int
    mixer_rank: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    query_width: int
    kv_width: int
    index_heads: int
    index_dim: int
    index_top_k: int
    index_block: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    gdn_channels: int
    gdn_value_width: int
    conv_kernel: int
    num_attention_layers: int
    num_recurrent_layers: int
    blob_bytes: tuple[int, ...]
    gate_up_bytes: tuple[int, ...]
    down_bytes: tuple[int, ...]
    dense_bytes: int
    embedding_bytes: int
    head_bytes: int
    head_row_bytes: int
    drafter_expert_bytes: int
    drafter_dense_bytes: int
    drafter_buffer_bytes: int
    ple_row_bytes: int
    ple_rows_per_token: int
    ple_table_bytes: int
    recurrent_state_bytes: int
    ple_history_bytes: int
    rank_layer: NDArray[np.int16] = field(repr=False)
    rank_bytes: NDArray[np.int64] = field(repr=False)
    rank_end_bytes: NDArray[np.int64] = field(repr=False)

    @property
    def num_ranks(self) -> int:
        """Routed experts of the trunk, each of which the profile ranks."""
        return self.num_layers * self.num_experts

    @property
    def max_blob_bytes(self) -> int:
        return max(self.blob_bytes)

    @property
    def max_gate_up_bytes(self) -> int:
        return max(self.gate_up_bytes)

    @property
    def max_down_bytes(self) -> int:
        return max(self.down_bytes)

    @property
    def total_expert_bytes(self) -> int:
        return sum(self.blob_bytes) * self.num_experts

    @property
    def mean_blob_bytes(self) -> float:
        return sum(self.blob_bytes) / self.num_layers

    @property
    def mixed(self) -> bool:
        """Whether blobs differ by layer, so that a cache has slots of several sizes (planning notes 2.2)."""
        return len(set(self.blob_bytes)) > 1

    @property
    def drafter_bytes(self) -> int:
        """The draft block as the engine holds it, buffers included, without its K/V."""
        return self.drafter_expert_bytes + self.drafter_dense_bytes + self.drafter_buffer_bytes

    def slots_within(self, cap_bytes: int, ranked: int | None = None) -> int:
        """Return how many ranks, hottest first, fit in `cap_bytes` as sized slots; `ranked` limits them (#831)."""
        limit = self.num_ranks if ranked is None else min(ranked, self.num_ranks)
        return min(limit, int(self.rank_end_bytes.searchsorted(cap_bytes, side="right")))

    def uniform_slots_within(self, cap_bytes: int, ranked: int | None = None) -> int:
        """Return how many slots of the largest blob fit in `cap_bytes`."""
        limit = self.num_ranks if ranked is None else min(ranked, self.num_ranks)
        return min(limit, max(0, cap_bytes) // self.max_blob_bytes)

    def slots_bytes(self, first: int, end: int) -> int:
        """Return the bytes of the sized slots first ... end - 1."""
        below = int(self.rank_end_bytes[first - 1]) if first > 0 else 0
        return int(self.rank_end_bytes[end - 1]) - below if end > first else 0


@lru_cache(maxsize=64)
def pack_sizes(geometry: Geometry, *, hot_ranks: tuple[HotRanks, ...] | None = None) -> PackSizes:
    """Return the sizes of a model. Cached: a geometry is summed once however often it is planned.

    Args:
        geometry: a preset's or a GGUF header's, with a trunk.
        hot_ranks: mean blob bytes of the profile's hottest ranks; None: a preset's own, none for a file.

    Raises:
        ConfigError: a draft-only file, or tensors are missing.
        FormatError: `hot_ranks` asks for a mean that the blobs cannot give.
    """
    g = geometry
    if not g.has_trunk or TOKEN_EMBD not in g.tensor_types:
        raise ConfigError(
            f"{g.name}: a draft-only file has no layers to plan for; give the model's own file or a preset"
        )
    if hot_ranks is None:
        hot_ranks = g.hot_ranks if isinstance(g, PresetGeometry) else ()
    components = g.component_bytes()
    gate_up, down = zip(*(_expert_parts(g, layer) for layer in range(g.num_layers)))
    blobs = tuple(a + b for a, b in zip(gate_up, down))
    table = g.tensor_types.get(PLE_TABLE)
    trunk_attention = [i for i in g.attention_layers if i < g.num_layers]
    head = g.tensor_types.get(OUTPUT, g.tensor_types[TOKEN_EMBD])
    rank_layer = rank_layers(blobs, g.num_experts, hot_ranks)
    slot_bytes = np.array([_aligned(b) for b in blobs], dtype=np.int64)
    rank_bytes = slot_bytes[rank_layer]
    rank_end_bytes = np.cumsum(rank_bytes)
    for array in (rank_layer, rank_bytes, rank_end_bytes):
        array.setflags(write=False)
    return PackSizes(
        name=g.name,
        num_layers=g.num_layers,
        num_draft_layers=g.num_mtp_layers,
        num_experts=g.num_experts,
        num_experts_used=g.num_experts_used,
        vocab_size=g.vocab_size,
        context_length=g.context_length,
        embed_width=g.embed_width,
        expert_width=max(g.expert_width),
        shared_expert_width=g.shared_expert_width,
        num_streams=g.num_streams,
        residual_width=g.num_streams * g.embed_width,
        mixer_rank=g.mixer_rank,
        num_heads=g.num_heads,
        num_kv_heads=g.num_kv_heads,
        head_dim=g.head_dim,
        rope_dim=g.rope_dim,
        query_width=g.num_heads * g.head_dim,
        kv_width=g.num_kv_heads * g.head_dim,
        index_heads=g.index_heads,
        index_dim=g.index_dim,
        index_top_k=g.index_top_k,
        index_block=max((g.compress_ratio[i] for i in trunk_attention), default=0) or 1,
        gdn_key_heads=g.gdn_key_heads,
        gdn_value_heads=g.gdn_value_heads,
        gdn_head_dim=g.gdn_head_dim,
        gdn_channels=gdn_channels(g),
        gdn_value_width=g.gdn_value_heads * g.gdn_head_dim,
        conv_kernel=g.conv_kernel,
        num_attention_layers=len(trunk_attention),
        num_recurrent_layers=len(g.recurrent_layers),
        blob_bytes=blobs,
        gate_up_bytes=gate_up,
        down_bytes=down,
        dense_bytes=sum(components[name] for name in _DENSE),
        embedding_bytes=components["token_embd"],
        head_bytes=head.num_bytes,
        head_row_bytes=head.num_bytes // g.vocab_size,
        drafter_expert_bytes=components["MTP experts"],
        drafter_dense_bytes=components["MTP without experts"],
        drafter_buffer_bytes=DRAFTER_BUFFER_BYTES * g.embed_width // DRAFTER_BUFFER_WIDTH if g.num_mtp_layers else 0,
        ple_row_bytes=table.num_bytes // table.shape[0] if table is not None else 0,
        ple_rows_per_token=len(g.ple_vocab_sizes),
        ple_table_bytes=table.num_bytes if table is not None else 0,
        recurrent_state_bytes=len(g.recurrent_layers) * gdn_state_bytes(g),
        ple_history_bytes=ple_state_bytes(g),
        rank_layer=rank_layer,
        rank_bytes=rank_bytes,
        rank_end_bytes=rank_end_bytes,
    )


def rank_layers(blob_bytes: Sequence[int], num_experts: int, hot_ranks: Sequence[HotRanks] = ()) -> NDArray[np.int16]:
    """Return the layer of each profile rank: every layer `num_experts` times, blob sizes mixed evenly.

    Within a segment the running sum of blobs follows the segment's mean; without segments the mean of the whole pack.
    The order says nothing about which expert of a layer a rank is.

    Raises FormatError if a segment asks for a mean that the blobs cannot give, or for more experts than there are.
    """
    sizes = sorted(set(blob_bytes))
    layers = [np.array([i for i, b in enumerate(blob_bytes) if b == size]) for size in sizes]
    left = np.array([len(group) * num_experts for group in layers])
    used = np.zeros(len(sizes), dtype=np.int64)
    parts: list[NDArray[np.int64]] = []
    segments: list[HotRanks | None] = [*hot_ranks, None]
    for segment in segments:
        counts = left if segment is None else _tilted_counts(sizes, left, segment)
        groups = interleave(counts.tolist())
        part = np.empty(len(groups), dtype=np.int64)
        for group, members in enumerate(layers):
            places = np.flatnonzero(groups == group)
            part[places] = members[(used[group] + np.arange(len(places))) % len(members)]
        parts.append(part)
        used, left = used + counts, left - counts
    return np.concatenate(parts).astype(np.int16)


def _tilted_counts(sizes: Sequence[int], left: NDArray[np.int64], segment: HotRanks) -> NDArray[np.int64]:
    """Return how many ranks of each blob size give `segment` its mean, as close to the pack's own mix as that allows.

    Weights are tilted exponentially in the size, which changes the mix least (in relative entropy) for a given mean.
    """
    values = np.array(sizes, dtype=np.float64)
    ranks = min(segment.ranks, int(left.sum()))
    if len(sizes) == 1 or ranks == 0:
        return np.minimum(left, ranks)
    scaled = (values - values.mean()) / (values.max() - values.min())

    def shares(tilt: float) -> NDArray[np.float64]:
        weights = left * np.exp(tilt * scaled)
        return weights / weights.sum()

    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(middle) @ values < segment.mean_blob_bytes else (low, middle)
    exact = shares(high) * ranks
    counts = np.floor(exact).astype(np.int64)
    rest = ranks - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    mean = counts @ values / ranks
    if (counts > left).any() or abs(mean - segment.mean_blob_bytes) > max(1.0, values.max() / ranks):
        raise FormatError(
            f"hot_ranks: {segment.ranks} ranks with a mean blob of {segment.mean_blob_bytes} bytes cannot be made "
            f"from blobs of {sizes} bytes, of which {left.tolist()} are left; their mean, "
            f"{round(left @ values / left.sum())}, always works"
        )
    return counts


def _expert_parts(g: Geometry, layer: int) -> tuple[int, int]:
    down = g.tensor_types[f"blk.{layer}.{EXPERT_STACKS[-1]}"].num_bytes // g.num_experts
    return g.expert_bytes(layer) - down, down


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
