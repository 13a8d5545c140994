"""How every Pallas-Triton kernel here is started: operands stay where they are, and the kernel indexes them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

_ANY = pl.BlockSpec(memory_space=pl.ANY)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    out: jax.ShapeDtypeStruct,
    num_warps: int,
    *,
    in_place: bool = False,
    interpret: bool = False,
) -> Callable[..., jax.Array]:
    """Return ``kernel`` as a call; ``in_place``: its last operand becomes its result."""

    def call(*operands: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[_ANY] * len(operands),
            out_specs=_ANY,
            out_shape=out,
            input_output_aliases={len(operands) - 1: 0} if in_place else {},
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
        )(*operands)

    return call
