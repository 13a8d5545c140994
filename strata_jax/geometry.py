"""The geometry of a qwen4exp model from a GGUF header alone, checked, and the sizes that follow from it.

Not here: bytes of K/V cells and recurrent state (``kernels/kv_codec``, ``memory``). Names and shapes of tensors are in
``gguf/layout.py``. No tensor data is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from strata_jax.errors import ConfigError, FormatError
from strata_jax.gguf.blocks import BLOCK_TYPES, ENGINE_TYPES
from strata_jax.gguf.keys import Keys
from strata_jax.gguf.layout import (
    COMPONENTS,
    EXPERT_STACKS,
    FUSED_EXPERTS,
    OUTPUT,
    PLE_TABLE,
    TOKEN_EMBD,
    component_of,
    model_shapes,
    split_block_name,
)
from strata_jax.gguf.reader import GGUFFile

ARCHITECTURE = "qwen4exp"
MAX_BLOCKS = 1024  # the real model has 49; a bound keeps a hostile header cheap
_MAX_U63 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One tensor as the file stores it. `component` is one of ``gguf.layout.COMPONENTS``."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    num_bytes: int
    component: str

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One line of the size table: all tensors of one component."""

    component: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Widths, counts and tensor sizes of one model. Tuples per block hold the trunk's layers, then the draft block."""

    name: str
    num_layers: int
    num_mtp_layers: int
    embed_width: int
    vocab_size: int
    context_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    rms_eps: float
    recurrent: tuple[bool, ...]
    compress_ratio: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_top_k: int
    num_experts: int
    num_experts_used: int
    expert_width: tuple[int, ...]
    shared_expert_width: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    conv_kernel: int
    num_streams: int
    mixer_rank: int
    ple_layer: int | None = None
    ple_ngram_size: int = 0
    ple_heads_per_ngram: int = 0
    ple_conv_kernel: int = 0
    ple_row_width: int = 0
    ple_boundary_id: int = 0
    ple_multipliers: tuple[int, ...] = ()
    ple_vocab_sizes: tuple[int, ...] = ()
    ple_offsets: tuple[int, ...] = ()
    eos_token_id: int | None = None
    has_trunk: bool = True
    """False for a draft-only file: embedding, head and the draft block, without the layers before it."""
    tensor_types: Mapping[str, TensorSize] = field(default_factory=dict, hash=False, repr=False)
    """Every tensor of the file by name, in file order; to be read only."""
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Geometry:
        """Read and check the geometry of an open file. Raises FormatError naming the key or tensor that is wrong."""
        keys = Keys(file.metadata, str(file.paths[0]))
        geometry = _from_keys(keys, file)
        return replace(geometry, tensor_types=_check_tensors(geometry, file))

    @property
    def num_blocks(self) -> int:
        return self.num_layers + self.num_mtp_layers

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent[layer]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Blocks with K/V, the draft block included; the others keep recurrent state of a fixed size."""
        first = 0 if self.has_trunk else self.num_layers
        return tuple(i for i in range(first, self.num_blocks) if not self.recurrent[i])

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers if self.has_trunk else 0) if self.recurrent[i])

    @property
    def tied_output(self) -> bool:
        """Whether the head uses the embedding's rows, having no tensor of its own."""
        return OUTPUT not in self.tensor_types and TOKEN_EMBD in self.tensor_types

    def fused_experts(self, layer: int) -> bool:
        """Whether the layer stores gate and up of its experts in one stack."""
        return f"blk.{layer}.{FUSED_EXPERTS}" in self.tensor_types

    def expert_bytes(self, layer: int) -> int:
        """Return the packed bytes of one routed expert of `layer`: gate, up and down together."""
        names = [f"blk.{layer}.{part}" for part in EXPERT_STACKS]
        return sum(self.tensor_types[n].num_bytes for n in names if n in self.tensor_types) // self.num_experts

    def component_bytes(self) -> dict[str, int]:
        """Return the packed bytes of each component, in the order of the size table."""
        total = dict.fromkeys(COMPONENTS, 0)
        for tensor in self.tensor_types.values():
            total[tensor.component] += tensor.num_bytes
        return total

    @property
    def dense_bytes(self) -> int:
        """Packed bytes of the trunk without routed experts and n-gram table: what every token needs at hand."""
        apart = ("routed experts", "PLE table", "MTP without experts", "MTP experts")
        return sum(t.num_bytes for t in self.tensor_types.values() if t.component not in apart)

    @property
    def total_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensor_types.values())

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise ConfigError if there are no tokens or if one is outside the vocabulary."""
        if not len(token_ids):
            raise ConfigError("the prompt has no tokens: give at least one")
        wrong = next(((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"token {wrong[1]} at place {wrong[0]} is outside the vocabulary (0 .. {self.vocab_size - 1})"
            )

    def check_engine_types(self) -> None:
        """Raise FormatError if a tensor has a type that the engine cannot decode; such a file can only be planned."""
        for tensor in self.tensor_types.values():
            if tensor.type_name not in ENGINE_TYPES:
                raise FormatError(
                    f"tensor {tensor.name!r} is stored as {tensor.type_name}, which the engine does not decode; "
                    f"it decodes {', '.join(sorted(ENGINE_TYPES))}. Requantise the model with one of these"
                )
            is_vector = len(tensor.shape) == 1 or tensor.name.endswith("conv1d.weight")
            if is_vector and tensor.type_name not in ("F32", "F16", "BF16"):
                raise FormatError(
                    f"tensor {tensor.name!r} is stored as {tensor.type_name}; vectors and convolutions must be F32, "
                    "F16 or BF16. Requantise the model without touching them"
                )


def attention_layer_indices(num_layers: int, full_attention_interval: int) -> tuple[int, ...]:
    """Return the layers with K/V when only every `full_attention_interval`-th attends: (i + 1) mod interval = 0."""
    return tuple(range(full_attention_interval - 1, num_layers, full_attention_interval))


def size_table(geometry: Geometry) -> tuple[SizeRow, ...]:
    """Return one row per component that the file has; their bytes sum to the file's tensor bytes exactly."""
    members: dict[str, list[TensorSize]] = {component: [] for component in COMPONENTS}
    for tensor in geometry.tensor_types.values():
        members[tensor.component].append(tensor)
    return tuple(
        SizeRow(
            component,
            len(tensors),
            sum(t.num_parameters for t in tensors),
            sum(t.num_bytes for t in tensors),
            tuple(sorted({t.type_name for t in tensors})),
        )
        for component, tensors in members.items()
        if tensors
    )


