"""The sizes of a synthetic model, as data: one dataclass, a table of presets, and the constants derived from the sizes.

The n-gram constants follow the published rule of the real checkpoint (primes from a base upwards, multipliers from
splitmix64), so that the same code path hashes synthetic and real files.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from strata_jax.errors import ConfigError

PLE_TABLE_ROW_ALIGN = 128  # the real table's rows are padded to a multiple of this
_U64_MASK = (1 << 64) - 1
_SPLITMIX_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Every size that a header or a tensor of a synthetic model depends on. The defaults are the preset `tiny`.

    `index_heads` is 8, not the real model's 4: a block that scores 0 for every head ties with others, and which of them
    is kept is undefined; with h heads that happens to a random block with chance 2**-h.
    """

    num_layers: int = 8
    num_mtp_layers: int = 1
    full_attention_interval: int = 4
    embed_width: int = 256
    vocab_size: int = 512
    context_length: int = 4096
    tied_output: bool = False  # leave out `output.weight`; readers then use the embedding
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_dim: int = 32
    rope_sections: tuple[int, ...] = (6, 5, 5, 0)
    rope_base: float = 1e7
    gdn_key_heads: int = 2
    gdn_value_heads: int = 6
    gdn_head_dim: int = 128
    conv_kernel: int = 4
    num_experts: int = 16
    num_experts_used: int = 4
    expert_width: int | tuple[int, ...] = 256  # or one per block, trunk then MTP; llama.cpp refuses differing ones
    shared_expert_width: int = 256
    num_streams: int = 4
    mixer_rank: int = 32
    index_heads: int = 8
    index_dim: int = 64
    index_top_k: int = 32
    compress_ratio: int = 4
    ple_layer: int | None = 1  # None: no n-gram table
    ple_ngram_size: int = 3
    ple_heads_per_ngram: int = 2
    ple_table_base: int = 1009  # the head vocabularies are the primes from here up
    ple_conv_kernel: int = 4
    ple_seed: int = 1234

    @property
    def num_blocks(self) -> int:
        """Trunk layers plus draft blocks."""
        return self.num_layers + self.num_mtp_layers

    @property
    def ple_num_heads(self) -> int:
        """Table rows gathered per token."""
        return (self.ple_ngram_size - 1) * self.ple_heads_per_ngram

    @property
    def ple_row_width(self) -> int:
        """Values per row of the n-gram table."""
        return self.embed_width // self.ple_num_heads

    def is_recurrent(self, layer: int) -> bool:
        """Whether a block is a GDN block; draft blocks are attention blocks."""
        return layer < self.num_layers and (layer + 1) % self.full_attention_interval != 0

    def expert_width_of(self, layer: int) -> int:
        """Width of the routed experts of one block."""
        return self.expert_width if isinstance(self.expert_width, int) else self.expert_width[layer]


_TINY = ModelShape()

PRESETS: Mapping[str, ModelShape] = {
    # 256-wide blocks fit every matrix except hc_*_up and the n-gram table: every K and IQ type can be used
    "tiny": _TINY,
    # expert width 192 and mixer rank 96, like the real 640 and 320: 256-wide blocks do not fit there, 64-wide ones do
    "ragged": replace(_TINY, expert_width=192, shared_expert_width=192, mixer_rank=96),
    # 1.6 M parameters; 32-wide block types only
    "nano": replace(
        _TINY,
        num_layers=4,
        embed_width=64,
        head_dim=32,
        rope_dim=16,
        rope_sections=(3, 3, 2, 0),
        gdn_value_heads=4,
        gdn_head_dim=32,
        expert_width=64,
        shared_expert_width=64,
        index_dim=32,
        ple_table_base=251,
        ple_heads_per_ngram=1,
    ),
    # 1.4 B parameters, for measurements of speed and memory; index heads as few as the real model's, so ties can happen
    "mid": ModelShape(
        num_layers=12,
        embed_width=1024,
        vocab_size=2048,
        context_length=32768,
        num_heads=8,
        head_dim=128,
        rope_dim=64,
        rope_sections=(11, 11, 10, 0),
        gdn_key_heads=8,
        gdn_value_heads=24,
        num_experts=64,
        num_experts_used=8,
        expert_width=512,
        shared_expert_width=512,
        mixer_rank=128,
        index_heads=4,
        index_dim=128,
        index_top_k=512,
        ple_heads_per_ngram=4,
        ple_table_base=20000,
    ),
    # the built-in model: `tiny` with a longer context
    "builtin": replace(_TINY, context_length=8192),
}


