"""Weights as left operands of wgmma: a thread decodes one item of 32 weights for each of its two rows.

IQ2: a scale and the three magnitudes of the codebook give three bfloat16, whose bytes are picked by byte permutations:
the entry of the codebook, looked up in shared memory, is the selector, and signs choose between the high bytes and
their negatives. Q2_0: the code is placed in the mantissa. Other types: `decode_tile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from strata_jax.kernels.dequant import grids
from strata_jax.kernels.grouped_matmul import ptx
from strata_jax.kernels.planes import ITEM, PlaneLayout, decode_tile, lookup_table

Ref = Any
Fields = Mapping[str, Sequence[ptx.Value]]

ITEMS = 4
"""Items of a step: one for each thread of a quad."""
HALF = ITEMS * ITEM // 2
"""Columns of a left operand: half of each item."""
PAIR = ptx.words_layout(2)
_PAIR_TYPE = plgpu.ShapeDtypeStruct((2 * ptx.THREADS,), jnp.uint32, layout=PAIR)
_OPERAND_TYPE = plgpu.ShapeDtypeStruct((64, HALF), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
_MAGNITUDES = (8.0, 25.0, 43.0)
_CODEBOOKS = ("IQ2_XXS", "IQ2_XS", "IQ2_S")
_LANES = 32
_TABLE_WORDS = 16384


def permute_columns(x: jax.Array, type_name: str) -> jax.Array:
    """Order columns as left operands have them: ``x: [rows, cols]``."""
    rows, cols = x.shape
    if type_name == "Q2_0":  # axes: item, half, two, step, half of the step
        split = x.reshape(rows, -1, ITEMS, 2, 2, 4, 2).transpose(0, 1, 3, 5, 6, 2, 4)
    else:  # item, half, step, half of the step, two
        split = x.reshape(rows, -1, ITEMS, 2, 4, 2, 2).transpose(0, 1, 3, 4, 5, 2, 6)
    return split.reshape(rows, cols)


@cache
def shared_tables(type_name: str) -> tuple[np.ndarray, ...]:
    """Return what is looked up in shared memory, u32[entries, copies]: copies so that lanes seldom meet in a bank."""
    if type_name not in _CODEBOOKS:
        table = lookup_table(type_name)
        return () if len(table) == 1 else (np.repeat(table[:, None], _LANES, 1),)
    place = 4 * np.arange(8, dtype=np.uint32)
    codes = np.searchsorted(_MAGNITUDES, grids.magnitudes(type_name)).astype(np.uint32)
    signs = (np.arange(256 if type_name == "IQ2_S" else 128)[:, None] >> np.arange(8)) & 1
    if type_name != "IQ2_S":
        signs[:, 7] = signs[:, :7].sum(1) & 1
    selectors, negative = ((v << s).sum(1).astype(np.uint32) for v, s in ((codes, place), (signs, place + 2)))
    copies = min(_LANES, _TABLE_WORDS // len(selectors))
    return np.repeat(selectors[:, None], copies, 1), np.repeat(negative[:, None], _LANES, 1)


def left_operands(
    fields: Mapping[str, tuple[jax.Array, ...]], layout: PlaneLayout, tables: Sequence[Ref]
) -> Iterator[jax.Array]:
    """Yield both halves of a step, bf16[64, 64] each: fields are u32[256], two rows of one item a thread."""
    if layout.type_name in _DECODERS:
        for half in range(2):
            yield _decoded(fields, half, layout, tables)
        return
    weights = []
    for tile in decode_tile(fields, layout.type_name, lambda index: _looked_up(tables[0], index)):
        weights.append(tile)
        if len(weights) == ITEM // 2:
            yield _rounded(weights)
            weights = []


def _looked_up(table: Ref, index: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PAIR), return_type=_PAIR_TYPE)
    def look_up(ctx: Any, table: Any, index: Any) -> Any:
        del ctx
        start, stride = _own_copy(table)
        at = [ptx.add(start, ptx.mul(ptx.first(i), stride)) for i in index.registers.flat]
        return ptx.words_array([ptx.asm("r", "ld.shared.b32 $0, [$1];", "r", a)[0] for a in at])

    return look_up(table, index)


def _own_copy(table: Any) -> tuple[ptx.Value, int]:
    """Where a lane's copy of a table begins, and bytes from one entry to the next."""
    copies = ir.MemRefType(table.type).shape[1]
    return ptx.add(ptx.shared_address(table), ptx.mul(ptx.mod(ptx.thread(), copies), 4)), copies * 4


def _rounded(weights: Sequence[jax.Array]) -> jax.Array:
    """Round f32[256] for each of 16 weights to a left operand."""

    @plgpu.inline_mgpu(arg_types=([PAIR] * len(weights),), return_type=_OPERAND_TYPE)
    def round_all(ctx: Any, weights: Any) -> Any:
        del ctx
        values = [[ptx.first(w.registers.flat[row]) for w in weights] for row in range(2)]
        text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        rows = [[ptx.asm("r", text, "ff", v[i], v[i + 1])[0] for i in range(0, len(v), 2)] for v in values]
        return ptx.left_operand(rows, HALF)

    return round_all(list(weights))


def _decoded(
    fields: Mapping[str, tuple[jax.Array, ...]], half: int, layout: PlaneLayout, tables: Sequence[Ref]
) -> jax.Array:
    names = [name for name, values in fields.items() for _ in values]

    @plgpu.inline_mgpu(arg_types=([PAIR] * len(names), [plgpu.RefType()] * len(tables)), return_type=_OPERAND_TYPE)
    def decode(ctx: Any, values: Any, tables: Any) -> Any:
        del ctx
        copies, rows = [_own_copy(table) for table in tables], []
        for row in range(2):
            own: dict[str, list[ptx.Value]] = {}
            for name, value in zip(names, values):
                own.setdefault(name, []).append(ptx.first(value.registers.flat[row]))
            rows.append(_DECODERS[layout.type_name](own, half, copies))
        return ptx.left_operand(rows, HALF)

    return decode([value for values in fields.values() for value in values], list(tables))


