"""Geometry from headers: the real model's sizes, every key and tensor check with its numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from strata_jax.errors import FormatError
from strata_jax.geometry import Geometry, attention_layer_indices, size_table
from strata_jax.gguf.reader import GGUFFile, open_gguf
from strata_jax.synthetic import write_synthetic_gguf
from tests.calls import num_calls
from tests.gguf.model_files import (
    Keys,
    model_file,
    real_keys,
    small_keys,
    small_model,
    small_shapes,
    tensor_shapes,
    write_hole,
)

REAL_VOCAB, REAL_TABLE_ROWS = 248_320, 320_001_536
# Parameters per component of the real checkpoint: counted from its configuration, see the model card.
REAL_PARAMETERS = {
    "token_embd": 635_699_200,
    "output": 635_699_200,
    "final mixer": 6_563_840,
    "mixers": 634_060_800,
    "GDN": 2_086_510_464,
    "attention": 597_694_464,
    "indexers": 19_663_872,
    "routers": 62_914_560,
    "shared experts": 236_052_480,
    "routed experts": 120_795_955_200,
    "PLE layer": 32_839_680,
    "PLE table": 51_200_245_760,
    "MTP without experts": 90_568_448,
    "MTP experts": 2_516_582_400,
}
FLOAT_PARTS = re.compile(r"norm|ffn_gate_inp|ssm_conv1d|ssm_a$|ssm_dt|hc_\w+_inject")
HALF_PARTS = re.compile(r"indexer|ple_conv1d")


def geometry_of(path: Path) -> Geometry:
    with open_gguf(path) as file:
        return Geometry.from_gguf(file)


def refusal(path: Path, *parts: object) -> str:
    with pytest.raises(FormatError) as caught:
        geometry_of(path)
    message = str(caught.value)
    for part in (path, *parts):
        assert re.search(rf"(?<!\d){re.escape(str(part))}(?!\d)", message), f"{part!r} is not in: {message}"
    return message


def iq3_s_with_fallback(name: str, shape: tuple[int, ...]) -> str:
    if FLOAT_PARTS.search(name):
        return "F32"
    if HALF_PARTS.search(name):
        return "F16"
    return "IQ3_S" if shape[-1] % 256 == 0 else "IQ4_NL"


def real_shapes(**changes: bool) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(real_keys(), vocab=REAL_VOCAB, table_rows=REAL_TABLE_ROWS, **changes)


# ---------------------------------------------------------------- the real model
def test_real_model_sizes_from_a_header_over_a_hole(tmp_path: Path) -> None:
    """1,256 tensors, 73 GB of data that do not exist: parameters per component are the published ones."""
    path = write_hole(model_file(real_keys(), real_shapes(), iq3_s_with_fallback), tmp_path / "real.gguf")
    opened: list[tuple[GGUFFile, Geometry]] = []

    def read() -> None:
        file = open_gguf(path)
        opened.append((file, Geometry.from_gguf(file)))

    assert num_calls(read) < 100 * 1256, "work for each tensor, not for what it holds"
    file, geometry = opened[0]
    with file:
        assert len(file.tensors) == 1256
        file_tensor_bytes = sum(t.num_bytes for t in file.tensors.values())
    rows = size_table(geometry)
    assert {row.component: row.num_parameters for row in rows} == REAL_PARAMETERS
    assert sum(row.num_bytes for row in rows) == file_tensor_bytes == geometry.total_bytes
    assert sum(row.num_tensors for row in rows) == 1256
    size = {row.component: row.num_bytes for row in rows}
    # GB, three digits, of the published table for this mix of types
    published = {"token_embd": 0.273, "routed experts": 57.252, "PLE table": 28.800, "MTP experts": 1.193}
    published |= {"attention": 0.257, "indexers": 0.039, "routers": 0.252, "shared experts": 0.112}
    assert {name: round(size[name] / 1e9, 3) for name in published} == published
    assert geometry.expert_bytes(0) == geometry.expert_bytes(48) == 2_329_600
    assert size["routed experts"] == 48 * 512 * 2_329_600
    assert path.stat().st_blocks * 512 < 2**20, "planning wrote into the hole"


def test_real_model_fields(tmp_path: Path) -> None:
    path = write_hole(model_file(real_keys(), real_shapes()), tmp_path / "real.gguf")
    g = geometry_of(path)
    assert (g.num_layers, g.num_mtp_layers, g.num_blocks) == (48, 1, 49)
    assert (g.embed_width, g.vocab_size, g.context_length) == (2560, REAL_VOCAB, 262_144)
    assert (g.num_heads, g.num_kv_heads, g.head_dim, g.rope_dim, g.rope_base) == (24, 2, 256, 64, 1e7)
    assert g.rms_eps == pytest.approx(1e-6)
    assert (g.index_heads, g.index_dim, g.index_top_k) == (4, 128, 2048)
    assert (g.num_experts, g.num_experts_used, g.expert_width, g.shared_expert_width) == (512, 10, (640,) * 49, 640)
    assert (g.gdn_key_heads, g.gdn_value_heads, g.gdn_head_dim, g.conv_kernel) == (16, 48, 128, 4)
    assert (g.num_streams, g.mixer_rank) == (4, 320)
    assert g.attention_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 48)
    assert len(g.recurrent_layers) == 36
    assert [g.compress_ratio[i] for i in (0, 3, 47, 48)] == [0, 4, 4, 4]
    assert (g.ple_layer, g.ple_ngram_size, g.ple_heads_per_ngram) == (1, 3, 8)
    assert (g.ple_conv_kernel, g.ple_row_width, g.ple_boundary_id) == (4, 160, 248_044)
    assert g.ple_offsets[-1] == 300_001_275
    assert g.ple_multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert g.warnings == ()
    assert hash(g) == hash(geometry_of(path))
    assert g == geometry_of(path)


def test_dense_bytes_of_the_real_model(tmp_path: Path) -> None:
    path = write_hole(model_file(real_keys(), real_shapes(), lambda name, shape: "F16"), tmp_path / "real.gguf")
    assert geometry_of(path).dense_bytes == 2 * 4_947_698_560


def test_experts_of_different_sizes_by_layer(tmp_path: Path) -> None:
    mix = {0: ("IQ2_S", "IQ4_NL"), 1: ("IQ3_XXS", "Q2_0"), 2: ("IQ4_XS", "IQ4_NL"), 3: ("Q2_0", "Q2_0")}

    def type_of(name: str, shape: tuple[int, ...]) -> str:
        layer = re.match(r"blk\.(\d)\.ffn_(gate|up|down)_exps", name)
        return mix.get(int(layer[1]), ("F16", "F16"))[layer[2] == "down"] if layer else "F32"

    keys = real_keys(4, 1)
    shapes = tensor_shapes(keys, vocab=REAL_VOCAB, table_rows=REAL_TABLE_ROWS)
    g = geometry_of(write_hole(model_file(keys, shapes, type_of), tmp_path / "m.gguf"))
    expected = [2 * 524_800 + 921_600, 2 * 627_200 + 460_800, 2 * 870_400 + 921_600, 3 * 460_800, 9_830_400]
    assert [g.expert_bytes(i) for i in range(5)] == expected
    assert g.component_bytes()["routed experts"] == 512 * sum(expected[:4])


# ---------------------------------------------------------------- shapes of files
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_synthetic_model_agrees(tmp_path: Path, dtype: str) -> None:
    path = write_synthetic_gguf(tmp_path / "m.gguf", preset="nano", dtype=dtype)  # type: ignore[arg-type]
    with open_gguf(path) as file:
        g = Geometry.from_gguf(file)
        assert g.total_bytes == sum(file.data(name).nbytes for name in file.tensors)
        assert g.eos_token_id is not None
    assert g.num_layers == 4


def test_header_alone_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: GGUFFile, name: str) -> None:
        raise AssertionError(f"data of {name} was asked for")

    monkeypatch.setattr(GGUFFile, "data", forbidden)
    path = small_model(tmp_path / "m.gguf")
    size_table(geometry_of(path))


def test_importing_geometry_does_not_import_jax() -> None:
    code = "import sys, strata_jax.geometry; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fused_experts(tmp_path: Path) -> None:
    plain = geometry_of(small_model(tmp_path / "plain.gguf"))
    fused = geometry_of(write_hole(model_file(small_keys(), small_shapes(fused=True)), tmp_path / "fused.gguf"))
    assert fused.fused_experts(0)
    assert not plain.fused_experts(0)
    assert fused.expert_bytes(0) == plain.expert_bytes(0) == 3 * 64 * 64 * 4


def test_tied_output(tmp_path: Path) -> None:
    shapes = small_shapes()
    del shapes["output.weight"]
    g = geometry_of(write_hole(model_file(small_keys(), shapes), tmp_path / "m.gguf"))
    assert g.tied_output
    assert "output" not in {row.component for row in size_table(g)}
    assert not geometry_of(small_model(tmp_path / "own.gguf")).tied_output


def test_model_without_draft_block_and_without_table(tmp_path: Path) -> None:
    keys = {k: v for k, v in small_keys().items() if not k.startswith("ple.")}
    keys |= {"block_count": 4, "attention.recurrent_layers": [True, True, True, False]}
    keys["attention.compress_ratios"] = [0, 0, 0, 4]
    del keys["nextn_predict_layers"], keys["embedding_length_per_layer_input"]
    shapes = {n: s for n, s in small_shapes().items() if "ple_" not in n and "per_layer" not in n and "blk.4." not in n}
    g = geometry_of(write_hole(model_file(keys, shapes), tmp_path / "m.gguf"))
    assert (g.num_layers, g.num_mtp_layers, g.ple_layer, g.attention_layers) == (4, 0, None, (3,))


def draft_keys() -> Keys:
    return {k: v for k, v in small_keys().items() if not k.startswith("ple.")}


def test_draft_only_file(tmp_path: Path) -> None:
    shapes = small_shapes(mtp_only=True)
    g = geometry_of(write_hole(model_file(draft_keys(), shapes), tmp_path / "m.gguf"))
    assert not g.has_trunk
    assert (g.num_layers, g.num_mtp_layers, g.attention_layers, g.recurrent_layers) == (4, 1, (4,), ())
    assert [row.component for row in size_table(g)] == ["token_embd", "output", "MTP without experts", "MTP experts"]


def test_shared_draft_file_without_embedding_takes_the_vocabulary_from_its_tokens(tmp_path: Path) -> None:
    shapes = {n: s for n, s in small_shapes(mtp_only=True).items() if n.startswith("blk")}
    keys = draft_keys() | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(300)]}
    g = geometry_of(write_hole(model_file(keys, shapes), tmp_path / "m.gguf"))
    assert (g.vocab_size, g.tied_output, g.has_trunk) == (300, False, False)
    refusal(write_hole(model_file(draft_keys(), shapes), tmp_path / "n.gguf"), "tokenizer.ggml.tokens", "missing")


def test_expert_width_by_block(tmp_path: Path) -> None:
    keys = small_keys() | {"expert_feed_forward_length": [64, 32, 96, 64, 128]}
    shapes = tensor_shapes(keys, vocab=512, table_rows=512)
    g = geometry_of(write_hole(model_file(keys, shapes), tmp_path / "m.gguf"))
    assert g.expert_width == (64, 32, 96, 64, 128)
    assert [g.expert_bytes(i) for i in range(5)] == [12 * 64 * w for w in g.expert_width]


def test_recurrent_array_wins_over_the_interval(tmp_path: Path) -> None:
    g = geometry_of(small_model(tmp_path / "m.gguf", {"full_attention_interval": 2}))
    assert g.attention_layers == (3, 4)


def test_older_file_without_the_recurrent_array_uses_the_interval(tmp_path: Path) -> None:
    g = geometry_of(small_model(tmp_path / "m.gguf", drop=("attention.recurrent_layers",)))
    assert g.recurrent == (True, True, True, False, False)
    both = ("attention.recurrent_layers", "full_attention_interval")
    refusal(small_model(tmp_path / "n.gguf", drop=both), "full_attention_interval' is missing")


def test_trunk_whose_compress_ratios_are_all_zero_is_a_warning(tmp_path: Path) -> None:
    g = geometry_of(small_model(tmp_path / "m.gguf", {"attention.compress_ratios": [0, 0, 0, 0, 4]}))
    assert len(g.warnings) == 1
    assert "compress_ratios is 0 for all 1 attention layers" in g.warnings[0]


def test_rope_scaling_is_a_warning(tmp_path: Path) -> None:
    assert "yarn" in geometry_of(small_model(tmp_path / "m.gguf", {"rope.scaling.type": "yarn"})).warnings[0]
    assert geometry_of(small_model(tmp_path / "n.gguf", {"rope.scaling.type": "none"})).warnings == ()


def test_P01_only_attention_layers_are_charged_kv() -> None:
    """P01: 64 layers, every fourth attends, 4 K/V heads of 256 + 256, f16: 65,536 bytes a token, 16 GiB at 262,144."""
    layers = attention_layer_indices(64, 4)
    assert layers[:2] == (3, 7)
    kv_bytes_per_token = len(layers) * 4 * (256 + 256) * 2
    assert kv_bytes_per_token == 65_536
    assert kv_bytes_per_token * 262_144 / 2**30 == 16.0


# ---------------------------------------------------------------- keys that are refused
REQUIRED = sorted(
    set(small_keys())
    - {"nextn_predict_layers", "attention.recurrent_layers", "full_attention_interval", "rope.dimension_sections"}
    - {"ple.layers", "ple.image_token_id"}
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(tmp_path: Path, key: str) -> None:
    refusal(small_model(tmp_path / "m.gguf", drop=(key,)), f"'qwen4exp.{key}' is missing", "expected")


@pytest.mark.parametrize("key", [k for k in REQUIRED if isinstance(small_keys()[k], int)])
def test_number_of_the_wrong_kind_is_named(tmp_path: Path, key: str) -> None:
    for wrong in ("4", 4.5, -1, True, [4, 4]):
        refusal(small_model(tmp_path / "m.gguf", {key: wrong}), f"'qwen4exp.{key}'", "expected")


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("block_count", 0, ("is 0", "1 to 1024")),
        ("block_count", 2**31, (2**31, "1 to 1024")),
        ("nextn_predict_layers", 2, ("is 2", "0 to 1")),
        ("attention.value_length", 64, ("is 64", "expected 32")),
        ("attention.head_count_kv", 3, ("is 3", "divisor of head_count 4")),
        ("rope.dimension_count", 15, ("is 15", "even")),
        ("rope.dimension_count", 64, ("is 64", "at most 32")),
        ("rope.dimension_sections", [3, 3, 3, 0], ("[3, 3, 3, 0]", "sum of 8")),
        ("rope.dimension_sections", [4, 4], ("[4, 4]", "4 integers")),
        ("rope.freq_base", float("nan"), ("nan", "finite number above 0")),
        ("rope.freq_base", float("inf"), ("inf", "finite number above 0")),
        ("attention.layer_norm_rms_epsilon", -1.0, ("-1.0", "above 0")),
        ("attention.layer_norm_rms_epsilon", 2.0, ("2.0", "below 1")),
        ("attention.recurrent_layers", [True] * 5, ("draft block 4",)),
        ("attention.recurrent_layers", [True] * 3, ("bool[3]", "5 integers")),
        ("attention.recurrent_layers", [1, 1, 2, 0, 0], ("[1, 1, 2, 0, 0]", "0 to 1")),
        ("attention.compress_ratios", [4, 0, 0, 4, 4], ("0 for layer 0", "GDN")),
        ("attention.compress_ratios", [0, 0, 0, 5, 4], ("divisors of top_k 32",)),
        ("attention.compress_ratios", [0, 0, 0, 4], ("[0, 0, 0, 4]", "5 integers")),
        ("expert_used_count", 9, ("is 9", "at most expert_count 8")),
        ("expert_feed_forward_length", [64, 64], ("[64, 64]", "5 integers")),
        ("ssm.group_count", 3, ("is 3", "divisor of 4")),
        ("ssm.inner_size", 100, ("is 100", "128 = 4 value heads x 32")),
        ("ple.layers", [3], ("[3]", "layer 3 is an attention layer")),
        ("ple.layers", [0, 1], ("[0, 1]", "1 integers")),
        ("ple.layers", [4], ("[4]", "0 to 3")),
        ("ple.head_offsets", [0, 252], ("[0, 252]", "[0, 251]")),
        ("ple.head_vocab_sizes", [251], ("[251]", "2 integers")),
        ("ple.layer_multipliers", [1, 2], ("[1, 2]", "3 integers")),
        ("ple.layer_multipliers", [1, 2, 2**63], (2**63, "1 to 9223372036854775807")),
        ("ple.eos_token_id", 512, ("is 512", "0 to 511")),
        ("tokenizer.ggml.eos_token_id", 512, ("is 512", "vocabulary's 512")),
        ("general.architecture", "llama", ("'llama'", "'qwen4exp'")),
        ("general.architecture", 4, ("uint32", "a string")),
    ],
)
def test_contradictory_key_is_named_with_its_numbers(
    tmp_path: Path, key: str, value: object, parts: tuple[object, ...]
) -> None:
    refusal(small_model(tmp_path / "m.gguf", {key: value}), key, *parts)


# ---------------------------------------------------------------- tensors that are refused
@pytest.mark.parametrize("name", sorted(set(small_shapes()) - {"output.weight"}))
def test_every_tensor_is_needed(tmp_path: Path, name: str) -> None:
    shapes = small_shapes()
    shape = shapes.pop(name)
    if name == "per_layer_token_embd.weight":
        shape = (508, 32)  # without the padding
    refusal(write_hole(model_file(small_keys(), shapes), tmp_path / "m.gguf"), f"{name!r} is missing", shape)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.attn_qkv.weight", (255, 64), "(256, 64)"),
        ("blk.3.attn_q.weight", (64, 256), "(256, 64)"),
        ("blk.2.ffn_down_exps.weight", (8, 64, 32), "(8, 64, 64)"),
        ("blk.4.nextn.eh_proj.weight", (64, 64), "(64, 128)"),
        ("output_hc_norm.weight", (4, 64), "(256,)"),
        ("output.weight", (511, 64), "(512, 64)"),
        ("per_layer_token_embd.weight", (507, 32), "at least (508, 32)"),
        ("per_layer_token_embd.weight", (512, 64), "at least (508, 32)"),
    ],
)
def test_wrong_shape_is_named(tmp_path: Path, name: str, shape: tuple[int, ...], expected: str) -> None:
    shapes = small_shapes() | {name: shape}
    path = write_hole(model_file(small_keys(), shapes), tmp_path / "m.gguf")
    message = refusal(path, repr(name), shape, f"expected {expected}")
    assert re.search(r"at byte \d+", message)


@pytest.mark.parametrize("name", ["blk.5.attn_q.weight", "output_norm.weight", "blk.0.attn_qkv.bias", "blk.03.ssm_a"])
def test_tensor_that_is_no_part_of_the_model(tmp_path: Path, name: str) -> None:
    path = write_hole(model_file(small_keys(), small_shapes() | {name: (32, 64)}), tmp_path / "m.gguf")
    refusal(path, repr(name), "(32, 64)", "no part of a qwen4exp model with 4 layers and 1 draft")


def test_layer_with_fused_and_separate_experts(tmp_path: Path) -> None:
    shapes = small_shapes() | {"blk.1.ffn_gate_up_exps.weight": (8, 128, 64)}
    refusal(write_hole(model_file(small_keys(), shapes), tmp_path / "m.gguf"), "'blk.1.ffn_gate_exps.weight'")


def test_G01_no_geometry_from_a_truncated_file(tmp_path: Path) -> None:
    """G01: the planner refuses too."""
    path = small_model(tmp_path / "m.gguf")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    refusal(path, "lies outside the file")


def test_G07_no_geometry_with_an_unknown_type(tmp_path: Path) -> None:
    """G07: the error names the tensor and 153."""
    file = model_file(small_keys(), small_shapes())
    file.tensors[40].ggml_id = 153
    refusal(write_hole(file, tmp_path / "m.gguf"), repr(file.tensors[40].name), "unknown(153)")


def test_type_that_only_the_planner_knows(tmp_path: Path) -> None:
    def type_of(name: str, shape: tuple[int, ...]) -> str:
        return "Q4_1" if name == "blk.0.attn_gate.weight" else "F32"

    g = geometry_of(write_hole(model_file(small_keys(), small_shapes(), type_of), tmp_path / "m.gguf"))
    assert g.tensor_types["blk.0.attn_gate.weight"].num_bytes == 128 * 64 // 32 * 20
    with pytest.raises(FormatError, match=r"'blk.0.attn_gate.weight' is stored as Q4_1.*IQ3_S"):
        g.check_engine_types()
    geometry_of(small_model(tmp_path / "n.gguf")).check_engine_types()
