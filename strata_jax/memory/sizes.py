"""What the planner needs of a model's geometry, summed once: blobs per block, packed weights by owner, state sizes.

The engine loads exactly these tensors: one-dimensional tensors and convolution kernels as float32, every other one as
stored; the n-gram table stays in the file; an attention layer without sparse selection leaves its indexer out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from strata_jax.geometry import Geometry, TensorSize
from strata_jax.gguf.layout import EXPERT_STACKS, OUTPUT, PLE_TABLE, TOKEN_EMBD, split_block_name
from strata_jax.memory.dense_planes import MAX_DECODED_WEIGHTS, dense_planes
from strata_jax.memory.layout import WORD_BYTES, blob_bytes, cell_block

F32_BYTES = 4
PLE_DILATION = 3  # the n-gram convolution looks back 3 tokens per tap
_EXPERT_COMPONENTS = ("routed experts", "MTP experts")
_CONV_KERNELS = ("ssm_conv1d.weight", "ple_conv1d.weight")


@dataclass(frozen=True, slots=True, eq=False)
class ModelSizes:
    """Sizes of one model; `geometry` holds its widths and counts. Compared by identity, so that results can be cached.

    Attributes:
        blobs: bytes of one expert of each trunk block, then of the draft block.
        dense_bytes: the trunk's weights without routed experts, embedding, head and n-gram table.
        head_bytes: 0 where the head uses the embedding.
        drafter_bytes: the draft block's weights without its routed experts.
        table_row_bytes: the packed n-gram rows that one token reads; 0 without a table.
        decoded_tile_weights: weights of the largest matrix that is not stored as F32, 0 if there is none.
        stored_tile_weights: the same of matrices that the kernels leave as stored, without and with the draft block.
        plane_tile_weights: weights of the largest matrix in planes that is ever decoded whole.
        block_cells: K/V cells that must lie in one page.
        trunk_attention, all_attention: blocks with K/V, without and with the draft block.
        trunk_ratios, all_ratios: (block size r, how many of these blocks have it), dense ones left out.
    """

    geometry: Geometry
    blobs: tuple[int, ...]
    dense_bytes: int
    embedding_bytes: int
    head_bytes: int
    drafter_bytes: int
    table_bytes: int
    table_row_bytes: int
    decoded_tile_weights: int
    stored_tile_weights: tuple[int, int]
    plane_tile_weights: int
    block_cells: int
    trunk_attention: tuple[int, ...]
    all_attention: tuple[int, ...]
    trunk_ratios: tuple[tuple[int, int], ...]
    all_ratios: tuple[tuple[int, int], ...]

    def blocks(self, with_draft: bool) -> int:
        """Return how many blocks the engine loads."""
        return self.geometry.num_layers + (self.geometry.num_mtp_layers if with_draft else 0)

    def attention_layers(self, with_draft: bool) -> tuple[int, ...]:
        """Return the loaded blocks that have K/V."""
        return self.all_attention if with_draft else self.trunk_attention

    def sparse_ratios(self, with_draft: bool) -> tuple[tuple[int, int], ...]:
        """Return (block size r, number of loaded attention blocks that have it)."""
        return self.all_ratios if with_draft else self.trunk_ratios


@lru_cache(maxsize=16)
def model_sizes(geometry: Geometry) -> ModelSizes:
    """Return the sizes of a model. Cached: a geometry is summed once however often it is planned."""
    g = geometry
    sums = dict.fromkeys(("dense", "token_embd", "output", "drafter", "PLE table"), 0)
    decoded, stored, planes = 0, {False: 0, True: 0}, 0
    for tensor in _loaded(g):
        key = {"MTP without experts": "drafter"}.get(tensor.component, tensor.component)
        num_bytes = tensor.num_bytes if tensor.name == PLE_TABLE else device_bytes(tensor)
        sums[key if key in sums else "dense"] += num_bytes
        if len(tensor.shape) == 2 and tensor.type_name != "F32" and tensor.name != PLE_TABLE:
            weights, drafts = prod(tensor.shape), key == "drafter"
            decoded = max(decoded, weights)
            looked_up = tensor.name == TOKEN_EMBD and OUTPUT in g.tensor_types
            if looked_up or dense_planes(tensor.type_name, *tensor.shape) is None:
                stored[drafts] = max(stored[drafts], 0 if looked_up else weights)
            elif weights <= MAX_DECODED_WEIGHTS:
                planes = max(planes, weights)
    table = g.tensor_types.get(PLE_TABLE)
    row_bytes = table.num_bytes // table.shape[0] if table is not None else 0
    return ModelSizes(
        geometry=g,
        blobs=tuple(_blob(g, layer) for layer in range(g.num_blocks)),
        dense_bytes=sums["dense"],
        embedding_bytes=sums["token_embd"],
        head_bytes=sums["output"],
        drafter_bytes=sums["drafter"],
        table_bytes=sums["PLE table"],
        table_row_bytes=row_bytes * (g.ple_ngram_size - 1) * g.ple_heads_per_ngram,
        decoded_tile_weights=decoded,
        stored_tile_weights=(stored[False], max(stored.values())),
        plane_tile_weights=planes,
        block_cells=cell_block([g.compress_ratio[i] for i in g.attention_layers]),
        trunk_attention=tuple(i for i in g.attention_layers if i < g.num_layers),
        all_attention=g.attention_layers,
        trunk_ratios=_count_ratios(g, g.num_layers),
        all_ratios=_count_ratios(g, g.num_blocks),
    )


def device_bytes(tensor: TensorSize) -> int:
    """Return the bytes a tensor takes once loaded: vectors and convolution kernels become float32."""
    is_array = len(tensor.shape) == 1 or tensor.name.endswith(_CONV_KERNELS)
    return tensor.num_parameters * F32_BYTES if is_array else tensor.num_bytes


def gdn_channels(g: Geometry) -> int:
    """Return the channels of a GDN layer's convolution: queries, keys and values."""
    return (2 * g.gdn_key_heads + g.gdn_value_heads) * g.gdn_head_dim


