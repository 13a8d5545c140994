"""Names and shapes of the tensors of a qwen4exp model, and the component that each is counted under.

Shapes are row-major. They follow from the geometry alone, so that files are checked against them and synthetic files
are written from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata_jax.geometry import Geometry

Shape = tuple[int, ...]

TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"
PLE_TABLE = "per_layer_token_embd.weight"
FUSED_EXPERTS = "ffn_gate_up_exps.weight"
EXPERT_STACKS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", FUSED_EXPERTS, "ffn_down_exps.weight")

COMPONENTS: tuple[str, ...] = (
    "token_embd",
    "output",
    "final mixer",
    "mixers",
    "GDN",
    "attention",
    "indexers",
    "routers",
    "shared experts",
    "routed experts",
    "PLE layer",
    "PLE table",
    "MTP without experts",
    "MTP experts",
)
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(.+)")


def split_block_name(name: str) -> tuple[int, str] | None:
    """Return (3, "attn_q.weight") for "blk.3.attn_q.weight", None for a name outside the blocks."""
    match = _BLOCK_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def component_of(name: str, num_layers: int) -> str:
    """Return the entry of COMPONENTS that tensor `name` of a model with `num_layers` trunk layers belongs to."""
    block = split_block_name(name)
    if block is None:
        return {TOKEN_EMBD: "token_embd", OUTPUT: "output", PLE_TABLE: "PLE table"}.get(name, "final mixer")
    layer, part = block
    if layer >= num_layers:
        return "MTP experts" if part in EXPERT_STACKS else "MTP without experts"
    if part in EXPERT_STACKS:
        return "routed experts"
    if part == "ffn_gate_inp.weight":
        return "routers"
    if part.startswith("ffn_"):
        return "shared experts"
    if part.startswith(("ssm_", "attn_qkv", "attn_gate")):
        return "GDN"
    by_prefix = {"hc": "mixers", "attn": "attention", "indexer": "indexers", "ple": "PLE layer"}
    return by_prefix[re.split(r"[._]", part, maxsplit=1)[0]]


def model_shapes(geometry: Geometry, *, table_rows: int, fused: frozenset[int] = frozenset()) -> dict[str, Shape]:
    """Return name -> shape of every tensor of the model, in file order; `fused` layers hold gate and up as one stack.

    A draft-only file (`geometry.has_trunk` False) holds the embedding, the head and the draft block.
    """
    return dict(_walk(geometry, table_rows, fused))


def _walk(g: Geometry, table_rows: int, fused: frozenset[int]) -> Iterator[tuple[str, Shape]]:
    wide = g.num_streams * g.embed_width
    yield TOKEN_EMBD, (g.vocab_size, g.embed_width)
    yield OUTPUT, (g.vocab_size, g.embed_width)
    if g.has_trunk:
        yield "output_hc_norm.weight", (wide,)
        yield "output_hc_down.weight", (g.mixer_rank, wide)
        yield "output_hc_up.weight", (wide, g.mixer_rank)
        if g.ple_layer is not None:
            yield PLE_TABLE, (table_rows, g.ple_row_width)
    for layer in range(0 if g.has_trunk else g.num_layers, g.num_blocks):
        for part, shape in _block(g, layer, layer in fused):
            yield f"blk.{layer}.{part}", shape


def _block(g: Geometry, layer: int, fused: bool) -> Iterator[tuple[str, Shape]]:
    width, wide = g.embed_width, g.num_streams * g.embed_width
    for mixer in ("hc_attn", "hc_ffn"):
        yield f"{mixer}_norm.weight", (wide,)
        yield f"{mixer}_down.weight", (g.mixer_rank, wide)
        yield f"{mixer}_up.weight", (wide, g.mixer_rank)
        yield f"{mixer}_inject.weight", (g.num_streams, wide)
    yield from _gdn(g) if g.is_recurrent(layer) else _attention(g)
    if layer == g.ple_layer:
        yield from _ple(g)
    experts, expert_width = g.num_experts, g.expert_width[layer]
    yield "ffn_gate_inp.weight", (experts, width)
    if fused:
        yield FUSED_EXPERTS, (experts, 2 * expert_width, width)
    else:
        yield "ffn_gate_exps.weight", (experts, expert_width, width)
        yield "ffn_up_exps.weight", (experts, expert_width, width)
    yield "ffn_down_exps.weight", (experts, width, expert_width)
    yield "ffn_gate_inp_shexp.weight", (width,)
    yield "ffn_gate_shexp.weight", (g.shared_expert_width, width)
    yield "ffn_up_shexp.weight", (g.shared_expert_width, width)
    yield "ffn_down_shexp.weight", (width, g.shared_expert_width)
    if layer >= g.num_layers:
        yield "nextn.eh_proj.weight", (width, 2 * width)
        yield "nextn.enorm.weight", (width,)
        yield "nextn.hnorm.weight", (wide,)
        yield "nextn.hc_head_norm.weight", (wide,)
        yield "nextn.hc_head_down.weight", (g.mixer_rank, wide)
        yield "nextn.hc_head_up.weight", (wide, g.mixer_rank)


def _gdn(g: Geometry) -> Iterator[tuple[str, Shape]]:
    value_width = g.gdn_value_heads * g.gdn_head_dim
    channels = 2 * g.gdn_key_heads * g.gdn_head_dim + value_width
    yield "attn_qkv.weight", (channels, g.embed_width)
    yield "attn_gate.weight", (value_width, g.embed_width)
    yield "ssm_conv1d.weight", (channels, g.conv_kernel)
    yield "ssm_beta.weight", (g.gdn_value_heads, g.embed_width)
    yield "ssm_alpha.weight", (g.gdn_value_heads, g.embed_width)
    yield "ssm_dt.bias", (g.gdn_value_heads,)
    yield "ssm_a", (g.gdn_value_heads,)
    yield "ssm_norm.weight", (g.gdn_head_dim,)
    yield "ssm_out.weight", (g.embed_width, value_width)


def _attention(g: Geometry) -> Iterator[tuple[str, Shape]]:
    query_width, kv_width = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    yield "attn_q.weight", (2 * query_width, g.embed_width)
    yield "attn_k.weight", (kv_width, g.embed_width)
    yield "attn_v.weight", (kv_width, g.embed_width)
    yield "attn_output.weight", (g.embed_width, query_width)
    yield "attn_q_norm.weight", (g.head_dim,)
    yield "attn_k_norm.weight", (g.head_dim,)
    yield "indexer.q_proj.weight", (g.index_heads * g.index_dim, g.embed_width)
    yield "indexer.k_proj.weight", (g.index_dim, g.embed_width)
    yield "indexer.q_norm.weight", (g.index_dim,)
    yield "indexer.k_norm.weight", (g.index_dim,)


def _ple(g: Geometry) -> Iterator[tuple[str, Shape]]:
    wide, row = g.num_streams * g.embed_width, len(g.ple_vocab_sizes) * g.ple_row_width
    yield "ple_key.weight", (wide, row)
    yield "ple_value.weight", (g.embed_width, row)
    yield "ple_norm_key.weight", (wide,)
    yield "ple_norm_query.weight", (wide,)
    yield "ple_norm_conv.weight", (wide,)
    yield "ple_conv1d.weight", (wide, g.ple_conv_kernel)
