"""Grouped products on packed experts in Pallas Mosaic GPU, for Hopper: weights are decoded in the registers of wgmma.

Weights are the left operand: a warpgroup has 64 rows of them in registers and multiplies them by the rows of a tile,
which lie in shared memory. A thread holds two rows and, of each four items of 32 columns, one whole item, so that no
thread needs a value of another; the columns of the rows are permuted to match before the kernel starts. Swiglu: its
two rows are the same row of gate and of up. Down: two neighbouring rows.

A warpgroup fills a ring in shared memory with steps of 128 columns: the rows of a tile, gathered by token, and the
packed words of 256 rows of weights. Four others decode and multiply: the product of one half of a step runs while the
next half is decoded. Programs stay and take (tile, block of weight rows) in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from strata_jax.kernels.grouped_matmul import ptx
from strata_jax.kernels.grouped_matmul.blocks import RingBlocks
from strata_jax.kernels.grouped_matmul.fragments import (
    HALF,
    ITEMS,
    PAIR,
    left_operands,
    permute_columns,
    shared_tables,
)
from strata_jax.kernels.grouped_matmul.tile_map import Source, TileMap
from strata_jax.kernels.planes import ITEM, PlaneLayout
from strata_jax.kernels.quant_matmul.tiles import PlanePart

Ref = Any

_COLS = ITEMS * ITEM
_GROUPS = 4  # warpgroups that multiply
_TILE_ROWS = 128
_RUN_WORDS = _TILE_ROWS + 8  # so that the items of a quad lie in different banks
_TABLE_CHUNK = 256  # rows that one copy has at most
_SWIZZLED = (plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(2 * HALF))


def takes(parts: Sequence[PlanePart]) -> bool:
    """Say whether the kernel can multiply by these matrices: gate and up, or down."""
    layout = parts[0].layout
    same = all(part.layout == layout for part in parts)
    fits = layout.rows % (_block_rows(parts)) == 0 and layout.num_items % ITEMS == 0
    return same and fits and layout.tile_rows == _TILE_ROWS


def swiglu(
    u: jax.Array,
    token_of: jax.Array,
    tiles: TileMap,
    sources: Sequence[Source],
    parts: tuple[PlanePart, PlanePart],
    out: jax.Array,
    ring: RingBlocks,
) -> jax.Array:
    """Fill rows of ``out: bf16[P, F]`` by the products with gate and up; other arguments as of `grouped_swiglu`."""
    return _product(u, token_of, tiles, sources, parts, out, ring)


def down(
    h: jax.Array,
    tiles: TileMap,
    sources: Sequence[Source],
    part: PlanePart,
    out: jax.Array,
    ring: RingBlocks,
) -> jax.Array:
    """Fill rows of ``out: [P, E]`` by the product with down; other arguments as of `grouped_down`."""
    return _product(h, None, tiles, sources, (part,), out, ring)


def _block_rows(parts: Sequence[PlanePart]) -> int:
    """Rows of the result that a program computes at a time: two tiles of the planes, of one matrix or of two."""
    return 2 * _TILE_ROWS // len(parts)


def _product(
    x: jax.Array,
    token_of: jax.Array | None,
    tiles: TileMap,
    sources: Sequence[Source],
    parts: Sequence[PlanePart],
    out: jax.Array,
    ring: RingBlocks,
) -> jax.Array:
    layout = parts[0].layout
    num_blocks, num_steps = layout.rows // _block_rows(parts), layout.num_items // ITEMS
    tables = shared_tables(layout.type_name)

    def kernel(x: Ref, first: Ref, count: Ref, expert: Ref, num: Ref, *rest: Ref, **scratch: Ref) -> None:
        words, lines, rest = rest[: len(sources)], rest[len(sources) : 2 * len(sources)], rest[2 * len(sources) :]
        from_memory, gathered, out = rest[: len(tables)], rest[len(tables) : -1], rest[-1]
        row_ring, word_ring, full, free = (scratch[name] for name in ("row_ring", "word_ring", "full", "free"))
        table_refs = [scratch[f"table{i}"] for i in range(len(tables))]
        program, group = jax.lax.axis_index("program"), jax.lax.axis_index("group")
        if tables:
            pl.when(group == 0)(partial(_copy_tables, from_memory, table_refs, scratch.get("ready")))
            plgpu.barrier_wait(scratch["ready"])
        num_works = pl.cdiv(num[0] * num_blocks - program, ring.programs)

        def work_of(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """The tile, the block of weight rows, the source of the expert, and its line there."""
            at = program + i * ring.programs
            tile, block = jax.lax.div(at, num_blocks), jax.lax.rem(at, num_blocks)
            own, source, line = expert[tile], jnp.int32(0), jnp.int32(-1)
            for number, there in enumerate(lines):
                found = there[own]
                source, line = jnp.where(found >= 0, number, source), jnp.where(found >= 0, found, line)
            return tile, block, source, line

        def stage_of(step: jax.Array) -> jax.Array:
            return jax.lax.rem(step, ring.stages)

        def copy(i: jax.Array, done: jax.Array) -> jax.Array:
            tile, block, source, line = work_of(i)

            @pl.when(line >= 0)
            def _work() -> None:
                from_rows = _gathered_rows(gathered, first[tile], ring.rows[-1])

                def copy_batch(batch: jax.Array, _: None) -> None:
                    def each(do: Callable[[jax.Array, jax.Array], None]) -> None:
                        for k in range(ring.batch):
                            step = batch * ring.batch + k
                            run = partial(do, step, stage_of(done + step))
                            if num_steps % ring.batch:
                                pl.when(step < num_steps)(run)
                            else:
                                run()

                    def start(step: jax.Array, stage: jax.Array) -> None:
                        plgpu.barrier_wait(free.at[stage])
                        _copy_rows(x, from_rows, step, row_ring, stage)
                        _copy_words(words, source, line, block, step, parts, word_ring, stage)

                    each(start)
                    _wait_for_copies()
                    each(lambda step, stage: plgpu.barrier_arrive(full.at[stage]))

                jax.lax.fori_loop(0, pl.cdiv(num_steps, ring.batch), copy_batch, None)

            return done + jnp.where(line >= 0, num_steps, 0)

        def multiply(i: jax.Array, done: jax.Array) -> jax.Array:
            tile, block, _, line = work_of(i)
            rows = count[tile]

            def work(acc: Ref) -> None:
                def step_product(step: jax.Array, _: None) -> None:
                    stage = stage_of(done + step)
                    plgpu.barrier_wait(full.at[stage])
                    fields = _load_fields(word_ring, stage, step, group, parts)
                    for half, weights in enumerate(left_operands(fields, layout, table_refs)):
                        right = row_ring.at[stage, pl.ds(0, acc.shape[1]), pl.ds(half * HALF, HALF)]
                        plgpu.wgmma(acc, weights, right.transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # the half before this is through: so is all of the step before
                        if half == 0:
                            before = stage_of(done + step - 1)
                            pl.when(step > 0)(partial(plgpu.barrier_arrive, free.at[before]))

                jax.lax.fori_loop(0, num_steps, step_product, None)
                value = acc[...]
                plgpu.barrier_arrive(free.at[stage_of(done + num_steps - 1)])
                _store(value, out, first[tile], rows, block, group, len(parts))

            for less, most in zip((0, *ring.rows), ring.rows):
                here = (line >= 0) & (rows > less) & (rows <= most)
                pl.when(here)(partial(pl.run_scoped, work, plgpu.ACC((64, most), jnp.float32)))
            return done + jnp.where(line >= 0, num_steps, 0)

        @pl.when(group == _GROUPS)
        def _copies() -> None:
            plgpu.set_max_registers(ring.copy_registers, action="decrease")
            jax.lax.fori_loop(0, num_works, copy, jnp.int32(0))

        @pl.when(group < _GROUPS)
        def _products() -> None:
            plgpu.set_max_registers(ring.product_registers, action="increase")
            for stage in range(ring.stages):
                plgpu.barrier_arrive(free.at[stage])
            jax.lax.fori_loop(0, num_works, multiply, jnp.int32(0))

    scratch: dict[str, Any] = {
        "row_ring": plgpu.SMEM((ring.stages, ring.rows[-1], _COLS), jnp.bfloat16, transforms=_SWIZZLED),
        "word_ring": plgpu.SMEM((ring.stages, 2 * _runs(layout)[-1], _RUN_WORDS), jnp.uint32),
        "full": plgpu.Barrier(num_barriers=ring.stages),
        "free": plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=ring.stages),
    }
    scratch |= {f"table{i}": plgpu.SMEM(table.shape, jnp.uint32) for i, table in enumerate(tables)}
    if tables:
        scratch["ready"] = plgpu.Barrier(num_arrivals=sum(-(-len(table) // _TABLE_CHUNK) for table in tables))
    call = plgpu.kernel(
        kernel,
        scratch_types=scratch,
        grid=(ring.programs,),
        grid_names=("program",),
        num_threads=_GROUPS + 1,
        thread_name="group",
        kernel_name="grouped_swiglu" if len(parts) == 2 else "grouped_down",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    x, result = permute_columns(x, layout.type_name), jax.new_ref(out)
    constants, gathered = map(jnp.asarray, tables), [] if token_of is None else [token_of]
    words, lines = zip(*sources)
    call(x, tiles.first, tiles.count, tiles.expert, tiles.num, *words, *lines, *constants, *gathered, result)
    return result[...]


# Copies to shared memory ----------------------------------------------------------------------------------------------


def _copy_tables(sources: Sequence[Ref], tables: Sequence[Ref], ready: Ref) -> None:
    for source, table in zip(sources, tables):
        for at in range(0, table.shape[0], _TABLE_CHUNK):
            rows = pl.ds(at, min(_TABLE_CHUNK, table.shape[0]))
            plgpu.copy_gmem_to_smem(source.at[rows], table.at[rows], ready)


def _wait_for_copies() -> None:
    """Wait for a thread's own copies and show them to the tensor cores."""

    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def wait(ctx: Any) -> tuple[()]:
        del ctx
        ptx.asm("", "cp.async.wait_all; fence.proxy.async.shared::cta;", "")
        return ()

    wait()


