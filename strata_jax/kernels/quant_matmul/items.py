"""Products of a few float32 vectors with items of planes, inside a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.instructions import multiply_add, quad_ops
from strata_jax.kernels.planes import decode_offset, decode_scales
from strata_jax.kernels.planes.quads import Ops, decode_quads, quad_order, quad_positions

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


def _look_up(table: Ref, index: jax.Array) -> jax.Array:
    # entries lie anywhere: the hint only keeps the layout of the words, or each lookup would go through memory twice
    return plt.load(table.at[plt.max_contiguous(index.astype(jnp.int32), (1, 4))])
