"""What a thread of a Mosaic GPU kernel does by itself: inline PTX, its place, arrays that hold a few words a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

THREADS = 128
"""Threads of a warpgroup."""
SCALAR = plgpu.Layout.WG_SPLAT(())
Value = Any
"""One number a thread: 32 bits unless said otherwise."""


def words_layout(count: int) -> Any:
    """Layout of an array u32[128 * count] that holds ``count`` words a thread."""
    return plgpu.Layout.WG_STRIDED((count * THREADS,), vec_size=1)


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def const(value: int) -> Value:
    return utils.c(value, i32())


def add(*values: Value | int) -> Value:
    total = _value(values[0])
    for value in values[1:]:
        total = arith.addi(total, _value(value))
    return total


def mul(a: Value, b: Value | int) -> Value:
    return arith.muli(a, _value(b))


def div(a: Value, b: int) -> Value:
    return arith.divui(a, const(b))


def mod(a: Value, b: int) -> Value:
    return arith.remui(a, const(b))


def xor(a: Value, b: Value | int) -> Value:
    return arith.xori(a, _value(b))


def choose(number: Value, values: Sequence[Value]) -> Value:
    """The value of that number."""
    found = values[0]
    for i, value in enumerate(values[1:], start=1):
        found = arith.select(arith.cmpi(arith.CmpIPredicate.eq, number, const(i)), value, found)
    return found


def bits(word: Value, first: int | Value, count: int) -> Value:
    """Bits ``first ... first + count - 1`` of a word."""
    moved = word if isinstance(first, int) and first == 0 else arith.shrui(word, _value(first))
    whole = isinstance(first, int) and first + count == 32
    return moved if whole else arith.andi(moved, const((1 << count) - 1))


def _value(value: Value | int) -> Value:
    return const(value) if isinstance(value, int) else value


def scalar(value: Any) -> Value:
    """What all threads share."""
    return value.registers.item()


def first(register: Value) -> Value:
    """The number that a register of one element holds."""
    return element(register, 0)


def element(register: Value, index: int) -> Value:
    return vector.extract(register, dynamic_position=[], static_position=[index])


def words_array(values: Sequence[Value]) -> Any:
    """The array of what each thread holds."""
    kind = ir.VectorType.get((1,), i32())
    registers = np.array([vector.broadcast(kind, v) for v in values], object)
    return mgpu.FragmentedArray(_registers=registers, _layout=words_layout(len(values)).to_mgpu(), _is_signed=False)


def left_operand(rows: Sequence[Sequence[Value]], cols: int) -> Any:
    """The left operand bf16[64, cols] of wgmma from the pairs of a thread's two rows."""
    two, one = ir.VectorType.get((2,), ir.BF16Type.get()), ir.VectorType.get((1,), i32())
    packed = [vector.bitcast(two, vector.broadcast(one, value)) for pair in zip(*rows) for value in pair]
    layout = mgpu.WGMMA_LAYOUT
    registers = np.array(packed, object).reshape(layout.registers_shape((64, cols)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def asm(results: str, text: str, operands: str, *values: Value, ordered: bool = False) -> list[Value]:
    """Inline PTX.

    Args:
        results, operands: kinds in order, r = 32 bits, l = 64 bits, f = f32.
        ordered: keep its place among other such, barriers included; always so without results.
    """
    kinds = [{"r": i32(), "f": ir.F32Type.get()}[letter] for letter in results]
    constraints = ",".join([*(f"={letter}" for letter in results), *operands])
    kind = ir.Type.parse("!llvm.void") if not kinds else kinds[0]
    if len(kinds) > 1:
        kind = llvm.StructType.get_literal(kinds)
    found: Any = llvm.inline_asm(kind, list(values), text, constraints, has_side_effects=ordered or not kinds)
    if len(kinds) > 1:
        return [llvm.extractvalue(kind, found, [i]) for i, kind in enumerate(kinds)]
    return [found] if kinds else []


def global_address(ref: Any, offset: Value | None = None) -> Value:
    """Address of an array in device or host memory, moved by 64-bit bytes."""
    address = llvm.ptrtoint(i64(), utils.memref_ptr(ref))
    return address if offset is None else moved(address, offset)


def moved(address: Value, offset: Value) -> Value:
    """A 64-bit sum."""
    return arith.addi(address, offset)


def wide(value: Value, factor: int, *, signed: bool = False) -> Value:
    """``value * factor`` with 64 bits."""
    long = arith.extsi(i64(), value) if signed else arith.extui(i64(), value)
    return arith.muli(long, utils.c(factor, i64()))


def shared_address(ref: Any) -> Value:
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def thread() -> Value:
    """Number of the thread in its warpgroup."""
    return arith.andi(utils.thread_idx(), const(THREADS - 1))


def place() -> tuple[Value, Value, Value]:
    """Warp of the warpgroup, lane / 4, lane % 4."""
    number = thread()
    return div(number, 32), div(mod(number, 32), 4), mod(number, 4)
