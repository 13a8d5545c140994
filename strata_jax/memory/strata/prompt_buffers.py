"""What a chunk of prompt tokens needs in device memory, term by term (planning notes 2.4).

One arena holds everything a chunk computes with: scratch that does not depend on the chunk, streams that live through
all layers, one region that recurrent, attention and expert halves of a layer use in turn, and the ring that experts
are streamed through. Letters: T tokens, N width, D residual width (streams x N), E experts, K experts per token,
F expert width. The formulas are the original's; evaluated for seven published plans they are within 2 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from strata_jax.errors import ConfigError
from strata_jax.kv_types import sides
from strata_jax.memory.strata.kv_pools import kv_cell_bytes
from strata_jax.memory.strata.request import MIB, StrataRequest, Version
from strata_jax.memory.strata.sizes import PackSizes

F32, F16, I32 = 4, 2, 4
GEMM_SCRATCH_BYTES = 64 * MIB
BLAS_BYTES = 32 * MIB
SLACK_BYTES = 8 * MIB
MATMUL_GROUP = 16  # experts whose packed weights one grouped product holds
DEQUANT_BUFFERS = 2
SCORE_ROWS = 256  # rows of index scores that are computed at a time
FALLBACK_TOKENS = 1_023  # chunks above stream all experts and need no half-precision rows of them
ACTIVATION_BLOCK, ACTIVATION_BLOCK_BYTES = 128, 144
TAKE_ALIGN = TAKE_GUARD = 256
OWN_ALIGN = 2 * MIB
RING = "ring of streamed experts"

Take = tuple[str, int]


def buffer_terms(
    sizes: PackSizes,
    tokens: int,
    *,
    context_cells: int,
    kv_type: str,
    kv_streamed: bool,
    ring_slots: int,
    version: Version,
) -> Mapping[str, int]:
    """Return the bytes of every term of the prompt buffers; their sum is `buffer_bytes`.

    Args:
        tokens: chunk size, at least 1.
        context_cells: cells of the whole K/V: it sizes the index scores and, when the K/V is streamed, the stage of
            one layer's K/V.
        ring_slots: slots of the ring, each for the largest expert (``ring.ring_slots``).
        version: release 0.1.35 and older hold one more copy of the residual stream.

    Raises:
        ConfigError: no tokens, a negative ring or context, or a type of K/V that does not exist.
    """
    _check(tokens, context_cells, kv_type, ring_slots)
    terms: dict[str, int] = {}
    for name, num_bytes in _shared(sizes, tokens, context_cells, kv_type, kv_streamed, version):
        terms[name] = terms.get(name, 0) + _take(num_bytes)
    name, region = max(
        ((name, sum(map(_take, set_))) for name, set_ in _regions(sizes, tokens, context_cells)), key=lambda r: r[1]
    )
    terms[f"region of a layer ({name})"] = region
    terms[RING] = ring_bytes(sizes, ring_slots)
    return terms


def buffer_bytes(
    sizes: PackSizes,
    tokens: int,
    *,
    context_cells: int,
    kv_type: str,
    kv_streamed: bool,
    ring_slots: int,
    version: Version,
) -> int:
    """Return the bytes of the prompt buffers of a chunk in one arena, ring included. See `buffer_terms`."""
    _check(tokens, context_cells, kv_type, ring_slots)
    return _ringless_bytes(sizes, tokens, context_cells, kv_type, kv_streamed, version) + ring_bytes(sizes, ring_slots)


def ring_bytes(sizes: PackSizes, ring_slots: int) -> int:
    """Return what a ring takes from the arena."""
    return _take(ring_slots * sizes.max_blob_bytes)


def owned_bytes(
    sizes: PackSizes,
    tokens: int,
    *,
    context_cells: int,
    kv_type: str,
    kv_streamed: bool,
    ring_slots: int,
    version: Version,
) -> int:
    """Return the bytes of prompt buffers of their own: every tensor an allocation of whole 2 MiB (planning notes 2.4).

    Tensors of the layer's region still share memory, and the ring is one allocation.
    """
    _check(tokens, context_cells, kv_type, ring_slots)
    shared = (b for _, b in _shared(sizes, tokens, context_cells, kv_type, kv_streamed, version))
    region = max(_whole(set_) for _, set_ in _regions(sizes, tokens, context_cells))
    return _whole(shared) + region + _whole([ring_slots * sizes.max_blob_bytes])


def request_bytes(sizes: PackSizes, request: StrataRequest, tokens: int, ring_slots: int) -> int:
    """Return `buffer_bytes` of a chunk under a request's context, K/V and version."""
    return buffer_bytes(
        sizes,
        tokens,
        context_cells=request.context_cells,
        kv_type=request.kv_type,
        kv_streamed=request.kv_streamed,
        ring_slots=ring_slots,
        version=request.version,
    )


def request_owned_bytes(sizes: PackSizes, request: StrataRequest, tokens: int, ring_slots: int) -> int:
    """Return `owned_bytes` of a chunk under a request's context, K/V and version."""
    return owned_bytes(
        sizes,
        tokens,
        context_cells=request.context_cells,
        kv_type=request.kv_type,
        kv_streamed=request.kv_streamed,
        ring_slots=ring_slots,
        version=request.version,
    )


