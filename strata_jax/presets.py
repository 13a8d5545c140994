"""Geometries of whole models from their published widths and a quantisation, without a file.

They can be planned and simulated; `synthetic/full.py` gives those in `SYNTHETIC_MODELS` random weights. Widths and
counts: planning notes 1.1, qwen4exp notes 4 and 10. Types: ``data/quants`` through ``quants.py``. The draft block is
part of every preset, in the types in which the original holds it, although the published files come without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from strata_jax.errors import ConfigError, FormatError
from strata_jax.geometry import Geometry, TensorSize
from strata_jax.gguf.layout import (
    EXPERT_STACKS,
    OUTPUT,
    PLE_TABLE,
    TOKEN_EMBD,
    component_of,
    model_shapes,
    split_block_name,
)
from strata_jax.quants import HotRanks, LayerTypes, Quant, fitting_type, load_quant, nearest, priced_type
from strata_jax.synthetic.shapes import (
    ModelShape,
    check_shape,
    ple_head_offsets,
    ple_head_vocab_sizes,
    ple_multipliers,
    ple_table_rows,
)

DRAFT_EXPERTS = "Q2_0"
DRAFT_DENSE = "Q8_0"
DRAFT_PROJECTION = "BF16"
"""Types in which the original holds the draft block: 675 MiB of experts, about 111 MiB of the rest (notes 1.6)."""

_FLASH_SHAPE = ModelShape(
    num_layers=48,
    embed_width=2560,
    vocab_size=248_320,
    context_length=262_144,
    num_heads=24,
    head_dim=256,
    rope_dim=64,
    rope_sections=(11, 11, 10, 0),
    gdn_key_heads=16,
    gdn_value_heads=48,
    num_experts=512,
    num_experts_used=10,
    expert_width=640,
    shared_expert_width=640,
    mixer_rank=320,
    index_heads=4,
    index_dim=128,
    index_top_k=2048,
    ple_heads_per_ngram=8,
    ple_table_base=20_000_000,
)
_SHAPES: Mapping[str, ModelShape] = {
    "qwen38_flash": _FLASH_SHAPE,
    "qwen38_coder": replace(_FLASH_SHAPE, num_experts=256),
    # the real shape but for the rows of the n-gram table
    "synthetic_full": replace(_FLASH_SHAPE, ple_table_base=20_000),
    # a tenth of its widths and a vocabulary that a CPU can score, with the same remainders: 192 and 96 for 640 and 320
    "synthetic_small": ModelShape(
        vocab_size=2048, context_length=8192, num_experts=64, expert_width=192, shared_expert_width=192, mixer_rank=96
    ),
}
SYNTHETIC_MODELS: tuple[str, ...] = ("synthetic_full", "synthetic_small")
MODEL_NAMES: tuple[str, ...] = tuple(_SHAPES)
EOS_TOKEN_ID, PLE_BOUNDARY_ID = 248_046, 248_044
_SPECIALS_BEFORE_END = (12, 14)  # the same two tokens in the vocabularies of synthetic models


@dataclass(frozen=True, slots=True)
class PresetGeometry(Geometry):
    """A geometry without a file. `hot_ranks`: the profile's hottest ranks, where their blobs differ from the mean."""

    hot_ranks: tuple[HotRanks, ...] = ()


