"""Geometries for the planner's tests, built from shapes and types alone: no file, no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from strata_jax.geometry import Geometry, TensorSize
from strata_jax.gguf.blocks import block_type, row_bytes
from strata_jax.gguf.layout import EXPERT_STACKS, component_of, model_shapes
from strata_jax.presets import model_geometry

REAL = replace(model_geometry("qwen38_flash"), name="real sizes")

SMALL = replace(
    REAL, name="small", num_layers=4, embed_width=64, vocab_size=512, context_length=4096, num_heads=4, head_dim=32,
    rope_dim=16, recurrent=(True, True, True, False, False), compress_ratio=(0, 0, 0, 4, 4), index_heads=8,
    index_dim=32, index_top_k=32, num_experts=16, num_experts_used=4, expert_width=(64,) * 5, shared_expert_width=64,
    gdn_key_heads=2, gdn_value_heads=4, gdn_head_dim=32, mixer_rank=32, ple_heads_per_ngram=1, ple_row_width=32,
    ple_vocab_sizes=(251, 257), ple_offsets=(0, 251),
)  # fmt: skip


def with_tensors(
    g: Geometry,
    type_of: Callable[[str], str] = lambda name: "F32",
    *,
    tied: bool = False,
    fused: frozenset[int] = frozenset(),
) -> Geometry:
    """Give a geometry its tensors, each of the type that `type_of` names; vectors are F32."""
    tensors: dict[str, TensorSize] = {}
    for name, shape in model_shapes(g, table_rows=sum(g.ple_vocab_sizes), fused=fused).items():
        if tied and name == "output.weight":
            continue
        bt = block_type("F32" if len(shape) == 1 else type_of(name))
        if shape[-1] % bt.block_len:
            bt = block_type("F32")
        rows = 1
        for size in shape[:-1]:
            rows *= size
        num_bytes = rows * row_bytes(bt, shape[-1])
        tensors[name] = TensorSize(name, shape, bt.name, num_bytes, component_of(name, g.num_layers))
    return replace(g, tensor_types=tensors)


def real_types(name: str) -> str:
    """Types as published files mix them: experts of three sizes over the layers, Q8_0 dense weights."""
    if name.endswith(EXPERT_STACKS):
        if "down" in name:
            return "IQ4_NL"
        return ("IQ3_S", "IQ3_XXS", "IQ2_S")[int(name.split(".")[1]) % 3]
    if name.startswith("per_layer"):
        return "IQ4_NL"
    if "indexer" in name:
        return "F16"
    return "F32" if "gate_inp" in name or "conv1d" in name else "Q8_0"


@lru_cache
def real() -> Geometry:
    """48 layers x 512 experts and a draft block, about 56 GB of experts."""
    return with_tensors(REAL, real_types)


@lru_cache
def small(expert_type: str = "Q8_0") -> Geometry:
    """4 layers x 16 experts and a draft block."""
    return with_tensors(SMALL, lambda name: expert_type if name.endswith(EXPERT_STACKS) else "Q8_0")
