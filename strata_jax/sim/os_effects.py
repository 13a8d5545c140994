"""What an operating system does when device memory runs out.

Windows (WDDM) does not refuse: it moves device memory of somebody to host memory, and what was moved is then read over
PCIe. Off by default and in reproductions, where the published rows with nothing free scale smoothly.
"""

from __future__ import annotations

from strata_jax.memory.ledger import MIB
from strata_jax.sim.prefill_cost import MS_PER_GB_S
from strata_jax.sim.profile import Profile

SAFE_BYTES = 256 * MIB  # the engine's own final check, planning notes 2.3


def spill_bytes(pages: bool, free_bytes: int) -> int:
    """Return the bytes that a driver which pages device memory moves out so that `SAFE_BYTES` stay free; else 0.

    pages: as `StrataRequest.spills_on` says. free_bytes: free device memory, negative when more is allocated than there
    is.
    """
    return max(0, SAFE_BYTES - free_bytes) if pages else 0


def spill_ms(profile: Profile, num_bytes: int) -> float:
    """Return what one pass over all weights pays for `num_bytes` that lie in host memory: they come over PCIe."""
    return num_bytes * MS_PER_GB_S / (profile["pcie_gb_s"] * profile["copy_share"])
