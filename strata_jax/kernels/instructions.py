"""Single instructions of NVIDIA GPUs for Pallas-Triton kernels, and the same in plain jnp for the interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from strata_jax.kernels.planes.quads import PLAIN_OPS, Ops


def _instruction(text: str, kinds: str, dtype: DTypeLike, *args: jax.Array) -> jax.Array:
    """Apply ``text`` element by element; ``kinds``: r or f for the result, which is signed, and for each argument."""
    shape = jnp.broadcast_shapes(*(arg.shape for arg in args))
    (result,) = plt.elementwise_inline_asm(
        text,
        args=[jnp.broadcast_to(arg, shape) for arg in args],
        constraints="=" + ",".join(kinds),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, dtype)],
    )
    return result


def _dot4(a: jax.Array, b: jax.Array, total: jax.Array) -> jax.Array:
    return _instruction("dp4a.s32.s32 $0, $1, $2, $3;", "rrrr", jnp.int32, a, b, total)


def _permute(low: jax.Array, high: jax.Array, selector: jax.Array) -> jax.Array:
    return _instruction("prmt.b32 $0, $1, $2, $3;", "rrrr", jnp.int32, low, high, selector).astype(jnp.uint32)


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array, interpret: bool) -> jax.Array:
    """``a * b + c``, on a GPU in one instruction: the compiler of these kernels fuses nothing by itself."""
    return a * b + c if interpret else _instruction("fma.rn.f32 $0, $1, $2, $3;", "ffff", jnp.float32, a, b, c)


def quad_ops(interpret: bool) -> Ops:
    return PLAIN_OPS if interpret else Ops(_dot4, _permute)
