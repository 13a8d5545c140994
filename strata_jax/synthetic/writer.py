"""Write a synthetic `qwen4exp` GGUF: the header from the shape, then one tensor at a time.

Memory stays at the size of the largest tensor, also for the preset `mid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFValueType

from strata_jax.errors import ConfigError
from strata_jax.files import replaced_on_success

from . import shapes, tokenizer
from .shapes import ModelShape, shape_for
from .tensors import ALWAYS_F32, TensorSpec, tensor_specs, tensor_values

ARCHITECTURE = "qwen4exp"
RMS_EPS = 1e-6
DType = Literal["f32", "f16", "bf16"]
_GGML_TYPE: dict[str, GGMLType] = {"f32": GGMLType.F32, "f16": GGMLType.F16, "bf16": GGMLType.BF16}
_FILE_TYPE: dict[str, gguf.LlamaFileType] = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
}


def write_synthetic_gguf(
    path: str | Path,
    *,
    preset: str = "tiny",
    seed: int = 0,
    dtype: DType = "f32",
    mtp: bool = True,
    mtp_only: bool = False,
    fused_experts: bool = False,
    echo_mtp: float | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Path:
    """Write a random-weight model and return its path; readers see the whole file or none of it.

    Args:
        path: where to write; an existing file is replaced in one step.
        preset: a key of `PRESETS`.
        seed: chooses the weights; sizes and tokenizer do not depend on it.
        dtype: type of the matrices; norms, convolutions, routers and other small tensors stay F32.
        mtp: keep the preset's draft block.
        mtp_only: write only embedding, head and draft block, as separate draft files do.
        fused_experts: one `ffn_gate_up_exps` tensor per block in place of gate and up.
        echo_mtp: None for plain random weights; else the depth of a trunk whose drafts are often right
            (0.1: some are accepted, 0: all).
        overrides: `ModelShape` fields to replace, e.g. `{"num_experts": 32}`.
    Raises:
        ConfigError: an unknown preset, field or dtype, or sizes that contradict each other.
    """
    if dtype not in _GGML_TYPE:
        raise ConfigError(f"unknown dtype {dtype!r} for a synthetic model; known: {', '.join(_GGML_TYPE)}")
    shape = shape_for(preset, {**(overrides or {}), **({} if mtp else {"num_mtp_layers": 0})})
    if mtp_only and not shape.num_mtp_layers:
        raise ConfigError("mtp_only asks for a draft block, but this model has none (mtp=False or num_mtp_layers=0)")
    specs = list(tensor_specs(shape, mtp_only=mtp_only, fused_experts=fused_experts))
    with replaced_on_success(Path(path)) as unfinished:
        writer = gguf.GGUFWriter(unfinished, ARCHITECTURE)
        try:
            _add_metadata(writer, shape, seed, dtype, with_ple=not mtp_only and shape.ple_layer is not None)
            for spec in specs:
                ggml_type = _stored_type(spec, dtype)
                writer.add_tensor_info(
                    spec.name, spec.shape, np.dtype(np.float32), _num_bytes(spec, ggml_type), ggml_type
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for spec in specs:
                values = tensor_values(spec, shape, seed, echo_mtp)
                writer.write_tensor_data(gguf.quants.quantize(values, _stored_type(spec, dtype)))
        finally:
            writer.close()
    return Path(path)


def _stored_type(spec: TensorSpec, dtype: DType) -> GGMLType:
    return GGMLType.F32 if spec.kind in ALWAYS_F32 else _GGML_TYPE[dtype]


def _num_bytes(spec: TensorSpec, ggml_type: GGMLType) -> int:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    return int(np.prod(spec.shape, dtype=np.int64)) // block_len * block_bytes


def _add_metadata(writer: gguf.GGUFWriter, shape: ModelShape, seed: int, dtype: DType, *, with_ple: bool) -> None:
    vocabulary = tokenizer.build_vocabulary(shape.vocab_size)
    end_of_text = vocabulary.id_of(tokenizer.END_OF_TEXT)
    writer.add_type("model")
    writer.add_name(f"{ARCHITECTURE}-random-{seed}")
    writer.add_file_type(_FILE_TYPE[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, shape)
    if with_ple:
        _add_ple(writer, shape, end_of_text, vocabulary.id_of(tokenizer.IMAGE_PAD))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(vocabulary.id_of(tokenizer.END_OF_TURN))
    writer.add_pad_token_id(end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.CHAT_TEMPLATE)


def _add_sizes(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    counts = {
        "block_count": shape.num_blocks,
        "context_length": shape.context_length,
        "embedding_length": shape.embed_width,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.rope_dim,
        "full_attention_interval": shape.full_attention_interval,
        "expert_count": shape.num_experts,
        "expert_used_count": shape.num_experts_used,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_feed_forward_length": shape.shared_expert_width,
        "ssm.conv_kernel": shape.conv_kernel,
        "ssm.state_size": shape.gdn_head_dim,
        "ssm.group_count": shape.gdn_key_heads,
        "ssm.time_step_rank": shape.gdn_value_heads,
        "ssm.inner_size": shape.gdn_value_heads * shape.gdn_head_dim,
        "hyper_connection.count": shape.num_streams,
        "hyper_connection.low_rank": shape.mixer_rank,
        "attention.indexer.head_count": shape.index_heads,
        "attention.indexer.key_length": shape.index_dim,
        "attention.indexer.top_k": shape.index_top_k,
    }
    if shape.num_mtp_layers:
        counts["nextn_predict_layers"] = shape.num_mtp_layers
    for name, value in counts.items():
        if isinstance(value, int):
            writer.add_uint32(f"{ARCHITECTURE}.{name}", value)
        else:
            writer.add_array(f"{ARCHITECTURE}.{name}", list(value))
    recurrent = [shape.is_recurrent(layer) for layer in range(shape.num_blocks)]
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", RMS_EPS)
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", shape.rope_base)
    writer.add_array(f"{ARCHITECTURE}.rope.dimension_sections", list(shape.rope_sections))
    writer.add_array(f"{ARCHITECTURE}.attention.recurrent_layers", recurrent)
    writer.add_array(f"{ARCHITECTURE}.attention.compress_ratios", [0 if r else shape.compress_ratio for r in recurrent])


def _add_ple(writer: gguf.GGUFWriter, shape: ModelShape, boundary_id: int, image_id: int) -> None:
    writer.add_array(f"{ARCHITECTURE}.ple.layers", [shape.ple_layer])
    for name, value in {
        "ple.ngram_size": shape.ple_ngram_size,
        "ple.heads_per_ngram": shape.ple_heads_per_ngram,
        "ple.conv_kernel": shape.ple_conv_kernel,
        "ple.eos_token_id": boundary_id,
        "ple.image_token_id": image_id,
        "embedding_length_per_layer_input": shape.ple_row_width,
    }.items():
        writer.add_uint32(f"{ARCHITECTURE}.{name}", value)
    for name, values in {
        "ple.layer_multipliers": shapes.ple_multipliers(shape),
        "ple.head_offsets": shapes.ple_head_offsets(shape),
        "ple.head_vocab_sizes": shapes.ple_head_vocab_sizes(shape),
    }.items():
        writer.add_key_value(f"{ARCHITECTURE}.{name}", values, GGUFValueType.ARRAY, GGUFValueType.UINT64)
