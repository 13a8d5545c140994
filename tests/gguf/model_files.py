"""Whole qwen4exp files as headers over a hole, with the keys and tensors of the real model.

The tensor list is written out here once more, independent of the package's own, so that one checks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.gguf.tiny_writer import File, Key, Tensor, array, scalar, string

TYPES = {q.name: (int(q), *GGML_QUANT_SIZES[q]) for q in GGMLQuantizationType if q in GGML_QUANT_SIZES}
TYPES["Q2_0"] = (42, 64, 18)
HEAD_SIZES = [20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077]
HEAD_SIZES += [20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171]

Keys = dict[str, object]
TypeOf = Callable[[str, tuple[int, ...]], str]


def real_keys(num_layers: int = 48, num_mtp: int = 1) -> Keys:
    """The real model's metadata, or that of its first layers."""
    blocks = range(num_layers + num_mtp)
    recurrent = [(i + 1) % 4 != 0 and i < num_layers for i in blocks]
    return {
        "block_count": num_layers + num_mtp,
        "nextn_predict_layers": num_mtp,
        "context_length": 262144,
        "embedding_length": 2560,
        "attention.head_count": 24,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "full_attention_interval": 4,
        "attention.recurrent_layers": recurrent,
        "attention.compress_ratios": [0 if r else 4 for r in recurrent],
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "expert_count": 512,
        "expert_used_count": 10,
        "expert_feed_forward_length": 640,
        "expert_shared_feed_forward_length": 640,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 48,
        "ssm.inner_size": 6144,
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 320,
        "ple.layers": [1],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 8,
        "ple.conv_kernel": 4,
        "embedding_length_per_layer_input": 160,
        "ple.eos_token_id": 248044,
        "ple.image_token_id": 248056,
        "ple.layer_multipliers": [23703573157769, 20109073645365, 8052911324071],
        "ple.head_vocab_sizes": HEAD_SIZES,
        "ple.head_offsets": [sum(HEAD_SIZES[:i]) for i in range(16)],
    }


def small_keys() -> Keys:
    """Four layers and a draft block, 64 wide."""
    return real_keys(4, 1) | {
        "context_length": 4096,
        "embedding_length": 64,
        "attention.head_count": 4,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 16,
        "rope.dimension_sections": [3, 3, 2, 0],
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 32,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
        "expert_shared_feed_forward_length": 64,
        "ssm.state_size": 32,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
        "hyper_connection.low_rank": 32,
        "ple.heads_per_ngram": 1,
        "embedding_length_per_layer_input": 32,
        "ple.eos_token_id": 500,
        "ple.image_token_id": 501,
        "ple.head_vocab_sizes": [251, 257],
        "ple.head_offsets": [0, 251],
    }


