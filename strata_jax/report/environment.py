"""What a run ran on: versions, devices, git state and the variables that steer JAX.

JAX is asked for its devices only if it has been imported already; its version comes from the package metadata.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from strata_jax.hardware import cpu_model, usable_cores

PACKAGES = (
    "strata-jax",
    "jax",
    "jaxlib",
    "numpy",
    "gguf",
    "tokenizers",
    "jinja2",
    "hydra-core",
    "omegaconf",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)
VARIABLE_PREFIXES = ("JAX_", "XLA_", "CUDA_", "NVIDIA_VISIBLE", "TF_GPU_", "OMP_", "STRATA_")
REPOSITORY = Path(__file__).resolve().parents[2]


def describe_environment(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return everything for environment.json."""
    return {
        "schema_version": 1,
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "device": describe_jax(),
        "git": describe_git(REPOSITORY),
        "variables": {k: v for k, v in sorted(variables.items()) if k.startswith(VARIABLE_PREFIXES)},
        "command": sys.argv,
    }


@cache
def package_version(name: str) -> str | None:
    """Return the installed version of a distribution without importing it, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def describe_jax() -> dict[str, Any] | None:
    """Return JAX's backend and devices if JAX runs in this process, else None."""
    jax = sys.modules.get("jax")
    bridge = sys.modules.get("jax._src.xla_bridge")
    if jax is None or bridge is None or not getattr(bridge, "_backends", None):
        return None  # asking would start a backend
    devices = jax.devices()
    return {
        "platform": jax.default_backend(),
        "kind": devices[0].device_kind,
        "count": len(devices),
        "memory_stats": devices[0].memory_stats(),
    }


@cache  # a sweep asks for it twice a job
def describe_git(directory: Path) -> dict[str, Any] | None:
    """Return {commit, dirty} of the repository at `directory`, or None where there is none."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(git("status", "--porcelain"))}