def _from_keys(keys: Keys, file: GGUFFile) -> Geometry:
    found = keys.text("general.architecture")
    if found != ARCHITECTURE:
        raise FormatError(
            f"{keys.source}: general.architecture is {found[:80]!r}; this engine runs {ARCHITECTURE!r} models only"
        )

    def integer(name: str, low: int = 1, high: int = 2**31 - 1) -> int:
        return keys.integer(f"{ARCHITECTURE}.{name}", low, high)

    num_blocks = integer("block_count", 1, MAX_BLOCKS)
    has_mtp_key = keys.has(f"{ARCHITECTURE}.nextn_predict_layers")
    num_mtp = integer("nextn_predict_layers", 0, min(1, num_blocks - 1)) if has_mtp_key else 0
    num_layers = num_blocks - num_mtp
    recurrent = _recurrent(keys, num_layers, num_mtp)
    has_trunk = not num_mtp or any(
        (split_block_name(name) or (num_layers, ""))[0] < num_layers for name in file.tensors
    )
    geometry = Geometry(
        name=keys.text("general.name")[:200] if keys.has("general.name") else file.paths[0].stem,
        num_layers=num_layers,
        num_mtp_layers=num_mtp,
        embed_width=integer("embedding_length"),
        vocab_size=_vocab_size(keys, file),
        context_length=integer("context_length"),
        num_heads=integer("attention.head_count"),
        num_kv_heads=integer("attention.head_count_kv"),
        head_dim=integer("attention.key_length"),
        rope_dim=integer("rope.dimension_count", 2),
        rope_base=keys.positive_float(f"{ARCHITECTURE}.rope.freq_base"),
        rms_eps=keys.positive_float(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"),
        recurrent=recurrent,
        compress_ratio=keys.integers(f"{ARCHITECTURE}.attention.compress_ratios", num_blocks, 0, 2**31 - 1),
        index_heads=integer("attention.indexer.head_count"),
        index_dim=integer("attention.indexer.key_length"),
        index_top_k=integer("attention.indexer.top_k"),
        num_experts=integer("expert_count"),
        num_experts_used=integer("expert_used_count"),
        expert_width=_expert_width(keys, num_blocks),
        shared_expert_width=integer("expert_shared_feed_forward_length"),
        gdn_key_heads=integer("ssm.group_count"),
        gdn_value_heads=integer("ssm.time_step_rank"),
        gdn_head_dim=integer("ssm.state_size"),
        conv_kernel=integer("ssm.conv_kernel"),
        num_streams=integer("hyper_connection.count"),
        mixer_rank=integer("hyper_connection.low_rank"),
        eos_token_id=_eos_token_id(keys),
        has_trunk=has_trunk,
    )
    _check_consistency(keys, geometry)
    geometry = replace(geometry, warnings=_warnings(keys, geometry))
    return _with_ple(keys, geometry) if has_trunk and keys.has(f"{ARCHITECTURE}.ple.layers") else geometry


def _recurrent(keys: Keys, num_layers: int, num_mtp: int) -> tuple[bool, ...]:
    """Return which blocks are GDN. The stored array wins; older files only have the interval."""
    key = f"{ARCHITECTURE}.attention.recurrent_layers"
    if keys.has(key):
        recurrent = tuple(bool(v) for v in keys.integers(key, num_layers + num_mtp, 0, 1))
        if any(recurrent[num_layers:]):
            keys.fail(key, f"0 for the draft block {num_layers}, which is an attention block")
        return recurrent
    interval = keys.integer(f"{ARCHITECTURE}.full_attention_interval")
    attention = attention_layer_indices(num_layers, interval)
    return tuple(i not in attention for i in range(num_layers)) + (False,) * num_mtp


def _expert_width(keys: Keys, num_blocks: int) -> tuple[int, ...]:
    key = f"{ARCHITECTURE}.expert_feed_forward_length"
    if keys.is_array(key):
        return keys.integers(key, num_blocks, 1, 2**31 - 1)
    return (keys.integer(key),) * num_blocks


def _vocab_size(keys: Keys, file: GGUFFile) -> int:
    """Return the rows of embedding or head. A draft-only file may have neither: then the tokens of its vocabulary."""
    for name in (TOKEN_EMBD, OUTPUT):
        if name in file.tensors:
            return file.tensors[name].shape[0]
    tokens = "tokenizer.ggml.tokens"
    count = file.metadata.count_of(tokens) if keys.has(tokens) else None
    if not count:
        keys.fail(tokens, f"a list of tokens, since the file has no {TOKEN_EMBD} to count rows of")
    return count


def _eos_token_id(keys: Keys) -> int | None:
    key = "tokenizer.ggml.eos_token_id"
    return keys.integer(key, 0) if keys.has(key) else None


def _check_consistency(keys: Keys, g: Geometry) -> None:
    def check(fact: bool, name: str, expected: str) -> None:
        if not fact:
            keys.fail(f"{ARCHITECTURE}.{name}", expected)

    value_length = keys.integer(f"{ARCHITECTURE}.attention.value_length")
    check(value_length == g.head_dim, "attention.value_length", f"{g.head_dim}, the same as attention.key_length")
    check(g.num_heads % g.num_kv_heads == 0, "attention.head_count_kv", f"a divisor of head_count {g.num_heads}")
    check(g.rope_dim % 2 == 0, "rope.dimension_count", "an even number")
    limit = min(g.head_dim, g.index_dim)
    check(g.rope_dim <= limit, "rope.dimension_count", f"at most {limit}, the narrower of head and indexer head")
    check(g.num_experts_used <= g.num_experts, "expert_used_count", f"at most expert_count {g.num_experts}")
    check(g.gdn_value_heads % g.gdn_key_heads == 0, "ssm.group_count", f"a divisor of {g.gdn_value_heads} value heads")
    inner = keys.integer(f"{ARCHITECTURE}.ssm.inner_size")
    expected = g.gdn_value_heads * g.gdn_head_dim
    check(inner == expected, "ssm.inner_size", f"{expected} = {g.gdn_value_heads} value heads x {g.gdn_head_dim}")
    check(g.rms_eps < 1, "attention.layer_norm_rms_epsilon", "a number below 1")
    check(g.rope_base > 1, "rope.freq_base", "a number above 1")
    sections = "rope.dimension_sections"
    if keys.has(f"{ARCHITECTURE}.{sections}"):
        found = keys.integers(f"{ARCHITECTURE}.{sections}", 4, 0, 2**31 - 1)
        check(sum(found) == g.rope_dim // 2, sections, f"a sum of {g.rope_dim // 2}, half of rope.dimension_count")
    for layer, ratio in enumerate(g.compress_ratio):
        fits = ratio == 0 or (not g.recurrent[layer] and g.index_top_k % ratio == 0)
        rule = f"0 for layer {layer}, a GDN layer" if g.recurrent[layer] else f"divisors of top_k {g.index_top_k} or 0"
        check(fits, "attention.compress_ratios", rule)
    if g.eos_token_id is not None and g.eos_token_id >= g.vocab_size:
        keys.fail("tokenizer.ggml.eos_token_id", f"an id below the vocabulary's {g.vocab_size}")


def _warnings(keys: Keys, g: Geometry) -> tuple[str, ...]:
    warnings: list[str] = []
    trunk = [i for i in g.attention_layers if i < g.num_layers]
    if trunk and not any(g.compress_ratio[i] for i in trunk):
        warnings.append(
            f"{ARCHITECTURE}.attention.compress_ratios is 0 for all {len(trunk)} attention layers of the trunk: they "
            "attend to every cell. Some converter versions write zeros by mistake; if the model was trained with"
            " sparse "
            f"attention, convert it again"
        )
    scaling = f"{ARCHITECTURE}.rope.scaling.type"
    if keys.has(scaling) and keys.text(scaling) != "none":
        warnings.append(f"{scaling} is {keys.text(scaling)[:80]!r}; rotary scaling is not applied")
    return tuple(warnings)


def _with_ple(keys: Keys, g: Geometry) -> Geometry:
    prefix = f"{ARCHITECTURE}.ple."
    (layer,) = keys.integers(prefix + "layers", 1, 0, g.num_layers - 1)
    if not g.recurrent[layer]:
        keys.fail(prefix + "layers", f"a GDN layer; layer {layer} is an attention layer")
    ngram = keys.integer(prefix + "ngram_size", 2, 64)
    per_ngram = keys.integer(prefix + "heads_per_ngram", 1, 4096)
    num_heads = (ngram - 1) * per_ngram
    sizes = keys.integers(prefix + "head_vocab_sizes", num_heads, 1, _MAX_U63)
    offsets = keys.integers(prefix + "head_offsets", num_heads, 0, _MAX_U63)
    expected = (0, *accumulate(sizes[:-1]))
    if offsets != expected:
        keys.fail(prefix + "head_offsets", f"the running sums of head_vocab_sizes {list(expected[:20])}")
    return replace(
        g,
        ple_layer=layer,
        ple_ngram_size=ngram,
        ple_heads_per_ngram=per_ngram,
        ple_conv_kernel=keys.integer(prefix + "conv_kernel"),
        ple_row_width=keys.integer(f"{ARCHITECTURE}.embedding_length_per_layer_input"),
        ple_boundary_id=keys.integer(prefix + "eos_token_id", 0, g.vocab_size - 1),
        ple_multipliers=keys.integers(prefix + "layer_multipliers", ngram, 1, _MAX_U63),
        ple_vocab_sizes=sizes,
        ple_offsets=offsets,
    )


def _check_tensors(g: Geometry, file: GGUFFile) -> dict[str, TensorSize]:
    """Check every tensor's presence, shape and type against the geometry; return their sizes in file order."""
    source = file.paths[0]
    fused = frozenset(i for i in range(g.num_blocks) if f"blk.{i}.{FUSED_EXPERTS}" in file.tensors)
    expected = model_shapes(g, table_rows=sum(g.ple_vocab_sizes), fused=fused)
    optional = {OUTPUT} if g.has_trunk or TOKEN_EMBD in file.tensors else {OUTPUT, TOKEN_EMBD}
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            if name in optional:
                continue
            raise FormatError(f"{source}: tensor {name!r} is missing; expected one of shape {shape}")
        where = f"in {file.paths[info.shard_idx]} at byte {info.offset_bytes}"
        rows_fit = name == PLE_TABLE and info.shape[1:] == shape[1:] and info.shape[0] >= shape[0]
        if info.shape != shape and not rows_fit:
            at_least = "at least " if name == PLE_TABLE else ""
            raise FormatError(f"{source}: tensor {name!r} has shape {info.shape} ({where}); expected {at_least}{shape}")
    sizes: dict[str, TensorSize] = {}
    for name, info in file.tensors.items():
        if info.ggml_id not in BLOCK_TYPES:
            raise FormatError(f"{source}: {_unknown_type(name, info.ggml_id)}")
        if name not in expected:
            raise FormatError(
                f"{source}: tensor {name!r} of shape {info.shape} is no part of a {ARCHITECTURE} model with "
                f"{g.num_layers} layers and {g.num_mtp_layers} draft blocks; leaving it out would change results"
            )
        sizes[name] = TensorSize(name, info.shape, info.type_name, info.num_bytes, component_of(name, g.num_layers))
    return sizes


def _unknown_type(name: str, ggml_id: int) -> str:
    return (
        f"tensor {name!r} has type unknown({ggml_id}), whose size is not known, so the model can be neither"
        " planned nor "
        f"run; convert or quantise it to a known type"
    )