def tensor_shapes(
    keys: Mapping[str, object], *, vocab: int, table_rows: int, fused: bool = False, mtp_only: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name -> row-major shape of every tensor of the model that `keys` describe."""

    def size(name: str) -> int:
        value = keys[name]
        assert isinstance(value, int)
        return value

    width, rank, streams = size("embedding_length"), size("hyper_connection.low_rank"), size("hyper_connection.count")
    wide = streams * width
    heads, kv, head = size("attention.head_count"), size("attention.head_count_kv"), size("attention.key_length")
    index, index_dim = size("attention.indexer.head_count"), size("attention.indexer.key_length")
    experts, shared = size("expert_count"), size("expert_shared_feed_forward_length")
    gdn, key_heads, value_heads = size("ssm.state_size"), size("ssm.group_count"), size("ssm.time_step_rank")
    value_width, channels = value_heads * gdn, (2 * key_heads + value_heads) * gdn
    row = size("embedding_length_per_layer_input")
    table_width = row * (size("ple.ngram_size") - 1) * size("ple.heads_per_ngram")
    trunk = size("block_count") - size("nextn_predict_layers")
    recurrent, ple_layers = keys["attention.recurrent_layers"], keys["ple.layers"]
    assert isinstance(recurrent, list)
    assert isinstance(ple_layers, list)

    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, width), "output.weight": (vocab, width)}
    if not mtp_only:
        out |= {"output_hc_norm.weight": (wide,), "per_layer_token_embd.weight": (table_rows, row)}
        out |= {"output_hc_down.weight": (rank, wide), "output_hc_up.weight": (wide, rank)}
    for i in range(trunk if mtp_only else 0, size("block_count")):
        ff = keys["expert_feed_forward_length"]
        expert = ff[i] if isinstance(ff, list) else ff
        assert isinstance(expert, int)
        part: dict[str, tuple[int, ...]] = {}
        for mixer in ("hc_attn", "hc_ffn"):
            part |= {f"{mixer}_norm.weight": (wide,), f"{mixer}_inject.weight": (streams, wide)}
            part |= {f"{mixer}_down.weight": (rank, wide), f"{mixer}_up.weight": (wide, rank)}
        if recurrent[i]:
            part |= {"attn_qkv.weight": (channels, width), "attn_gate.weight": (value_width, width)}
            part |= {"ssm_beta.weight": (value_heads, width), "ssm_alpha.weight": (value_heads, width)}
            part |= {"ssm_dt.bias": (value_heads,), "ssm_a": (value_heads,), "ssm_norm.weight": (gdn,)}
            part |= {"ssm_out.weight": (width, value_width), "ssm_conv1d.weight": (channels, size("ssm.conv_kernel"))}
        else:
            part |= {"attn_q.weight": (2 * heads * head, width), "attn_output.weight": (width, heads * head)}
            part |= {"attn_k.weight": (kv * head, width), "attn_v.weight": (kv * head, width)}
            part |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
            part |= {"indexer.q_proj.weight": (index * index_dim, width), "indexer.k_proj.weight": (index_dim, width)}
            part |= {"indexer.q_norm.weight": (index_dim,), "indexer.k_norm.weight": (index_dim,)}
        if i in ple_layers:
            part |= {"ple_key.weight": (wide, table_width), "ple_value.weight": (width, table_width)}
            part |= {f"ple_norm_{n}.weight": (wide,) for n in ("key", "query", "conv")}
            part |= {"ple_conv1d.weight": (wide, size("ple.conv_kernel"))}
        part |= {"ffn_gate_inp.weight": (experts, width), "ffn_gate_inp_shexp.weight": (width,)}
        if fused:
            part |= {"ffn_gate_up_exps.weight": (experts, 2 * expert, width)}
        else:
            part |= {f"ffn_{n}_exps.weight": (experts, expert, width) for n in ("gate", "up")}
        part |= {"ffn_down_exps.weight": (experts, width, expert), "ffn_down_shexp.weight": (width, shared)}
        part |= {"ffn_gate_shexp.weight": (shared, width), "ffn_up_shexp.weight": (shared, width)}
        if i >= trunk:
            part |= {"nextn.eh_proj.weight": (width, 2 * width), "nextn.enorm.weight": (width,)}
            part |= {"nextn.hnorm.weight": (wide,), "nextn.hc_head_norm.weight": (wide,)}
            part |= {"nextn.hc_head_down.weight": (rank, wide), "nextn.hc_head_up.weight": (wide, rank)}
        out |= {f"blk.{i}.{name}": shape for name, shape in part.items()}
    return out


def encode_key(name: str, value: object) -> bytes:
    match value:
        case str():
            return string(value)
        case bool():
            return scalar("bool", value)
        case float():
            return scalar("f32", value)
        case int():
            return scalar("u32" if value >= 0 else "i32", value)
        case list() if value and isinstance(value[0], bool):
            return array("bool", value)
        case list() if value and isinstance(value[0], str):
            return array("string", value)
        case list():
            return array("u64" if name.startswith("ple.") and name != "ple.layers" else "i32", value)
    raise TypeError(f"{name} = {value!r}")


def model_file(
    keys: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], type_of: TypeOf = lambda name, shape: "F32"
) -> File:
    """The file of a model; a key that contains "general." or "tokenizer." is taken as it is, others get the prefix."""
    pairs: list[Key] = [("general.architecture", string("qwen4exp"))]
    for name, value in keys.items():
        full = name if name.startswith(("general.", "tokenizer.")) else f"qwen4exp.{name}"
        pairs = [p for p in pairs if p[0] != full] + [(full, encode_key(name, value))]
    tensors = []
    for name, shape in shapes.items():
        number, block_len, block_bytes = TYPES[type_of(name, shape)]
        num_bytes = block_bytes * shape[-1] // block_len
        for n in shape[:-1]:
            num_bytes *= n
        tensors.append(Tensor(name, shape, number, num_bytes))
    return File(keys=pairs, tensors=tensors)


def write_hole(file: File, path: Path) -> Path:
    """Write the header and leave the data section a hole, which takes no disk space."""
    header = file.header()
    with path.open("wb") as out:
        out.write(header)
        out.truncate(-(-len(header) // file.alignment) * file.alignment + file.data_bytes())
    return path


def small_model(path: Path, changes: Mapping[str, object] | None = None, *, drop: tuple[str, ...] = ()) -> Path:
    """Write the 64-wide model with `changes` to its keys, without the keys `drop`, but with the original's tensors."""
    keys = {name: value for name, value in (small_keys() | dict(changes or {})).items() if name not in drop}
    return write_hole(model_file(keys, small_shapes()), path)


def small_shapes(**changes: bool) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(small_keys(), vocab=512, table_rows=512, **changes)
