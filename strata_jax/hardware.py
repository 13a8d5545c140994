"""Describe the machine this runs on: memory within the container's limit, cores, and the GPU before JAX starts.

The functions that decide take their inputs as arguments; those that look at the system are separate.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from strata_jax.config.contradictions import VRAM_RESERVE_MIB
from strata_jax.config.schema import HardwareConfig
from strata_jax.errors import ConfigError

MIB = 2**20
GIB = 2**30

RAM_RESERVE_MAX_BYTES = 4864 * MIB  # 4.75 GiB: 4 GiB for resident expert copies' headroom, 768 MiB for the process
CGROUP_V1_UNLIMITED = 2**60  # cgroup v1 writes a page-rounded 2^63 for "no limit"
# per limit file: the file with the bytes in use, and the part of them in memory.stat that is given back on demand
CGROUP_USE = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
NVIDIA_SMI_TIMEOUT_S = 20
# Distributions that let JAX use an NVIDIA GPU; their modules are looked up, not imported.
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine to plan for, in bytes. `vram_bytes` is None on the CPU, unless a size was given."""

    name: str
    os: str
    cpu: str
    cores: int
    ram_bytes: int
    ram_reserve_bytes: int
    ram_source: str
    gpu: Gpu | None
    vram_bytes: int | None
    vram_reserve_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def ram_budget_bytes(self) -> int:
        """RAM that experts and conversations may take."""
        return max(0, self.ram_bytes - self.ram_reserve_bytes)

    @property
    def vram_budget_bytes(self) -> int | None:
        """Device memory that JAX may take, or None without a device memory of its own."""
        return None if self.vram_bytes is None else max(0, self.vram_bytes - self.vram_reserve_bytes)


def ram_within_limit(host_bytes: int, cgroup_bytes: int | None) -> tuple[int, str]:
    """Return the memory this process can have and where the number comes from: the host or a smaller cgroup limit."""
    if cgroup_bytes is not None and cgroup_bytes < host_bytes:
        return cgroup_bytes, f"cgroup limit (the host has {host_bytes / GIB:,.2f} GiB)"
    return host_bytes, "host memory"


