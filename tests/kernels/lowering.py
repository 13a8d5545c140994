"""Lowering of GPU kernels on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest


def lower_for_cuda(fn: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> str:
    """Return the program text of ``fn`` lowered for an H200; skip the test where this jax cannot without a GPU."""
    traced = jax.jit(fn).trace(*args)
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
    except ImportError:  # before 0.11 lowering asks for no device
        return traced.lower(lowering_platforms=("cuda",)).as_text()
    try:
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    except TypeError:
        pytest.skip(f"jax {jax.__version__} describes no GPU that is not there")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