def shape_for(preset: str, overrides: Mapping[str, object] | None = None) -> ModelShape:
    """Look up a preset and replace some of its sizes; both raise `ConfigError` with the nearest known name."""
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; known: {', '.join(sorted(PRESETS))}{_nearest(preset, PRESETS)}")
    known = [f.name for f in fields(ModelShape)]
    for key in overrides or {}:
        if key not in known:
            raise ConfigError(
                f"unknown size {key!r} for preset {preset!r}; known: {', '.join(known)}{_nearest(key, known)}"
            )
    sizes: dict[str, Any] = dict(overrides or {})
    shape = replace(PRESETS[preset], **sizes)
    check_shape(shape)
    return shape


def ple_multipliers(shape: ModelShape) -> list[int]:
    """Give one odd 64-bit multiplier per n-gram position; each product with a valid token id stays below 2**63."""
    half_range = max(1, ((1 << 63) - 1) // max(shape.vocab_size, 1) // 2)
    mixed = (_splitmix64(shape.ple_seed + _SPLITMIX_STEP * (i + 1)) for i in range(shape.ple_ngram_size))
    return [2 * (z % half_range) + 1 for z in mixed]


def ple_head_vocab_sizes(shape: ModelShape) -> list[int]:
    """Give the number of table rows that each head hashes into: the primes from `ple_table_base` up."""
    sizes: list[int] = []
    candidate = max(2, shape.ple_table_base)
    while len(sizes) < shape.ple_num_heads:
        if all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            sizes.append(candidate)
        candidate += 1
    return sizes


def ple_head_offsets(shape: ModelShape) -> list[int]:
    """Give the first table row of each head: running sums of the head vocabularies, from 0."""
    sizes = ple_head_vocab_sizes(shape)
    return [sum(sizes[:i]) for i in range(len(sizes))]


def ple_table_rows(shape: ModelShape) -> int:
    """Count the rows of the n-gram table, padding included."""
    return -(-sum(ple_head_vocab_sizes(shape)) // PLE_TABLE_ROW_ALIGN) * PLE_TABLE_ROW_ALIGN


def _splitmix64(state: int) -> int:
    z = (state + _SPLITMIX_STEP) & _U64_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64_MASK
    return z ^ (z >> 31)


def check_shape(shape: ModelShape) -> None:
    """Raise one ConfigError that names every pair of sizes that cannot both be."""
    problems: list[str] = []
    widths = shape.expert_width
    if not isinstance(widths, int) and len(widths) != shape.num_blocks:
        problems.append(f"expert_width has {len(widths)} entries, one per block makes {shape.num_blocks}")
    if 2 * sum(shape.rope_sections) != shape.rope_dim:
        problems.append(f"rope_sections sum to {sum(shape.rope_sections)}, half of rope_dim is {shape.rope_dim // 2}")
    if shape.gdn_value_heads % shape.gdn_key_heads:
        problems.append(
            f"gdn_value_heads {shape.gdn_value_heads} is no multiple of gdn_key_heads {shape.gdn_key_heads}"
        )
    if shape.num_heads % shape.num_kv_heads:
        problems.append(f"num_heads {shape.num_heads} is no multiple of num_kv_heads {shape.num_kv_heads}")
    if shape.num_experts_used > shape.num_experts:
        problems.append(f"num_experts_used {shape.num_experts_used} exceeds num_experts {shape.num_experts}")
    if shape.num_mtp_layers not in (0, 1):
        problems.append(f"num_mtp_layers is {shape.num_mtp_layers}, only 0 and 1 exist")
    if shape.ple_layer is not None and not (shape.ple_layer < shape.num_layers and shape.is_recurrent(shape.ple_layer)):
        problems.append(f"ple_layer {shape.ple_layer} is not a GDN block of the trunk")
    if shape.ple_layer is not None and shape.embed_width % shape.ple_num_heads:
        problems.append(f"embed_width {shape.embed_width} is no multiple of the {shape.ple_num_heads} n-gram heads")
    if problems:
        raise ConfigError("the sizes of the synthetic model contradict each other: " + "; ".join(problems))


def _nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {close[0]!r}?" if close else ""
