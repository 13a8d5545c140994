"""What an operating system does when device memory runs out.

Windows (WDDM) does not refuse: it moves device memory of somebody to host memory, and what was moved is then read over
PCIe. Off by default and in reproductions, where the published rows with nothing free scale smoothly; the warning is
always given.
"""

from __future__ import annotations

from strata_jax.sim.prefill_cost import MS_PER_GB_S
from strata_jax.sim.profile import Profile

MIB = 2**20
SAFE_BYTES = 256 * MIB  # the engine's own final check, planning notes 2.3


def spill_bytes(os: str, free_bytes: int) -> int:
    """Return the bytes that Windows would move out so that `SAFE_BYTES` stay free; 0 on other systems.

    free_bytes: free device memory, negative when more is allocated than there is.
    """
    return max(0, SAFE_BYTES - free_bytes) if os == "windows" else 0


def spill_warning(os: str, free_bytes: int, when: str) -> str | None:
    """Return what to tell the user when device memory is nearly full, or None. when: e.g. `while decoding`."""
    if free_bytes >= SAFE_BYTES:
        return None
    free = f"{max(0, free_bytes) // MIB:,} MiB of device memory are free {when}"
    if os == "windows":
        return f"{free}: below {SAFE_BYTES // MIB} MiB Windows may move device memory to RAM, which is slow"
    if free_bytes < 0:
        return f"{free}: {-free_bytes // MIB + 1:,} MiB more are allocated than there are; the allocation would fail"
    return None


def spill_ms(profile: Profile, num_bytes: int) -> float:
    """Return what one pass over all weights pays for `num_bytes` that lie in host memory: they come over PCIe."""
    return num_bytes * MS_PER_GB_S / (profile["pcie_gb_s"] * profile["copy_share"])