def _gathered_rows(gathered: Sequence[Ref], start: jax.Array, num_rows: int) -> jax.Array:
    """Say which rows of the input a thread copies, every eighth of the tile: u32[128 * num_rows / 8]."""
    count = num_rows // 8
    layout = ptx.words_layout(count)
    kind = plgpu.ShapeDtypeStruct((count * ptx.THREADS,), jnp.uint32, layout=layout)

    @plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(gathered), ptx.SCALAR), return_type=kind)
    def sources(ctx: Any, gathered: Any, start: Any) -> Any:
        del ctx
        rows = [ptx.add(ptx.scalar(start), ptx.div(ptx.thread(), 16), 8 * j) for j in range(count)]
        if gathered:
            addresses = [ptx.global_address(gathered[0], ptx.wide(row, 4)) for row in rows]
            rows = [ptx.asm("r", "ld.global.nc.b32 $0, [$1];", "l", a, ordered=True)[0] for a in addresses]
        return ptx.words_array(rows)

    return sources(list(gathered), start)


def _copy_rows(x: Ref, sources: jax.Array, step: jax.Array, ring: Ref, stage: jax.Array) -> None:
    """Start a thread's share of the copies of a step's rows: 16 bytes of each, in the order of a 128-byte swizzle."""
    width, (_, num_rows, cols) = x.shape[1], ring.shape
    layout = ptx.words_layout(num_rows // 8)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout, ptx.SCALAR, plgpu.RefType(_SWIZZLED), ptx.SCALAR), return_type=()
    )
    def copy(ctx: Any, x: Any, sources: Any, step: Any, ring: Any, stage: Any) -> tuple[()]:
        del ctx
        row, piece = ptx.div(ptx.thread(), 16), ptx.mod(ptx.thread(), 16)
        start = ptx.add(ptx.mul(ptx.scalar(step), cols * 2), ptx.mul(piece, 16))
        source = ptx.global_address(x, ptx.wide(start, 1))
        # eight rows of 64 columns after each other, pieces of 16 bytes exchanged by the number of the row
        place = ptx.mul(ptx.xor(ptx.mod(piece, 8), row), 16)
        place = ptx.add(place, ptx.mul(row, 2 * HALF), ptx.mul(ptx.div(piece, 8), 8 * 2 * HALF))
        to = ptx.add(ptx.shared_address(ring), ptx.mul(ptx.scalar(stage), num_rows * cols * 2), place)
        for j, register in enumerate(sources.registers.flat):
            own = ptx.wide(ptx.first(register), width * 2)
            address = ptx.moved(source, own)
            ptx.asm("", "cp.async.cg.shared.global [$0], [$1], 16;", "rl", ptx.add(to, 8 * cols * 2 * j), address)
        return ()

    copy(x, sources, step, ring, stage)