# Eight pairs of weights of a row -------------------------------------------------------------------------------------


def _iq2_ptx() -> str:
    """$0 ... $7: pairs; $8 ... $11: where selector and signs of both entries are; $12: the scale.

    Selectors have four bits a weight: which magnitude, and its sign.
    """
    pick = (
        "prmt.b32 l4, lo, lo, e; prmt.b32 h4, hi, negative, e;"
        " prmt.b32 ${}, l4, h4, 0x5140; prmt.b32 ${}, l4, h4, 0x7362;"
    )
    lines = ["{ .reg .b32 a, b, e, s, lo, hi, negative, l4, h4; .reg .f32 p0, p1, p2;"]
    for i, magnitude in enumerate(_MAGNITUDES):
        lines.append(f"mul.f32 p{i}, $12, 0f{np.float32(magnitude).view(np.uint32):08X};")
    lines.append("cvt.rn.bf16x2.f32 a, p1, p0; cvt.rn.bf16x2.f32 b, p2, p2;")
    lines.append("prmt.b32 lo, a, b, 0x6420; prmt.b32 hi, a, b, 0x7531; xor.b32 negative, hi, 0x80808080;")
    for entry in range(2):
        lines.append(f"ld.shared.b32 e, [${8 + 2 * entry}]; ld.shared.b32 s, [${9 + 2 * entry}]; xor.b32 e, e, s;")
        lines += [pick.format(4 * entry, 4 * entry + 1), "shr.u32 e, e, 16;"]
        lines.append(pick.format(4 * entry + 2, 4 * entry + 3))
    return "\n".join([*lines, "}"])


_IQ2_PTX = _iq2_ptx()
_IQ2_SCALE_PTX = """{ .reg .b32 t; .reg .f32 v; or.b32 t, $1, 0x4B000000; mov.b32 v, t; add.f32 v, v, 0fCAFFFFFF;
mul.f32 v, v, $2; mul.f32 $0, v, 0f3E800000; }"""  # (code + 0.5) * d / 4: 2^23 + code, less 2^23 - 0.5


def _iq2(type_name: str, f: Fields, half: int, tables: Sequence[tuple[ptx.Value, int]]) -> list[ptx.Value]:
    addresses = []
    for group in (2 * half, 2 * half + 1):
        for value, (start, stride) in zip(_IQ2_CODES[type_name](f, group), tables):
            addresses.append(ptx.add(start, ptx.mul(value, stride)))
    code = ptx.bits(f["sign"][0], 28, 4) if type_name == "IQ2_XXS" else ptx.bits(f["scale"][0], 4 * half, 4)
    (scale,) = ptx.asm("f", _IQ2_SCALE_PTX, "rf", code, _half_float(f["d"][0]))
    return ptx.asm("r" * 8, _IQ2_PTX, "rrrrf", *addresses, scale)


def _iq2_xxs(f: Fields, group: int) -> tuple[ptx.Value, ptx.Value]:
    return ptx.bits(f["index"][0], 8 * group, 8), ptx.bits(f["sign"][0], 7 * group, 7)


def _iq2_xs(f: Fields, group: int) -> tuple[ptx.Value, ptx.Value]:
    word, first = f["index"][group // 2], 16 * (group % 2)
    return ptx.bits(word, first, 9), ptx.bits(word, first + 9, 7)


def _iq2_s(f: Fields, group: int) -> tuple[ptx.Value, ptx.Value]:
    high = ptx.mul(ptx.bits(f["high"][0], 2 * group, 2), 256)
    return ptx.add(ptx.bits(f["index"][0], 8 * group, 8), high), ptx.bits(f["sign"][0], 8 * group, 8)


_IQ2_CODES: Mapping[str, Callable[[Fields, int], tuple[ptx.Value, ptx.Value]]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
}


def _q2_0_ptx() -> str:
    """128 + code in the mantissa, less 129, times the scale: exact up to the scale's rounding. Codes i and i + 8."""
    lines = ["{ .reg .b32 t, d, one, less; mov.b32 one, 0x3F803F80; mov.b32 less, 0xC301C301;"]
    lines.append("cvt.rn.bf16x2.f32 d, $9, $9;")
    for i in range(8):
        lines.append(f"shr.u32 t, $8, {2 * i}; and.b32 t, t, 0x00030003; or.b32 t, t, 0x43004300;")
        lines.append(f"fma.rn.bf16x2 t, t, one, less; mul.bf16x2 ${i}, t, d;")
    return "\n".join([*lines, "}"])


_Q2_0_PTX = _q2_0_ptx()


def _q2_0(f: Fields, half: int, tables: Sequence[tuple[ptx.Value, int]]) -> list[ptx.Value]:
    return ptx.asm("r" * 8, _Q2_0_PTX, "rf", f["code"][half], _half_float(f["d"][0]))


def _half_float(word: ptx.Value) -> ptx.Value:
    """The float16 in the low 16 bits, as f32."""
    return ptx.asm("f", "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "r", word)[0]


_DECODERS: Mapping[str, Callable[[Fields, int, Sequence[tuple[ptx.Value, int]]], list[ptx.Value]]] = {
    **{name: partial(_iq2, name) for name in _CODEBOOKS},
    "Q2_0": _q2_0,
}
