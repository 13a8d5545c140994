"""Products of a few vectors with items of planes inside a Triton kernel: of floats, or of whole numbers.

Whole numbers (``planes/quads.py``) take fewer instructions, but vectors have to be packed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv.vectors import VectorRows
from strata_jax.kernels.instructions import multiply_add, quad_ops
from strata_jax.kernels.planes import PlaneLayout, decode_offset, decode_scales, fields_of
from strata_jax.kernels.planes.quads import LIMBS, QUADS, Ops, decode_quads, quad_order, quad_positions

Ref = Any
_WHOLE = 2**23
WHOLE_BITS = np.float32(_WHOLE).view(np.uint32)
"""An operand, not a constant: an instruction has room for one constant, and would need another to bring in this one."""


def add_items(
    fields: Mapping[str, tuple[jax.Array, ...]],
    type_name: str,
    table: Ref,
    whole: jax.Array,
    value: Callable[[int, int], jax.Array],
    inside: jax.Array | None,
    totals: tuple[jax.Array, ...],
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Add the products of J items to ``totals: f32[J, ...]`` of each token, in float32; an item is scaled once.

    Args:
        fields: [J, ...], of the items, as `load_fields` gives them.
        table: the codebook. whole: u32[], `WHOLE_BITS`.
        value: position s of the items of token t, f32[J, 1 ...].
        inside: which items there are, bool[J, 1 ...]; None: all.
    """
    fma = partial(multiply_add, interpret=interpret)
    scales, offset = decode_scales(fields, type_name), decode_offset(fields, type_name)
    if inside is not None:  # items past the last are copies of it
        scales = tuple(jnp.where(inside, scale, 0.0) for scale in scales)
        offset = None if offset is None else jnp.where(inside, offset, 0.0)
    ops = quad_ops(interpret)
    quads = decode_quads(fields, type_name, partial(_look_up, table), ops)
    positions, per_scale = quad_positions(quad_order(type_name)), len(quads) // len(scales)
    found, sums, group = list(totals), dict[int, jax.Array](), dict[int, jax.Array]()
    for i, quad in enumerate(quads):
        for byte, code in enumerate(_quad_codes(quad, whole, ops)):
            for t in range(len(totals)):
                x = value(t, positions[i][byte])
                if offset is not None:
                    sums[t] = sums[t] + x if t in sums else x
                group[t] = fma(code, x, group[t]) if t in group else code * x
        if (i + 1) % per_scale == 0:
            found = [fma(group.pop(t), scales[i // per_scale], total) for t, total in enumerate(found)]
    if offset is not None:
        found = [fma(offset, sums[t], total) for t, total in enumerate(found)]
    return tuple(found)


def _quad_codes(quad: jax.Array, whole: jax.Array, ops: Ops) -> Iterator[jax.Array]:
    """Yield the four signed bytes of a quad as f32.

    A whole number in the last bits of the float 2^23 is that float plus the number: one instruction puts it there, one
    subtracts; shifting, masking and converting would take more.
    """
    unsigned, high = quad ^ np.uint32(0x80808080), jnp.broadcast_to(whole, quad.shape)
    for byte in range(4):
        bits = ops.permute(unsigned, high, jnp.full(quad.shape, 0x7440 + byte, jnp.uint32))
        yield jax.lax.bitcast_convert_type(bits, jnp.float32) - np.float32(_WHOLE + 128)


@dataclass(frozen=True)
class ItemTile:
    """Some items of some rows, decoded: quads u32[J, R], scales and offset f32[J, R]."""

    order: str
    quads: tuple[jax.Array, ...]
    scales: tuple[jax.Array, ...]
    offset: jax.Array | None


def decode_items(
    layout: PlaneLayout, table: Ref, words: Sequence[jax.Array], items: jax.Array, interpret: bool
) -> ItemTile:
    """Decode items i32[J] from their `raw_words`. table: the codebook."""
    name, fields = layout.type_name, fields_of(words, layout, items)
    quads = decode_quads(fields, name, partial(_look_up, table), quad_ops(interpret))
    return ItemTile(quad_order(name), quads, decode_scales(fields, name), decode_offset(fields, name))


def item_products(
    tiles: Sequence[ItemTile], x: Callable[[int], jax.Array], rows: VectorRows, interpret: bool
) -> list[jax.Array]:
    """Multiply each tile by one vector's items: f32[J, R]."""
    ops = quad_ops(interpret)
    fma = partial(multiply_add, interpret=interpret)

    def as_float(row: int) -> jax.Array:
        return jax.lax.bitcast_convert_type(x(row), jnp.float32)

    products = []
    loaded = {order: [x(row) for row in rows.quads(order)] for order in dict.fromkeys(tile.order for tile in tiles)}
    for tile in tiles:
        value: Any = 0.0
        run = QUADS // len(tile.scales)
        for half, scale in enumerate(tile.scales):
            limbs = []
            for limb in range(LIMBS):
                total = jnp.zeros(scale.shape, jnp.int32)
                for quad in range(half * run, half * run + run):
                    total = ops.dot4(tile.quads[quad], loaded[tile.order][QUADS * limb + quad], total)
                limbs.append(total)
            low = (limbs[1] * 256 + limbs[2]).astype(jnp.float32)
            whole = fma(limbs[0].astype(jnp.float32), jnp.full(low.shape, 65536.0, jnp.float32), low)
            value = fma(scale, whole, value) if half else scale * whole
        value = value * as_float(rows.scale)
        products.append(value if tile.offset is None else fma(tile.offset, as_float(rows.sum), value))
    return products


def _look_up(table: Ref, index: jax.Array) -> jax.Array:
    # Entries lie anywhere. The hint only makes Triton keep the layout of the words (rows contiguous) for this load;
    # without it each lookup goes through shared memory twice. Nothing is read wider: no alignment is claimed.
    return plt.load(table.at[plt.max_contiguous(index.astype(jnp.int32), (1, 4))])