def _runs(layout: PlaneLayout) -> list[int]:
    """Runs of 128 words that a step has before those of each field, and all of them: a word of 128 rows each."""
    found = [0]
    for field in layout.fields:
        found.append(found[-1] + (ITEMS * field.bits // 32 if field.bits >= 32 else _shared_words(field)))
    return found


def _shared_words(field: Any) -> int:
    """Words of a row that hold a field of fewer than 32 bits for the items of a step."""
    return max(1, ITEMS // field.share * field.bits // 32)


def _copy_words(
    words: Sequence[Ref],
    source: jax.Array,
    line: jax.Array,
    block: jax.Array,
    step: jax.Array,
    parts: Sequence[PlanePart],
    ring: Ref,
    stage: jax.Array,
) -> None:
    """Start a thread's share of the copies of a step's packed weights: a warp copies whole runs."""
    layout, lengths, runs = parts[0].layout, [array.shape[1] for array in words], _runs(parts[0].layout)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(words), *[ptx.SCALAR] * 4, plgpu.RefType(), ptx.SCALAR), return_type=()
    )
    def copy_all(
        ctx: Any, words: Any, source: Any, line: Any, block: Any, step: Any, ring: Any, stage: Any
    ) -> tuple[()]:
        del ctx
        source, line, block, step, stage = map(ptx.scalar, (source, line, block, step, stage))
        warp, piece = ptx.div(ptx.thread(), 32), ptx.mul(ptx.mod(ptx.thread(), 32), 16)
        starts = [
            ptx.global_address(array, ptx.wide(line, length * 4, signed=True)) for array, length in zip(words, lengths)
        ]
        start = ptx.choose(source, starts)
        to = ptx.add(ptx.shared_address(ring), piece, ptx.mul(stage, 2 * runs[-1] * _RUN_WORDS * 4))

        def copy(tile: int, word: ptx.Value, run: ptx.Value, others: ptx.Value) -> None:
            """Copy a word of a tile's rows unless ``others`` is not 0."""
            part = parts[tile % len(parts)]
            number = block if len(parts) == 2 else ptx.add(ptx.mul(block, 2), tile)
            at = ptx.mul(ptx.add(ptx.mul(number, layout.row_words), word), _TILE_ROWS * 4)
            address = ptx.moved(start, ptx.wide(ptx.add(at, piece, part.first_word * 4), 1))
            own = ptx.add(to, ptx.mul(ptx.add(run, tile * runs[-1]), _RUN_WORDS * 4))
            text = "{ .reg .pred p; setp.eq.u32 p, $2, 0; @p cp.async.cg.shared.global [$0], [$1], 16; }"
            ptx.asm("", text, "rlr", own, address, others)

        turn = 0
        for tile in range(2):
            for field, run in zip(layout.fields, runs):
                if field.bits >= 32:
                    for k in range(field.bits // 32):
                        word = ptx.add(ptx.mul(step, ITEMS), warp, field.first + k * layout.num_items)
                        copy(tile, word, ptx.add(warp, run + ITEMS * k), ptx.const(0))
                    continue
                bit = ptx.mul(ptx.div(ptx.mul(step, ITEMS), field.share), field.bits)
                for k in range(_shared_words(field)):
                    word = ptx.add(ptx.div(bit, 32), field.first + k)
                    copy(tile, word, ptx.const(run + k), ptx.xor(warp, turn % _GROUPS))
                    turn += 1
        return ()

    copy_all(list(words), source, line, block, step, ring, stage)


# A thread's weights and results ---------------------------------------------------------------------------------------


def _load_fields(
    ring: Ref, stage: jax.Array, step: jax.Array, group: jax.Array, parts: Sequence[PlanePart]
) -> dict[str, tuple[jax.Array, ...]]:
    """Load the fields of a thread's item for its two rows: u32[256] each, as `load_fields` would."""
    layout, runs = parts[0].layout, _runs(parts[0].layout)
    pieces = [(field, run, k) for field, run in zip(layout.fields, runs) for k in range(max(1, field.bits // 32))]
    kind = plgpu.ShapeDtypeStruct((2 * ptx.THREADS,), jnp.uint32, layout=PAIR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.SCALAR, ptx.SCALAR, ptx.SCALAR), return_type=[kind] * len(pieces)
    )
    def load(ctx: Any, ring: Any, stage: Any, step: Any, group: Any) -> Any:
        del ctx
        stage, step, group = map(ptx.scalar, (stage, step, group))
        _, _, quad = ptx.place()
        tile_bytes = runs[-1] * _RUN_WORDS * 4
        row = _row(group, len(parts))
        start = ptx.add(ptx.shared_address(ring), ptx.mul(stage, 2 * tile_bytes))
        if len(parts) == 1:
            start, row = ptx.add(start, ptx.mul(ptx.div(row, _TILE_ROWS), tile_bytes)), ptx.mod(row, _TILE_ROWS)
        start = ptx.add(start, ptx.mul(row, 4))

        def get(run: ptx.Value) -> list[ptx.Value]:
            at = ptx.add(start, ptx.mul(run, _RUN_WORDS * 4))
            if len(parts) == 1:
                return ptx.asm("rr", "ld.shared.v2.b32 {$0, $1}, [$2];", "r", at, ordered=True)
            both = (at, ptx.add(at, tile_bytes))
            return [ptx.asm("r", "ld.shared.b32 $0, [$1];", "r", a, ordered=True)[0] for a in both]

        item, found = ptx.add(ptx.mul(step, ITEMS), quad), []
        for field, run, k in pieces:
            if field.bits >= 32:
                found.append(get(ptx.add(quad, run + ITEMS * k)))
                continue
            bit, num = ptx.mul(ptx.div(item, field.share), field.bits), _shared_words(field)
            words = get(ptx.add(ptx.div(quad, ITEMS // num), run) if num > 1 else ptx.const(run))
            found.append([ptx.bits(word, ptx.mod(bit, 32), field.bits) for word in words])
        return [ptx.words_array(both) for both in found]

    fields: dict[str, tuple[jax.Array, ...]] = {}
    for (field, _, _), value in zip(pieces, load(ring, stage, step, group)):
        fields[field.name] = (*fields.get(field.name, ()), value)
    return fields


def _row(group: ptx.Value, num_parts: int) -> ptx.Value:
    """The (first) row of a block's result that a thread computes."""
    warp, eighth, _ = ptx.place()
    warps = ptx.add(ptx.mul(group, 4), warp)
    return ptx.add(ptx.mul(warps, 8), eighth) if num_parts == 2 else ptx.mul(ptx.add(ptx.mul(warps, 8), eighth), 2)


_SILU = """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 t, t; mul.f32 t, t, $1; mul.f32 $0, t, $2; }"""
_IF = "{ .reg .pred p; .reg .b16 h; .reg .b32 w; setp.lt.s32 p, $0, $1; "


def _store(
    acc: jax.Array, out: Ref, start: jax.Array, count: jax.Array, block: jax.Array, group: jax.Array, num_parts: int
) -> None:
    """Write the tile's ``count`` rows; the others belong to the next expert."""
    width, size = out.shape[1], jnp.dtype(out.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), *[ptx.SCALAR] * 4), return_type=())
    def store(ctx: Any, acc: Any, out: Any, start: Any, count: Any, block: Any, group: Any) -> tuple[()]:
        del ctx
        start, count, block, group = map(ptx.scalar, (start, count, block, group))
        _, _, quad = ptx.place()
        col = ptx.add(ptx.mul(block, 2 * _TILE_ROWS // num_parts), _row(group, num_parts))
        to = ptx.global_address(out, ptx.wide(col, size))
        for n, registers in enumerate(acc.registers.reshape(-1, 2)):
            for k in range(2):
                row = ptx.add(ptx.mul(quad, 2), 8 * n + k)
                address = ptx.moved(to, ptx.wide(ptx.add(start, row), width * size))
                a, b = (ptx.element(register, k) for register in registers)
                if num_parts == 2:
                    (value,) = ptx.asm("f", _SILU, "ff", a, b)
                    text = "cvt.rn.bf16.f32 h, $3; @p st.global.b16 [$2], h; }"
                    ptx.asm("", _IF + text, "rrlf", row, count, address, value)
                elif size == 4:
                    ptx.asm("", _IF + "@p st.global.v2.f32 [$2], {$3, $4}; }", "rrlff", row, count, address, a, b)
                else:
                    text = "cvt.rn.bf16x2.f32 w, $4, $3; @p st.global.b32 [$2], w; }"
                    ptx.asm("", _IF + text, "rrlff", row, count, address, a, b)
        return ()

    store(acc, out, start, count, block, group)
