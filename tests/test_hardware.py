"""The local machine: memory within the container's limit, the GPU's line, and given values in place of found ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_jax.config import HardwareConfig
from strata_jax.errors import ConfigError
from strata_jax.hardware import (
    GIB,
    MIB,
    Gpu,
    Hardware,
    available_ram_bytes,
    cgroup_limit_bytes,
    describe_local,
    parse_gpu,
    ram_reserve,
    ram_within_limit,
    resolve_hardware,
)

CARD = Gpu("Some GPU", 8151 * MIB, 8000 * MIB)


def machine(ram_gib: int = 64, gpu: Gpu | None = None) -> Hardware:
    """Return a machine as `describe_local` would."""
    ram_bytes = ram_gib * GIB
    vram_bytes = gpu.total_bytes if gpu else None
    return Hardware("local", "Linux", "cpu", 2, ram_bytes, ram_reserve(ram_bytes), "host memory", gpu, vram_bytes, 0)


def test_P22_ram_budget_is_the_smaller_of_host_and_cgroup() -> None:
    seen_bytes, source = ram_within_limit(256 * GIB, 32 * GIB)
    assert seen_bytes == 32 * GIB
    assert "cgroup limit" in source
    assert "256.00 GiB" in source
    assert seen_bytes - ram_reserve(seen_bytes) <= int(27.25 * GIB)
    assert ram_within_limit(16 * GIB, 32 * GIB) == (16 * GIB, "host memory")
    assert ram_within_limit(16 * GIB, None) == (16 * GIB, "host memory")


def test_P22_a_cgroup_limit_in_effect_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_jax.hardware.cgroup_limit_bytes", lambda: 3 * GIB // 2)
    found = describe_local(look_for_gpu=False)
    assert found.ram_bytes == 3 * GIB // 2
    assert any("cgroup limit" in note for note in found.notes)


def test_P22_the_limit_is_the_smallest_one_on_the_way_to_the_root(tmp_path: Path) -> None:
    inner = tmp_path / "cg" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n", encoding="utf-8")
    (inner.parent / "memory.max").write_text(f"{5 * GIB}\n", encoding="utf-8")
    (tmp_path / "cg" / "memory.max").write_text(f"{9 * GIB}\n", encoding="utf-8")
    own = tmp_path / "self"
    own.write_text("0::/outer/inner\n", encoding="utf-8")
    assert cgroup_limit_bytes(tmp_path / "cg", own) == 5 * GIB


def test_cgroup_v1_limit_and_its_word_for_none(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    own = tmp_path / "self"
    own.write_text("9:cpu,memory:/job\n", encoding="utf-8")
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712", encoding="utf-8")
    assert cgroup_limit_bytes(tmp_path, own) is None
    (folder / "memory.limit_in_bytes").write_text(str(GIB), encoding="utf-8")
    assert cgroup_limit_bytes(tmp_path, own) == GIB
    assert cgroup_limit_bytes(tmp_path / "nowhere", tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 50 * GIB),
        ({"memory.max": "max"}, 50 * GIB),
        # cache that is given back on demand is available
        (
            {"memory.max": str(8 * GIB), "memory.current": str(6 * GIB), "memory.stat": f"anon 5\ninactive_file {GIB}"},
            3 * GIB,
        ),
        ({"memory.max": str(8 * GIB), "memory.current": str(9 * GIB), "memory.stat": "inactive_file 0"}, 0),
        ({"memory.max": str(80 * GIB), "memory.current": "0", "memory.stat": "inactive_file 0"}, 50 * GIB),
        # a limit without a known use: nothing is known
        ({"memory.max": str(8 * GIB)}, None),
        ({"memory.max": str(8 * GIB), "memory.current": "5", "memory.stat": "anon 5"}, None),
    ],
)
def test_available_ram_is_what_the_host_and_every_limit_leave(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    folder = tmp_path / "jobs" / "mine"
    folder.mkdir(parents=True)
    own = tmp_path / "self"
    own.write_text("0::/jobs/mine\n", encoding="utf-8")
    for name, text in files.items():
        (folder.parent / name).write_text(text, encoding="utf-8")  # a limit of the cgroup above counts
    assert available_ram_bytes(tmp_path, own, 50 * GIB) == expected


def test_available_ram_under_cgroup_v1(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    for name, text in (("limit_in_bytes", str(4 * GIB)), ("usage_in_bytes", str(3 * GIB))):
        (folder / f"memory.{name}").write_text(text, encoding="utf-8")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n", encoding="utf-8")
    assert available_ram_bytes(tmp_path, tmp_path / "nothing", 50 * GIB) == 3 * GIB


def test_this_machine_can_be_described() -> None:
    found = describe_local(look_for_gpu=False)
    assert found.cores >= 1
    assert 0 < found.ram_budget_bytes < found.ram_bytes
    assert found.vram_budget_bytes is None


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("NVIDIA H200, 143771, 143160\n", Gpu("NVIDIA H200", 143771 * MIB, 143160 * MIB)),
        ("A, B, 24576, 1\nC, 2, 3\n", Gpu("A, B", 24576 * MIB, MIB)),
        ("No devices were found", None),
        ("GPU, [N/A], [N/A]", None),
        ("", None),
    ],
)
def test_the_driver_line_is_read(line: str, gpu: Gpu | None) -> None:
    assert parse_gpu(line) == gpu


def test_given_values_take_the_place_of_found_ones() -> None:
    found = resolve_hardware(
        HardwareConfig(vram_mib=4096, ram_mib=2048, ram_reserve_mib=48, cores=7), machine(gpu=CARD)
    )
    assert (found.vram_bytes, found.vram_budget_bytes) == (4096 * MIB, 3396 * MIB)
    assert (found.ram_bytes, found.ram_budget_bytes, found.cores) == (2048 * MIB, 2000 * MIB, 7)


def test_memory_that_other_programs_hold_is_noted() -> None:
    card = Gpu("Some GPU", 8151 * MIB, 5000 * MIB)
    assert "5,000 MiB are free" in resolve_hardware(HardwareConfig(), machine(gpu=card)).notes[-1]
    assert resolve_hardware(HardwareConfig(), machine(gpu=CARD)).notes == ()


@pytest.mark.parametrize(
    ("config", "must_say"),
    [
        (HardwareConfig(vram_mib=9000), ["hardware.vram_mib=9,000", "8,151 MiB"]),
        (HardwareConfig(vram_reserve_mib=8151), ["hardware.vram_reserve_mib=8,151", "8,151 MiB"]),
        (HardwareConfig(ram_mib=100_000), ["hardware.ram_mib=100,000", "65,536 MiB"]),
        (HardwareConfig(ram_reserve_mib=65_536), ["hardware.ram_reserve_mib=65,536", "65,536 MiB"]),
    ],
)
def test_more_than_the_machine_has_is_refused(config: HardwareConfig, must_say: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_hardware(config, machine(gpu=CARD))
    assert [words for words in must_say if words not in str(caught.value)] == []