def old_owned_price_bytes(tokens: int) -> int:
    """Return what the cache is charged for own buffers by the old rule: 160 MiB and 680 KiB a token (notes 2.2)."""
    return (160 + tokens * 680 // 1024) * MIB


def _check(tokens: int, context_cells: int, kv_type: str, ring_slots: int) -> None:
    if tokens < 1:
        raise ConfigError(f"a prompt chunk needs at least 1 token, got {tokens}")
    if context_cells < 0 or ring_slots < 0:
        raise ConfigError(f"context cells ({context_cells}) and ring slots ({ring_slots}) cannot be negative")
    sides(kv_type)


@lru_cache(maxsize=65_536)
def _ringless_bytes(
    sizes: PackSizes, tokens: int, context_cells: int, kv_type: str, kv_streamed: bool, version: Version
) -> int:
    shared = sum(_take(b) for _, b in _shared(sizes, tokens, context_cells, kv_type, kv_streamed, version))
    return shared + max(sum(map(_take, set_)) for _, set_ in _regions(sizes, tokens, context_cells))


def _take(num_bytes: int) -> int:
    return -(-(num_bytes + TAKE_GUARD) // TAKE_ALIGN) * TAKE_ALIGN


def _whole(tensors: Iterable[int]) -> int:
    return sum(-(-b // OWN_ALIGN) * OWN_ALIGN for b in tensors)


def _shared(
    s: PackSizes, tokens: int, context_cells: int, kv_type: str, kv_streamed: bool, version: Version
) -> Iterator[Take]:
    """Yield the tensors that live through the whole chunk, the ring aside."""
    width, residual = s.embed_width, s.residual_width
    yield "matrix products' scratch", GEMM_SCRATCH_BYTES
    yield "BLAS workspace", BLAS_BYTES
    yield "slack", SLACK_BYTES
    for _ in range(DEQUANT_BUFFERS):
        yield "dequantised expert", 3 * width * s.expert_width * F16
    yield "packed experts of a product", MATMUL_GROUP * s.max_gate_up_bytes
    yield "packed experts of a product", MATMUL_GROUP * s.max_down_bytes
    yield "embedding", tokens * width * F32
    yield "residual streams", tokens * residual * F32
    yield "stream weights", tokens * 4 * F32
    yield "normalised streams", tokens * residual * F16
    if version is Version.V0_1_35:
        yield "normalised streams (f32)", tokens * residual * F32
    yield "mixer", tokens * s.mixer_rank * F32
    yield "mixer", tokens * s.mixer_rank * F16
    yield "gated streams", tokens * residual * F32
    yield "stream weights", tokens * s.num_streams * F32
    yield "mixed input", tokens * width * F32
    yield "half inputs", tokens * width * F16
    yield "half inputs", tokens * width * F16
    yield "output of a half", tokens * width * F32
    for _ in range(4):
        yield "positions", tokens * I32
    yield "expert order", tokens * s.num_experts_used * I32
    yield "expert order", (s.num_experts + 1) * I32
    yield "n-gram rows", tokens * width * F32
    yield "n-gram rows", residual * F32
    if kv_streamed:
        pages = -(-context_cells // s.index_block)
        yield "stage of one layer's K/V", pages * s.index_block * kv_cell_bytes(s, kv_type)


def _regions(s: PackSizes, tokens: int, context_cells: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the three sets of tensors that share the region of a layer."""
    f32 = tokens * F32
    channels, values, heads = s.gdn_channels, s.gdn_value_width, s.gdn_value_heads
    yield "recurrent", [
        channels * f32, values * f32, 2 * heads * f32, heads * f32, heads * f32, channels * f32, values * f32,
        tokens * values * F16,
    ]  # fmt: skip
    queries, keys = s.query_width, s.kv_width
    yield "attention", [
        keys * f32, keys * f32, 2 * queries * f32, queries * f32, s.index_dim * f32, s.index_heads * s.index_dim * f32,
        queries * f32, tokens * queries * F16,
        tokens * (s.index_top_k + s.index_block - 1) * I32,
        SCORE_ROWS * (context_cells // s.index_block + 2) * F32,
    ]  # fmt: skip
    width, inner = s.embed_width, s.expert_width
    pairs, fallback = tokens * s.num_experts_used, min(tokens, FALLBACK_TOKENS) * s.num_experts_used
    yield "experts", [
        s.num_experts * f32, pairs * F32, pairs * I32, pairs * I32, pairs * I32,
        pairs * 2 * inner * F32, pairs * width * F32,
        inner * f32, inner * f32, tokens * inner * F16, width * f32, f32,
        _activations(pairs, width), _activations(pairs, inner), pairs * inner * F32,
        fallback * width * F16, fallback * inner * F16,
    ]  # fmt: skip


def _activations(rows: int, width: int) -> int:
    return rows * (-(-width // ACTIVATION_BLOCK)) * ACTIVATION_BLOCK_BYTES
