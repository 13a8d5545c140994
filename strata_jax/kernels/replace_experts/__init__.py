"""Which residents of a block leave for experts that a window reads anyway, on the device: tables and values in place.

The rule is that of `strata_jax/policies/replacement.py`, one block at a time. Shapes: L' blocks, X experts, S slots, M
experts of a window at most.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.kernels.backend import on_backend
from strata_jax.kernels.form import form
from strata_jax.kernels.replace_experts import reference
from strata_jax.kernels.replace_experts.tables import Replaced, ResidentTables

__all__ = ["Replaced", "ResidentTables", "replace_experts"]


def replace_experts(
    tables: ResidentTables,
    layer: jax.Array,
    uses: jax.Array,
    slot_page: jax.Array,
    *,
    decay: float,
    max_fetches: int,
    backend: str | None = None,
    interpret: bool = False,
) -> Replaced:
    """Count a window's uses and give slots of a block to what it misses.

    Args:
        layer: i32[1], which block.
        uses: i32[X], how many tokens of the window ask for each expert.
        slot_page: i32[S], the first page of each slot.
        decay: factor of all counts before the window's are added: 0 to 1. A window without a use changes nothing.
        max_fetches: M, 1 to X.
        backend: ``"reference"`` or ``"triton"``; None = Triton on CUDA, the reference elsewhere.
        interpret: run the Triton kernel in Pallas' interpreter, on any device.

    Raises:
        ValueError: shapes, types or numbers do not fit, or `backend` is unknown.
    """
    num_experts = tables.slot_of.shape[1]
    for name, array, shape in (("layer", layer, (1,)), ("uses", uses, (num_experts,))):
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} is i32{list(shape)}, got {form(array)}")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay:g}: must be from 0 to 1")
    if not 1 <= max_fetches <= num_experts:
        raise ValueError(f"max_fetches={max_fetches}: must be from 1 to the {num_experts} experts of a block")

    def on_triton(tables: ResidentTables, uses: jax.Array, slot_page: jax.Array) -> Replaced:
        from strata_jax.kernels.replace_experts import triton

        return triton.replace_experts(tables, layer, uses, slot_page, decay, max_fetches, interpret=interpret)

    def in_jnp(tables: ResidentTables, uses: jax.Array, slot_page: jax.Array) -> Replaced:
        return reference.replace_experts(tables, layer, uses, slot_page, decay, max_fetches)

    return on_backend(backend, on_triton, in_jnp, tables, uses, slot_page)
