"""Which tensors a synthetic model has, and their random values.

Scales are chosen so that activations stay near 1 through the depth of the small presets: logits come out with a
standard deviation of about 1.4, router and mixer gates are neither flat nor saturated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .shapes import ModelShape, ple_table_rows

Kind = Literal["matrix", "gate", "router", "head", "embedding", "vector", "gamma", "conv", "decay", "time_bias"]

ALWAYS_F32: frozenset[Kind] = frozenset(("gamma", "decay", "time_bias", "conv", "vector", "router"))
# standard deviation times sqrt(row length)
_ROW_SCALE: dict[Kind, float] = {"matrix": 1.0, "gate": 3.0, "router": 2.0, "head": 3.0}
# standard deviation
_SCALE: dict[Kind, float] = {"conv": 0.5, "embedding": 0.7, "gamma": 0.1}
_DECAY_RANGE = (0.05, 8.0)  # -ssm_a, log-uniform: half-lives from one token to hundreds
_TIME_BIAS_RANGE = (-3.0, 1.0)

SUBLAYER_OUTPUTS = (
    "attn_output.weight",
    "ssm_out.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
    "ple_value.weight",
)
_DRAFT_MIXER = ".nextn.hc_head_"
_OUTPUT_MIXER_KIND: dict[str, Kind] = {"norm": "gamma", "down": "matrix", "up": "gate"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name, its row-major shape, and how its values are drawn."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


def tensor_specs(shape: ModelShape, *, mtp_only: bool = False, fused_experts: bool = False) -> Iterator[TensorSpec]:
    """Yield every tensor of a model in file order; `mtp_only` keeps embedding, head and draft block."""
    width, wide = shape.embed_width, shape.num_streams * shape.embed_width
    yield TensorSpec("token_embd.weight", (shape.vocab_size, width), "embedding")
    if not shape.tied_output:
        yield TensorSpec("output.weight", (shape.vocab_size, width), "head")
    if not mtp_only:
        yield TensorSpec("output_hc_norm.weight", (wide,), "gamma")
        yield TensorSpec("output_hc_down.weight", (shape.mixer_rank, wide), "matrix")
        yield TensorSpec("output_hc_up.weight", (wide, shape.mixer_rank), "gate")
        if shape.ple_layer is not None:
            yield TensorSpec("per_layer_token_embd.weight", (ple_table_rows(shape), shape.ple_row_width), "embedding")
        for layer in range(shape.num_layers):
            yield from _block(shape, layer, fused_experts)
    for layer in range(shape.num_layers, shape.num_blocks):
        yield from _block(shape, layer, fused_experts)
        prefix = f"blk.{layer}.nextn."
        yield TensorSpec(prefix + "eh_proj.weight", (width, 2 * width), "matrix")
        yield TensorSpec(prefix + "enorm.weight", (width,), "gamma")
        yield TensorSpec(prefix + "hnorm.weight", (wide,), "gamma")
        yield TensorSpec(prefix + "hc_head_norm.weight", (wide,), "gamma")
        yield TensorSpec(prefix + "hc_head_down.weight", (shape.mixer_rank, wide), "matrix")
        yield TensorSpec(prefix + "hc_head_up.weight", (wide, shape.mixer_rank), "gate")


def tensor_values(spec: TensorSpec, shape: ModelShape, seed: int, echo_mtp: float | None = None) -> np.ndarray:
    """Draw the values of one tensor, f32 of `spec.shape`, from the stream of its seed and name.

    `echo_mtp` makes drafts that are often right: the trunk's sublayers are scaled by it (0: the trunk passes the
    embedding through), and the draft block passes the embedding through and shares the output mixer.
    """
    if echo_mtp is None:
        return _draw(spec.name, spec.shape, spec.kind, seed)
    if _DRAFT_MIXER in spec.name:
        part = spec.name.split(_DRAFT_MIXER)[1]
        return _draw(f"output_hc_{part}", spec.shape, _OUTPUT_MIXER_KIND[part.split(".")[0]], seed)
    if spec.name.endswith("nextn.eh_proj.weight"):
        return np.eye(*spec.shape, dtype=np.float32)
    if spec.name.endswith("nextn.enorm.weight"):
        return np.ones(spec.shape, np.float32)
    values = _draw(spec.name, spec.shape, spec.kind, seed)
    return values * np.float32(echo_mtp) if spec.name.endswith(SUBLAYER_OUTPUTS) else values


def _draw(name: str, shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, *name.encode()])
    if kind == "decay":
        low, high = _DECAY_RANGE
        return -np.exp(rng.uniform(np.log(low), np.log(high), shape)).astype(np.float32)
    if kind == "time_bias":
        return rng.uniform(*_TIME_BIAS_RANGE, shape).astype(np.float32)
    noise = rng.standard_normal(shape, dtype=np.float32) * np.float32(value_scale(kind, shape[-1]))
    return 1 + noise if kind == "gamma" else noise


def value_scale(kind: Kind, row_length: int) -> float:
    """Return the standard deviation of a tensor's values (of gammas: around 1)."""
    if kind == "vector":
        return 1.0 / row_length**0.5
    return _ROW_SCALE[kind] / row_length**0.5 if kind in _ROW_SCALE else _SCALE[kind]