def gdn_state_bytes(g: Geometry) -> int:
    """Return the recurrent state of one GDN layer: its memory and the last inputs of its convolution, float32."""
    memory = g.gdn_value_heads * g.gdn_head_dim**2
    return (memory + (g.conv_kernel - 1) * gdn_channels(g)) * F32_BYTES


def ple_state_bytes(g: Geometry) -> int:
    """Return the history of the n-gram convolution, float32; 0 without a table."""
    if g.ple_layer is None:
        return 0
    return PLE_DILATION * (g.ple_conv_kernel - 1) * g.num_streams * g.embed_width * F32_BYTES


def index_key_bytes(g: Geometry, ratio: int, context_cells: int) -> int:
    """Return the index keys of a layer with blocks of `ratio` cells: one per block and a spare one, float32."""
    return (context_cells // ratio + 1) * g.index_dim * F32_BYTES


def index_tail_bytes(g: Geometry, ratio: int) -> int:
    """Return the raw index keys of the incomplete block of a layer with blocks of `ratio` cells, float32."""
    return (ratio - 1) * g.index_dim * F32_BYTES


def bank_bytes(sizes: ModelSizes, with_draft: bool) -> int:
    """Return the bytes of all experts in host memory."""
    return sum(sizes.blobs[: sizes.blocks(with_draft)]) * sizes.geometry.num_experts


def table_bytes(sizes: ModelSizes, with_draft: bool, num_slots: int, pages_per_layer: int) -> int:
    """Return the bytes of the engine's tables: slots of experts, first pages of slots, pages of attention layers."""
    blocks, layers = sizes.blocks(with_draft), len(sizes.attention_layers(with_draft))
    return WORD_BYTES * (blocks * sizes.geometry.num_experts + max(1, num_slots) + layers * pages_per_layer)


def _count_ratios(g: Geometry, num_blocks: int) -> tuple[tuple[int, int], ...]:
    ratios = [g.compress_ratio[i] for i in g.attention_layers if i < num_blocks and g.compress_ratio[i]]
    return tuple(sorted(Counter(ratios).items()))


def _loaded(g: Geometry) -> Iterator[TensorSize]:
    for tensor in g.tensor_types.values():
        if tensor.component in _EXPERT_COMPONENTS:
            continue
        block = split_block_name(tensor.name)
        if block is not None and block[1].startswith("indexer.") and not g.compress_ratio[block[0]]:
            continue
        yield tensor


def _blob(g: Geometry, layer: int) -> int:
    names = (f"blk.{layer}.{part}" for part in EXPERT_STACKS)
    return blob_bytes([g.tensor_types[n].num_bytes // g.num_experts for n in names if n in g.tensor_types])
