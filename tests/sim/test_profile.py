"""Hardware profiles: every number has an origin, look-up by the names sources use, files that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_jax.errors import ConfigError, FormatError
from strata_jax.memory.strata.request import MIB
from strata_jax.sim.fit import fitted_rows
from strata_jax.sim.os_effects import spill_bytes, spill_ms
from strata_jax.sim.profile import (
    borrowed_profile,
    common_numbers,
    load_profile,
    profile_for_gpu,
    profile_names,
    read_profile,
)
from strata_jax.sim.profile_file import MARKS, UNITS, Number, profile_yaml

NAMES = {
    "h200", "rtx3070ti", "rtx3090", "rtx4070tis_16gb", "rtx4080s_32gb", "rtx4090", "rtx5060ti", "rtx5070", "rtx5090",
    "rtx5090_as_16gb", "rtx_pro_2000_8gb",
}  # fmt: skip


def test_every_number_of_every_profile_has_a_unit_a_mark_and_a_source() -> None:
    assert set(profile_names()) == NAMES
    for name in profile_names():
        profile = load_profile(name)
        assert set(profile.numbers) == set(UNITS)
        for row in profile.describe():
            assert row["mark"] in MARKS, row
            assert row["unit"] == UNITS[row["number"]]
            assert row["source"]
            assert row["mark"] != "fitted" or (row["rows"] and row["error_pct"] is not None) or "mib" in row["number"]


def test_cards_without_a_fit_are_marked() -> None:
    uncalibrated = {name for name in NAMES if not load_profile(name).calibrated}
    assert uncalibrated == {"h200", "rtx4090"}
    assert load_profile("rtx4090").numbers["copy_share"].mark == "default"
    assert load_profile("rtx3090").numbers["copy_share"].mark == "fitted"


def test_a_card_that_stands_for_a_smaller_one_shares_its_numbers() -> None:
    small, large = load_profile("rtx5090_as_16gb"), load_profile("rtx5090")
    assert small.calibrated
    assert small.fit_name == "rtx5090"
    assert small.values == large.values


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA GeForce RTX 3070 Ti", "rtx3070ti"),
        ("NVIDIA RTX PRO 2000 Blackwell Laptop GPU", "rtx_pro_2000_8gb"),
        ("RTX 5090 emulating a 16 GB card", "rtx5090_as_16gb"),
        ("RTX 5090", "rtx5090"),
        ("RTX 4070 Ti SUPER 16 GiB", "rtx4070tis_16gb"),
        ("RTX 4080 SUPER 32 GB", "rtx4080s_32gb"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_profiles_are_found_by_the_names_that_sources_use(gpu: str, name: str) -> None:
    found = profile_for_gpu(gpu)
    assert found is not None
    assert found.name == name


def test_a_card_without_a_profile_borrows_one_only_marked() -> None:
    """M01: a borrowed profile is never taken for the card's own."""
    assert profile_for_gpu("NVIDIA GeForce RTX 9999") is None
    assert profile_for_gpu("RTX 4080") is None  # the profile is for another memory size of it
    borrowed = borrowed_profile("RTX 9999", load_profile("rtx3090"))
    assert not borrowed.calibrated
    assert "RTX 9999 has no profile" in borrowed.notes[0]
    with pytest.raises(ConfigError, match="did you mean rtx3090"):
        load_profile("rtx309")


def test_given_values_replace_numbers_and_say_so() -> None:
    profile = load_profile("rtx3090")
    changed = profile.with_values("given in the settings", "published", pcie_gb_s=12.0, hbm_gb_s=None)
    assert (changed["pcie_gb_s"], changed["hbm_gb_s"]) == (12.0, profile["hbm_gb_s"])
    assert changed.numbers["pcie_gb_s"].source == "given in the settings"
    with pytest.raises(ConfigError, match="no number of a profile"):
        profile.with_values(pcie_gbs=12.0)


