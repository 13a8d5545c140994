"""Vectors as the expert kernels read them: whole numbers, four bytes a word, quad by quad, items side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.kernels.expert_gemv.layout import ExpertLayout
from strata_jax.kernels.planes import ITEM
from strata_jax.kernels.planes.quads import LIMBS, QUADS, PackedItems, pack_vector, quad_order

Ref = Any


@dataclass(frozen=True, slots=True)
class VectorRows:
    """Rows of a packed vector u32[count, items]: the quads of each limb for each order, then scales and sums (f32)."""

    orders: tuple[str, ...]

    def quads(self, order: str) -> range:
        """Rows of all quads, limb by limb."""
        size = LIMBS * QUADS
        first = self.orders.index(order) * size
        return range(first, first + size)

    @property
    def scale(self) -> int:
        return len(self.orders) * LIMBS * QUADS

    @property
    def sum(self) -> int:
        return self.scale + 1

    @property
    def count(self) -> int:
        return self.scale + 2


def input_rows(layout: ExpertLayout) -> VectorRows:
    """Return the rows of a token's vector: gate and up may want other orders."""
    return VectorRows(tuple(dict.fromkeys(quad_order(part.type_name) for part in (layout.gate, layout.up))))


def down_rows(layout: ExpertLayout) -> VectorRows:
    """Return the rows of an expert's hidden vector."""
    return VectorRows((quad_order(layout.down.type_name),))


def pack_input(u: jax.Array, rows: VectorRows) -> jax.Array:
    """Pack vectors ``u: f32[T, E]``: u32[T, rows.count, E / 32]."""
    packed = pack_vector(u.reshape(u.shape[0], -1, ITEM), rows.orders)
    quads = [words.swapaxes(1, 2) for words in packed.words]
    floats = [jax.lax.bitcast_convert_type(value, jnp.uint32)[:, None] for value in (packed.scale, packed.sum)]
    return jnp.concatenate([*quads, *floats], axis=1)


def pack_rows(ref: Ref, vector: jax.Array, first_item: int | jax.Array, packed: PackedItems, rows: VectorRows) -> None:
    """Store some items of a vector, inside a kernel, into ``ref: u32[., rows.count, items]``."""
    items = first_item + jnp.arange(packed.scale.shape[0], dtype=jnp.int32)
    quads = jnp.arange(QUADS, dtype=jnp.int32)
    for i, words in enumerate(packed.words):
        ref[vector, i * QUADS + quads[None, :], items[:, None]] = words
    for row, value in ((rows.scale, packed.scale), (rows.sum, packed.sum)):
        ref[vector, row, items] = jax.lax.bitcast_convert_type(value, jnp.uint32)