def model_shape(model: str, *, num_layers: int | None = None, num_experts: int | None = None) -> ModelShape:
    """Return the sizes of a model, of synthetic ones with another depth or number of experts.

    Raises ConfigError for an unknown name, for counts given to a published model, and for counts that cannot be.
    """
    if model not in _SHAPES:
        raise ConfigError(f"model={model!r} is no preset{nearest(model, _SHAPES)}; presets: {', '.join(MODEL_NAMES)}")
    shape = _SHAPES[model]
    given = {"num_layers": num_layers, "num_experts": num_experts}
    changes: dict[str, Any] = {key: count for key, count in given.items() if count is not None}
    if changes and model not in SYNTHETIC_MODELS:
        raise ConfigError(
            f"model={model} has {shape.num_layers} layers of {shape.num_experts} experts; only"
            f" {' and '.join(SYNTHETIC_MODELS)} can have other counts"
        )
    if num_layers is not None and num_layers < shape.full_attention_interval:
        raise ConfigError(
            f"model.layers={num_layers}: every {shape.full_attention_interval}th layer attends, so that there must be"
            f" at least {shape.full_attention_interval}"
        )
    shape = replace(shape, **changes)
    check_shape(shape)
    return shape


@lru_cache(maxsize=8)
def model_geometry(model: str, *, num_layers: int | None = None, num_experts: int | None = None) -> Geometry:
    """Return the widths and counts of a model, without tensors. Raises ConfigError as `model_shape` does."""
    return _widths(model, model_shape(model, num_layers=num_layers, num_experts=num_experts))


def _widths(name: str, s: ModelShape) -> Geometry:
    eos, boundary = EOS_TOKEN_ID, PLE_BOUNDARY_ID
    if name in SYNTHETIC_MODELS:
        eos, boundary = (s.vocab_size - distance for distance in _SPECIALS_BEFORE_END)
    recurrent = tuple(s.is_recurrent(i) for i in range(s.num_blocks))
    same = {f.name for f in fields(ModelShape)} & {f.name for f in fields(Geometry)}
    same -= {"compress_ratio", "expert_width"}
    return Geometry(
        name=name,
        rms_eps=1e-6,
        recurrent=recurrent,
        compress_ratio=tuple(0 if is_gdn else s.compress_ratio for is_gdn in recurrent),
        expert_width=tuple(s.expert_width_of(i) for i in range(s.num_blocks)),
        ple_row_width=s.ple_row_width,
        ple_boundary_id=boundary,
        ple_multipliers=tuple(ple_multipliers(s)),
        ple_vocab_sizes=tuple(ple_head_vocab_sizes(s)),
        ple_offsets=tuple(ple_head_offsets(s)),
        eos_token_id=eos,
        **{name: getattr(s, name) for name in same},
    )


@lru_cache(maxsize=64)
def preset_geometry(
    model: str,
    quant: str,
    *,
    head: str | None = None,
    dense: str | None = None,
    ple: str | None = None,
    num_layers: int | None = None,
    num_experts: int | None = None,
) -> PresetGeometry:
    """Return the geometry of `model` with the types of `quant`.

    Args:
        model: one of `MODEL_NAMES`.
        quant: a file of `data/quants` without its ending.
        head, dense, ple: types that replace the quantisation's; `dense` is for all matrices but indexers and routers.
        num_layers, num_experts: of a synthetic model. A layer has the types of the one at its relative depth.

    Raises:
        ConfigError: an unknown model, quantisation or type, with the nearest known name.
        FormatError: the quantisation's data file is broken or is for another number of layers.
    """
    types = load_quant(quant)
    for name in (head, dense, ple):
        if name is not None:
            priced_type(name)
    if dense is not None:
        types = replace(types, dense={**_kept(types.dense), "default": dense})
    types = replace(types, head=head or types.head, ple=ple or types.ple)
    return _with_types(model, model_shape(model, num_layers=num_layers, num_experts=num_experts), types)


def resized_geometry(model: str, shape: ModelShape, quant: str) -> PresetGeometry:
    """Return the geometry of a synthetic model with other sizes, as `preset_geometry` does with its own.

    Raises ConfigError for sizes that cannot be, for a published model and for an unknown quantisation.
    """
    if model not in SYNTHETIC_MODELS:
        raise ConfigError(f"model={model} has sizes of its own; only {' and '.join(SYNTHETIC_MODELS)} can have others")
    check_shape(shape)
    return _with_types(model, shape, load_quant(quant))