def test_the_card_of_a_profile() -> None:
    profile = load_profile("rtx_pro_2000_8gb")
    card = profile.card()
    assert card.vram_bytes == 8151 * MIB
    assert card.late_bytes == 303 * MIB
    assert card.pinned_share == 0.0
    assert card.os == "windows"
    assert card.ram_available_bytes == card.ram_bytes - 4096 * MIB
    other = profile.card(
        vram_mib=4096, taken_mib=100, ram_mib=2048, ram_available_mib=1024, pinned_share=1.0, os="linux"
    )
    assert (other.vram_bytes, other.taken_bytes, other.ram_available_bytes) == (4096 * MIB, 100 * MIB, 1024 * MIB)
    assert (other.pinned_share, other.os) == (1.0, "linux")


def test_a_written_profile_reads_back(tmp_path: Path) -> None:
    numbers = {
        "pcie_gb_s": Number(12.5, "GB/s", "measured", "a, b: c's {d}", ("row-1", "row-2")),
        "copy_share": Number(0.9, "share", "fitted", "plain", ("row-1", "row-2"), 1.25),
    }
    texts = {
        "name": "mine",
        "title": "A card, 8 GB",
        "like": "rtx4090",
        "gpus": ["RTX 1"],
        "cpu": "9",
        "calibrated": True,
    }
    path = tmp_path / "mine.yaml"
    path.write_text(profile_yaml(texts, numbers, "first line\nsecond"), encoding="utf-8")
    profile = read_profile(path)
    assert profile.title == "A card, 8 GB"
    assert profile.cpu == "9"
    assert profile.numbers["pcie_gb_s"] == numbers["pcie_gb_s"]
    assert profile.numbers["copy_share"] == numbers["copy_share"]
    assert profile.numbers["row_ms"] == common_numbers()["row_ms"]


GOOD = "name: x\ntitle: x\nlike: rtx4090\ncalibrated: false\nnumbers: {}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a profile is a mapping"),
        (": :\n  -", "no YAML"),
        (GOOD + "speed: 3\n", "unknown entries"),
        ("name: x\ntitle: x\nnumbers: {}\n", "are missing"),
        ("name: x\ntitle: x\nos: linux\ncalibrated: false\nnumbers: {}\n", "neither it nor common.yaml"),
        (GOOD.replace("{}", "{pcie_gbs: {value: 1, mark: default, source: s}}"), "did you mean pcie_gb_s"),
        (GOOD.replace("{}", "{pcie_gb_s: {value: -1, mark: default, source: s}}"), "a number from 0 on"),
        (GOOD.replace("{}", "{pcie_gb_s: {value: .nan, mark: default, source: s}}"), "a number from 0 on"),
        (GOOD.replace("{}", "{pcie_gb_s: {value: 1, mark: guess, source: s}}"), "marks: datasheet"),
        (GOOD.replace("{}", "{pcie_gb_s: {value: 1, mark: default}}"), "needs value, mark and source"),
        (GOOD.replace("{}", "{pcie_gb_s: {value: 1, unit: MB/s, mark: default, source: s}}"), "must be in GB/s"),
        (GOOD.replace("false", "true"), "none of copy_share"),
    ],
)
def test_wrong_files_are_refused_with_the_entry(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=message):
        read_profile(path)


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline=calibrate writes one"):
        read_profile(tmp_path / "none.yaml")


def test_rows_that_numbers_were_fitted_on_are_known() -> None:
    rows = fitted_rows()
    assert "h3070ti-b1-a-16384.speed" in rows
    assert "alias-head-load" in rows  # a published number that is put in is no prediction either
    assert "h3070ti-b9-c-16384.speed" not in rows


def test_a_driver_that_pages_moves_memory_out_and_no_other_does() -> None:
    profile = load_profile("rtx3070ti")
    assert spill_bytes(False, -100 * MIB) == 0
    assert spill_bytes(True, 300 * MIB) == 0
    assert spill_bytes(True, -100 * MIB) == 356 * MIB
    assert spill_ms(profile, 0) == 0
    assert spill_ms(profile, 356 * MIB) == pytest.approx(356 * MIB / (25e9 * profile["copy_share"]) * 1e3)
