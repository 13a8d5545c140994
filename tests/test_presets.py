"""Geometries of whole models without a file: widths, types, totals against published sizes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.errors import ConfigError, FormatError
from strata_jax.geometry import size_table
from strata_jax.gguf.layout import PLE_TABLE
from strata_jax.presets import interleave, model_geometry, preset_geometry, spread_layers
from strata_jax.quants import MARKS, LayerTypes, fitting_type, load_quant, parse_quant, quant_names

REPOSITORY = Path(__file__).resolve().parents[1]
FLASH_QUANTS = [name for name in quant_names() if name != "iq1_m"]
PARAMETERS = {  # of the real checkpoint
    "token_embd": 635_699_200, "output": 635_699_200, "final mixer": 6_563_840, "mixers": 634_060_800,
    "GDN": 2_086_510_464, "attention": 597_694_464, "indexers": 19_663_872, "routers": 62_914_560,
    "shared experts": 236_052_480, "routed experts": 120_795_955_200, "PLE layer": 32_839_680,
    "PLE table": 51_200_245_760, "MTP without experts": 90_568_448, "MTP experts": 2_516_582_400,
}  # fmt: skip


def trunk_bytes(geometry) -> int:
    return sum(t.num_bytes for t in geometry.tensor_types.values() if not t.component.startswith("MTP"))


def test_flash_has_the_real_checkpoints_parameters() -> None:
    geometry = preset_geometry("qwen38_flash", "iq2_xs")
    assert {row.component: row.num_parameters for row in size_table(geometry)} == PARAMETERS
    assert sum(not t.component.startswith("MTP") for t in geometry.tensor_types.values()) == 1224
    assert len(geometry.tensor_types) == 1256
    assert geometry.attention_layers == (*range(3, 48, 4), 48)
    assert (geometry.context_length, geometry.num_experts_used, geometry.ple_layer) == (262_144, 10, 1)


def test_the_n_gram_constants_are_the_real_ones() -> None:
    geometry = model_geometry("qwen38_flash")
    assert geometry.ple_multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (geometry.ple_vocab_sizes[0], geometry.ple_vocab_sizes[-1]) == (20_000_003, 20_000_171)
    assert geometry.ple_offsets[-1] == 300_001_275
    assert preset_geometry("qwen38_flash", "q2_0").tensor_types[PLE_TABLE].shape == (320_001_536, 160)


def test_coder_has_half_the_experts() -> None:
    flash, coder = (preset_geometry(name, "iq3_s") for name in ("qwen38_flash", "qwen38_coder"))
    assert coder.num_experts == 256
    assert 2 * coder.component_bytes()["routed experts"] == flash.component_bytes()["routed experts"]
    assert coder.component_bytes()["GDN"] == flash.component_bytes()["GDN"]


@pytest.mark.parametrize("name", quant_names())
def test_totals_are_the_published_ones(name: str) -> None:
    model = "qwen38_coder" if name == "iq1_m" else "qwen38_flash"
    geometry, published = preset_geometry(model, name), load_quant(name).published
    experts = geometry.component_bytes()["routed experts"]
    assert experts == published.get("expert_bytes", experts)
    assert experts / 2**30 == pytest.approx(published["expert_gib"], abs=0.05)
    if "file_bytes" in published:  # a header of about 10 MB and the tokenizer come on top
        assert 0 < published["file_bytes"] - trunk_bytes(geometry) < 30e6


def test_published_totals_were_not_edited() -> None:
    files = {"q2_0": 66_423_878_624, "iq2_xs": 68_026_093_024, "iq3_xxs": 75_839_998_528, "iq3_s": 83_617_662_656}
    experts = {"q2_0": 33_973_862_400, "iq3_s": 50_292_326_400, "ud_q4_k_xl": 73_450 * 2**20}
    gib = {"q2_0": 31.64, "iq2_xs": 33.0, "iq3_xxs": 40.0, "iq3_s": 46.8, "ud_iq4_xs": 55.4, "ud_q4_k_xl": 71.7}
    for key, expected in {"file_bytes": files, "expert_bytes": experts}.items():
        assert {n: load_quant(n).published[key] for n in expected} == expected
        assert not [n for n in quant_names() if key in load_quant(n).published and n not in expected]
    assert {n: load_quant(n).published["expert_gib"] for n in gib} == gib
    assert load_quant("nvfp4").published["expert_gib"] == 63.3
    assert load_quant("iq1_m").published["expert_gib"] == 23.4


def test_iq3_s_has_the_published_pairs_of_types() -> None:
    tensors = preset_geometry("qwen38_flash", "iq3_s").tensor_types
    pairs = Counter(
        (tensors[f"blk.{i}.ffn_gate_exps.weight"].type_name, tensors[f"blk.{i}.ffn_down_exps.weight"].type_name)
        for i in range(48)
    )
    assert pairs == {
        ("IQ2_S", "IQ4_NL"): 15, ("IQ3_XXS", "IQ4_NL"): 14, ("IQ3_S", "IQ4_NL"): 9, ("IQ2_S", "Q2_0"): 5,
        ("IQ3_XXS", "Q2_0"): 3, ("IQ3_S", "Q2_0"): 1, ("IQ4_XS", "IQ4_NL"): 1,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "row_bytes"), [("iq3_xxs", 1760), ("iq3_s", 2100), ("iq2_xs", 1360), ("nvfp4", 5120)])
def test_rows_of_the_head(name: str, row_bytes: int) -> None:
    head = preset_geometry("qwen38_flash", name).tensor_types["output.weight"]
    assert head.num_bytes == row_bytes * 248_320


def test_nvfp4_experts_have_a_tail_and_a_table_of_one_byte_a_value() -> None:
    geometry = preset_geometry("qwen38_flash", "nvfp4")
    assert [geometry.expert_bytes(layer) for layer in (0, 47)] == [2_764_816] * 2
    assert geometry.tensor_types[PLE_TABLE].num_bytes == 320_001_536 * 160
    with pytest.raises(FormatError, match="does not decode"):
        geometry.check_engine_types()


@pytest.mark.parametrize(("ple", "row"), [("IQ4_NL", 90), ("FP8", 160), ("Q8_0", 170), ("NVFP4", 90)])
def test_another_table_type(ple: str, row: int) -> None:
    table = preset_geometry("qwen38_flash", "iq3_s", ple=ple).tensor_types[PLE_TABLE]
    assert table.num_bytes == row * table.shape[0]


def test_another_head_and_dense_type() -> None:
    before, after = (preset_geometry("qwen38_flash", "iq2_xs", **o) for o in ({}, {"head": "Q8_0", "dense": "Q8_0"}))
    changed = {n for n, t in before.tensor_types.items() if t.type_name != after.tensor_types[n].type_name}
    assert after.tensor_types["output.weight"].type_name == "Q8_0"
    assert after.tensor_types["blk.0.attn_qkv.weight"].type_name == "Q8_0"
    assert not [n for n in changed if "exps" in n or "indexer" in n or "gate_inp" in n or n == "token_embd.weight"]


def test_types_that_do_not_divide_a_row_have_stand_ins() -> None:
    assert [fitting_type(t, 320).name for t in ("Q6_K", "Q5_K", "Q4_K", "IQ3_S")] == ["Q8_0", "Q5_1", "Q5_0", "IQ4_NL"]
    assert fitting_type("Q6_K", 512).name == "Q6_K"
    assert fitting_type("Q8_0", 6).name == "F16"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'iq3_xxs'"):
        preset_geometry("qwen38_flash", "iq3_xss")
    with pytest.raises(ConfigError, match="did you mean 'qwen38_flash'"):
        preset_geometry("qwen38_flsh", "iq3_s")
    with pytest.raises(ConfigError, match="did you mean 'Q6_K'"):
        preset_geometry("qwen38_flash", "iq3_s", head="q6_k")


def test_a_preset_is_built_once() -> None:
    assert preset_geometry("qwen38_flash", "iq3_s") is preset_geometry("qwen38_flash", "iq3_s")


@pytest.mark.parametrize("name", quant_names())
def test_data_files_are_marked_and_offered(name: str) -> None:
    quant = load_quant(name)
    assert quant.name == name
    assert {"experts", "dense", "head", "embedding", "ple"} <= set(quant.marks)
    assert all(m.mark in MARKS and m.source for m in quant.marks.values())
    offered = yaml.safe_load((REPOSITORY / "conf" / "quant" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert offered == {"name": name}


def test_broken_data_files_are_refused() -> None:
    data = yaml.safe_load((REPOSITORY / "data" / "quants" / "iq2_xs.yaml").read_text(encoding="utf-8"))
    for key, value, message in [
        ("dense", {**data["dense"], "types": {"mixers": "Q5_K"}}, "default"),
        ("dense", {**data["dense"], "types": {"default": "Q5_K", "norms": "F32"}}, "norms"),
        ("head", {**data["head"], "mark": "guessed"}, "guessed"),
        ("ple", {**data["ple"], "type": "Q9_0"}, "Q9_0"),
        ("experts", {"mark": "inferred", "source": "x"}, "layers"),
    ]:
        with pytest.raises(FormatError, match=message):
            parse_quant({**data, key: value}, "x.yaml")


def test_layers_must_be_covered_exactly() -> None:
    entries = (LayerTypes("Q5_K", "Q8_0", 1, (2,)), LayerTypes("Q4_K", "Q5_1", 5))
    assert [e.gate_up for e in spread_layers(entries, 6)] == ["Q4_K", "Q4_K", "Q5_K", "Q4_K", "Q4_K", "Q4_K"]
    for num_layers in (5, 7):
        with pytest.raises(FormatError, match="each exactly once"):
            spread_layers(entries, num_layers)
    with pytest.raises(FormatError, match="each exactly once"):
        spread_layers((LayerTypes("Q5_K", "Q8_0", 1, (9,)), LayerTypes("Q4_K", "Q5_1", 5)), 6)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_every_prefix_is_in_proportion(counts: list[int]) -> None:
    order = interleave(counts)
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    for group, count in enumerate(counts):
        running = np.cumsum(order == group)
        ideal = np.arange(1, len(order) + 1) * count / max(1, len(order))
        assert (abs(running - ideal) <= len(counts)).all()