def _with_types(model: str, shape: ModelShape, types: Quant) -> PresetGeometry:
    base, synthetic = _widths(model, shape), model in SYNTHETIC_MODELS
    depth = types.num_layers if synthetic else base.num_layers
    layers = spread_layers(types.experts, depth)
    if synthetic:
        layers = tuple(layers[(2 * i + 1) * depth // (2 * base.num_layers)] for i in range(base.num_layers))
    tensors = _tensors(base, types, layers, table_rows=ple_table_rows(shape))
    return PresetGeometry(
        **{f.name: getattr(base, f.name) for f in fields(Geometry) if f.name not in ("name", "tensor_types")},
        name=f"{model} {types.title}",
        tensor_types=tensors,
        hot_ranks=() if synthetic else types.hot_ranks,  # a synthetic model's hottest experts are of every layer
    )


def interleave(counts: Sequence[int]) -> np.ndarray:
    """Return the indices of `counts`, each as often as it says, so that every prefix holds them in proportion."""
    groups = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n] or [np.empty(0)])
    return groups[np.argsort(places, kind="stable")]


def spread_layers(entries: Sequence[LayerTypes], num_layers: int) -> tuple[LayerTypes, ...]:
    """Return the types of each layer: named layers as named, the others spread evenly in proportion.

    Raises FormatError if the entries do not cover the layers exactly.
    """
    named = {layer: entry for entry in entries for layer in entry.layers}
    counted = [entry for entry in entries if not entry.layers]
    free = [layer for layer in range(num_layers) if layer not in named]
    total = sum(len(e.layers) for e in entries) + sum(e.count for e in counted)
    if total != num_layers or len(free) != sum(e.count for e in counted):
        raise FormatError(f"experts.layers covers {total} layers, the model has {num_layers}; each exactly once")
    named.update(zip(free, (counted[i] for i in interleave([e.count for e in counted]))))
    return tuple(named[layer] for layer in range(num_layers))


def _kept(dense: Mapping[str, str]) -> dict[str, str]:
    return {role: name for role, name in dense.items() if role in ("indexers", "routers", "PLE conv")}


def _tensors(g: Geometry, types: Quant, layers: Sequence[LayerTypes], table_rows: int) -> dict[str, TensorSize]:
    tensors: dict[str, TensorSize] = {}
    for name, shape in model_shapes(g, table_rows=table_rows).items():
        component = component_of(name, g.num_layers)
        wanted = "F32" if len(shape) == 1 else _type_of(name, component, types, layers, g.num_layers)
        fitted = fitting_type(wanted, shape[-1])
        num_bytes = prod(shape) // fitted.block_len * fitted.block_bytes
        if component == "routed experts" and "down" in name:
            num_bytes += types.blob_tail_bytes * g.num_experts
        tensors[name] = TensorSize(name, shape, fitted.name, num_bytes, component)
    return tensors


def _type_of(name: str, component: str, types: Quant, layers: Sequence[LayerTypes], num_layers: int) -> str:
    outside = {TOKEN_EMBD: types.embedding, OUTPUT: types.head, PLE_TABLE: types.ple}
    if name in outside:
        return outside[name]
    layer, part = split_block_name(name) or (0, name)
    if part == "ssm_conv1d.weight":
        return "F32"
    if component == "routed experts":
        return layers[layer].down if "down" in part else layers[layer].gate_up
    if layer >= num_layers:
        return _draft_type(part)
    role = {"final mixer": "mixers"}.get(component, component)
    if part == "ple_conv1d.weight":
        role = "PLE conv"
    return types.dense.get(role, types.dense["default"])


def _draft_type(part: str) -> str:
    if part in EXPERT_STACKS:
        return DRAFT_EXPERTS
    if part == "ffn_gate_inp.weight":
        return "F32"
    return DRAFT_PROJECTION if part.startswith(("nextn.eh_proj", "indexer.")) else DRAFT_DENSE