def ram_reserve(ram_bytes: int) -> int:
    """Return the RAM to leave free when nothing is given: a quarter of it, 4,864 MiB at most."""
    return min(ram_bytes // 4, RAM_RESERVE_MAX_BYTES)


def resolve_hardware(config: HardwareConfig, machine: Hardware) -> Hardware:
    """Return `machine` with the given settings in place of what was found; ConfigError for more than there is."""
    ram_bytes, ram_source = machine.ram_bytes, machine.ram_source
    notes = list(machine.notes)
    if isinstance(config.ram_mib, int):
        if config.ram_mib * MIB > machine.ram_bytes:
            raise ConfigError(
                f"hardware.ram_mib={config.ram_mib:,}: this machine has {machine.ram_bytes // MIB:,} MiB"
                f" ({machine.ram_source}). Give at most that, or auto."
            )
        ram_bytes, ram_source = config.ram_mib * MIB, "given"
    given_reserve = config.ram_reserve_mib
    ram_reserve_bytes = given_reserve * MIB if isinstance(given_reserve, int) else ram_reserve(ram_bytes)
    if ram_reserve_bytes >= ram_bytes:
        raise ConfigError(
            f"hardware.ram_reserve_mib={ram_reserve_bytes // MIB:,}: there are {ram_bytes // MIB:,} MiB of RAM"
            f" ({ram_source}), so nothing is left. Lower the reserve."
        )
    vram_bytes = machine.vram_bytes
    if isinstance(config.vram_mib, int):
        if machine.gpu is not None and config.vram_mib * MIB > machine.gpu.total_bytes:
            raise ConfigError(
                f"hardware.vram_mib={config.vram_mib:,}: {machine.gpu.name} has {machine.gpu.total_bytes // MIB:,} MiB."
                " A card can stand in for a smaller one only."
            )
        vram_bytes = config.vram_mib * MIB
    reserve_mib = config.vram_reserve_mib if isinstance(config.vram_reserve_mib, int) else VRAM_RESERVE_MIB
    reserve_bytes = reserve_mib * MIB
    if vram_bytes is not None and reserve_bytes >= vram_bytes:
        raise ConfigError(
            f"hardware.vram_reserve_mib={reserve_mib:,}: the device has {vram_bytes // MIB:,} MiB, so"
            " nothing"
            " is left. Lower the reserve."
        )
    if vram_bytes is not None and machine.gpu is not None and vram_bytes - reserve_bytes > machine.gpu.free_bytes:
        notes.append(
            f"other programs hold device memory: {machine.gpu.free_bytes // MIB:,} MiB are free,"
            f" {(vram_bytes - reserve_bytes) // MIB:,} MiB are planned with"
        )
    return Hardware(
        name=config.name,
        os=machine.os,
        cpu=machine.cpu,
        cores=config.cores if isinstance(config.cores, int) else machine.cores,
        ram_bytes=ram_bytes,
        ram_reserve_bytes=ram_reserve_bytes,
        ram_source=ram_source,
        gpu=machine.gpu,
        vram_bytes=vram_bytes,
        vram_reserve_bytes=reserve_bytes,
        notes=tuple(notes),
    )


def describe_local(*, look_for_gpu: bool = True) -> Hardware:
    """Return what this machine has. `look_for_gpu=False` skips the driver, for runs that compute on the CPU."""
    ram_bytes, source = ram_within_limit(psutil.virtual_memory().total, cgroup_limit_bytes())
    notes = [f"a {source} of {ram_bytes / GIB:,.2f} GiB is in effect"] if source.startswith("cgroup") else []
    gpu = first_gpu() if look_for_gpu else None
    if gpu is not None and not has_cuda_plugin():
        notes.append(
            f'{gpu.name} is here, but JAX is installed without CUDA: pip install -e ".[cuda13]" (or cuda12) to use it'
        )
        gpu = None
    return Hardware(
        name="local",
        os=platform.system(),
        cpu=cpu_model(),
        cores=usable_cores(),
        ram_bytes=ram_bytes,
        ram_reserve_bytes=ram_reserve(ram_bytes),
        ram_source=source,
        gpu=gpu,
        vram_bytes=gpu.total_bytes if gpu else None,
        vram_reserve_bytes=0,
        notes=tuple(notes),
    )


def usable_cores() -> int:
    """Return the CPU cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the CPU."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cgroup_limit_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the smallest memory limit of this process's cgroup and those above it (v2 and v1), or None without one."""
    return min((limit for _, _, limit in _cgroup_limits(root, own)), default=None)


def available_ram_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup"), host_bytes: int | None = None
) -> int | None:
    """Return the RAM that can be had now: the host's, or what a memory limit of a cgroup leaves; None if not known.

    Page cache that the kernel gives back on demand counts as available, as it does in the host's own number.
    """
    try:
        rooms = [psutil.virtual_memory().available if host_bytes is None else host_bytes]
        for folder, limit_file, limit in _cgroup_limits(root, own):
            use_file, cache_key = CGROUP_USE[limit_file]
            used = int((folder / use_file).read_text(encoding="utf-8"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
            rooms.append(limit - max(0, used - int(stat[cache_key])))
    except (OSError, ValueError, KeyError, RuntimeError, psutil.Error):
        return None
    return max(0, min(rooms))


def first_gpu() -> Gpu | None:
    """Return the first GPU that CUDA would use, asked from nvidia-smi, or None."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return None
    which = visible.split(",")[0].strip() if visible else "0"
    query = ["nvidia-smi", "-i", which, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_gpu(done.stdout) if done.returncode == 0 else None


def parse_gpu(line: str) -> Gpu | None:
    """Return the GPU in a line `name, total MiB, free MiB`, or None if it is not such a line."""
    parts = [part.strip() for part in line.strip().splitlines()[0].rsplit(",", 2)] if line.strip() else []
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return Gpu(parts[0], int(parts[1]) * MIB, int(parts[2]) * MIB)


def has_cuda_plugin() -> bool:
    """Say whether JAX can use an NVIDIA GPU, without importing it."""
    return any(importlib.util.find_spec(name) is not None for name in CUDA_PLUGINS)


def _cgroup_places(root: Path, own: Path) -> list[tuple[Path, str, str]]:
    """Return (mount, path inside it, name of the limit file) for the memory controllers this process is under."""
    places = [(root, "/", "memory.max"), (root / "memory", "/", "memory.limit_in_bytes")]
    if own.is_file():
        for line in own.read_text(encoding="utf-8").splitlines():
            hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
            if hierarchy == "0" and not controllers:
                places.append((root, path, "memory.max"))
            elif "memory" in controllers.split(","):
                places.append((root / "memory", path, "memory.limit_in_bytes"))
    return places


def _cgroup_limits(root: Path, own: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield (folder, name of the limit file, bytes) of every memory limit of this process's cgroup and those above."""
    for mount, path, file_name in _cgroup_places(root, own):
        place = mount / path.lstrip("/")
        while True:
            for limit in _read_limit(place / file_name):
                yield place, file_name, limit
            if place == mount or mount not in place.parents:
                break
            place = place.parent


def _read_limit(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and 0 < int(text) < CGROUP_V1_UNLIMITED else []
