"""How every Pallas-Triton kernel here is started: operands stay where they are, and the kernel indexes them itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxlib.triton import dialect as triton_dialect

# MLIR's bindings look for a module of a dialect's name whenever an operation is made, and for Triton's there is none
# under that name: failing took two thirds of lowering (jaxlib 0.11.2, 0.12.0.1).
sys.modules.setdefault("jaxlib.mlir.dialects.tt", triton_dialect)

_ANY = pl.BlockSpec(memory_space=pl.ANY)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    out: Any,
    num_warps: int,
    *,
    in_place: int = 0,
    name: str | None = None,
    interpret: bool = False,
) -> Callable[..., Any]:
    """Return ``kernel`` as a call.

    Args:
        out: one `jax.ShapeDtypeStruct`, or a tuple of them for as many results.
        in_place: so many of its last operands become its first results.
        name: what profiles call it; None = as the function.
    """

    def call(*operands: jax.Array) -> Any:
        first = len(operands) - in_place
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[_ANY] * len(operands),
            out_specs=jax.tree.map(lambda _: _ANY, out),
            out_shape=out,
            input_output_aliases={first + i: i for i in range(in_place)},
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(*operands)

    return call