def _block(shape: ModelShape, layer: int, fused_experts: bool) -> Iterator[TensorSpec]:
    prefix = f"blk.{layer}."
    wide = shape.num_streams * shape.embed_width
    for sublayer in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}hc_{sublayer}_norm.weight", (wide,), "gamma")
        yield TensorSpec(f"{prefix}hc_{sublayer}_down.weight", (shape.mixer_rank, wide), "matrix")
        yield TensorSpec(f"{prefix}hc_{sublayer}_up.weight", (wide, shape.mixer_rank), "gate")
        yield TensorSpec(f"{prefix}hc_{sublayer}_inject.weight", (shape.num_streams, wide), "gate")
    yield from _gdn(shape, prefix) if shape.is_recurrent(layer) else _attention(shape, prefix)
    if layer == shape.ple_layer:
        yield from _ple(shape, prefix)
    yield from _moe(shape, prefix, shape.expert_width_of(layer), fused_experts)


def _gdn(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    width = shape.embed_width
    value_width = shape.gdn_value_heads * shape.gdn_head_dim
    channels = 2 * shape.gdn_key_heads * shape.gdn_head_dim + value_width
    yield TensorSpec(prefix + "attn_qkv.weight", (channels, width), "matrix")
    yield TensorSpec(prefix + "attn_gate.weight", (value_width, width), "matrix")
    yield TensorSpec(prefix + "ssm_conv1d.weight", (channels, shape.conv_kernel), "conv")
    yield TensorSpec(prefix + "ssm_dt.bias", (shape.gdn_value_heads,), "time_bias")
    yield TensorSpec(prefix + "ssm_a", (shape.gdn_value_heads,), "decay")
    yield TensorSpec(prefix + "ssm_beta.weight", (shape.gdn_value_heads, width), "matrix")
    yield TensorSpec(prefix + "ssm_alpha.weight", (shape.gdn_value_heads, width), "matrix")
    yield TensorSpec(prefix + "ssm_norm.weight", (shape.gdn_head_dim,), "gamma")
    yield TensorSpec(prefix + "ssm_out.weight", (width, value_width), "matrix")


def _attention(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    width, head_dim = shape.embed_width, shape.head_dim
    yield TensorSpec(prefix + "attn_q.weight", (2 * shape.num_heads * head_dim, width), "matrix")
    yield TensorSpec(prefix + "attn_k.weight", (shape.num_kv_heads * head_dim, width), "matrix")
    yield TensorSpec(prefix + "attn_v.weight", (shape.num_kv_heads * head_dim, width), "matrix")
    yield TensorSpec(prefix + "attn_output.weight", (width, shape.num_heads * head_dim), "matrix")
    yield TensorSpec(prefix + "attn_q_norm.weight", (head_dim,), "gamma")
    yield TensorSpec(prefix + "attn_k_norm.weight", (head_dim,), "gamma")
    yield TensorSpec(prefix + "indexer.q_proj.weight", (shape.index_heads * shape.index_dim, width), "matrix")
    yield TensorSpec(prefix + "indexer.k_proj.weight", (shape.index_dim, width), "matrix")
    yield TensorSpec(prefix + "indexer.q_norm.weight", (shape.index_dim,), "gamma")
    yield TensorSpec(prefix + "indexer.k_norm.weight", (shape.index_dim,), "gamma")


def _ple(shape: ModelShape, prefix: str) -> Iterator[TensorSpec]:
    width, wide = shape.embed_width, shape.num_streams * shape.embed_width
    yield TensorSpec(prefix + "ple_key.weight", (wide, width), "matrix")
    yield TensorSpec(prefix + "ple_value.weight", (width, width), "matrix")
    for part in ("key", "query", "conv"):
        yield TensorSpec(f"{prefix}ple_norm_{part}.weight", (wide,), "gamma")
    yield TensorSpec(prefix + "ple_conv1d.weight", (wide, shape.ple_conv_kernel), "conv")


def _moe(shape: ModelShape, prefix: str, expert_width: int, fused_experts: bool) -> Iterator[TensorSpec]:
    width, num_experts, shared = shape.embed_width, shape.num_experts, shape.shared_expert_width
    yield TensorSpec(prefix + "ffn_gate_inp.weight", (num_experts, width), "router")
    if fused_experts:
        yield TensorSpec(prefix + "ffn_gate_up_exps.weight", (num_experts, 2 * expert_width, width), "matrix")
    else:
        yield TensorSpec(prefix + "ffn_gate_exps.weight", (num_experts, expert_width, width), "matrix")
        yield TensorSpec(prefix + "ffn_up_exps.weight", (num_experts, expert_width, width), "matrix")
    yield TensorSpec(prefix + "ffn_down_exps.weight", (num_experts, width, expert_width), "matrix")
    yield TensorSpec(prefix + "ffn_gate_inp_shexp.weight", (width,), "vector")
    yield TensorSpec(prefix + "ffn_gate_shexp.weight", (shared, width), "matrix")
    yield TensorSpec(prefix + "ffn_up_shexp.weight", (shared, width), "matrix")
    yield TensorSpec(prefix + "ffn_down_shexp.weight", (width, shared), "matrix")
