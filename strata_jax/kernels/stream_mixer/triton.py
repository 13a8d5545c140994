"""The residual-stream mixer as three Pallas-Triton launches on planes.

`_project`: one program for each (part of a stream's columns, block of rows of ``down``). RMS norm scales all columns of
a stream alike, so a program multiplies by the columns as they are and the consumer scales the sums: nobody waits for
the norm. The last block of a part carries out the pending write, sums squares and multiplies by ``inject``.
`_hidden`: one program for each token adds its parts up in their order, which gives ``silu(down x)``.
`_mix`: one program for each block of columns, of all streams, multiplies by its rows of ``up`` and takes the mean.

Products and sums are in float32. Words of weights are on their way before anything else is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.item_products import WHOLE_BITS, add_items
from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import ITEM, fields_of, lookup_table, raw_words
from strata_jax.kernels.quant_matmul.tiles import PlanePart, PlaneRows
from strata_jax.kernels.stream_mixer.layout import MixerBlocks, MixerPlanes, MixerRead, PendingWrite, mixer_blocks

Ref = Any
Refs = Mapping[str, Ref]


def read(
    streams: jax.Array, w: MixerPlanes, eps: float, pending: PendingWrite | None, *, interpret: bool = False
) -> MixerRead:
    """As `strata_jax.kernels.stream_mixer.read`."""
    num_tokens, num_streams, width = streams.shape
    down, up, inject = w.down, w.up, w.inject
    blocks = mixer_blocks(streams.shape, down.layout, up.layout)
    common = {"streams": streams, "norm": w.norm, "words": w.words, "whole": jnp.full(1, WHOLE_BITS, jnp.uint32)}

    operands = common | {"table": jnp.asarray(lookup_table(down.layout.type_name))}
    outs = {"sums": (blocks.parts, num_tokens, down.layout.rows), "squares": (blocks.parts, num_tokens)}
    if inject is not None:
        operands |= {"inject_table": jnp.asarray(lookup_table(inject.layout.type_name))}
        outs["inject_sums"] = blocks.parts, num_tokens, num_streams
    if pending is not None:
        operands |= {"y": pending.y, "weights": pending.inject}
        outs["written"] = streams.shape
    kernel = partial(_project, down=down, inject=inject, blocks=blocks, interpret=interpret)
    grid: tuple[int, ...] = blocks.parts, down.layout.rows // blocks.down_rows + 1, -(-num_tokens // blocks.down_tokens)
    found = _launch("mixer_project", kernel, grid, operands, outs, blocks.down_warps, interpret)
    streams = common["streams"] = found.pop("written", streams)

    padded = pl.next_power_of_2(up.layout.num_items) * ITEM
    outs = {"hidden": (num_tokens, padded), "scales": (num_tokens, num_streams)}
    if inject is not None:
        outs["weights"] = num_tokens, num_streams
    kernel = partial(_hidden, num_streams=num_streams, width=width, eps=eps)
    ready = _launch("mixer_hidden", kernel, (num_tokens,), found, outs, blocks.hidden_warps, interpret)
    weights = ready.pop("weights", None)

    operands = common | ready | {"table": jnp.asarray(lookup_table(up.layout.type_name))}
    kernel = partial(_mix, up=up, blocks=blocks, interpret=interpret)
    grid = width // blocks.up_rows, -(-num_tokens // blocks.up_tokens)
    result = _launch("mixer_mix", kernel, grid, operands, {"mixed": (num_tokens, width)}, blocks.up_warps, interpret)
    return MixerRead(streams, result["mixed"], weights)


def _launch(
    name: str,
    kernel: Any,
    grid: tuple[int, ...],
    operands: Mapping[str, jax.Array],
    outs: Mapping[str, tuple[int, ...]],
    warps: int,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Start ``kernel(refs)``, refs by name: operands, then float32 results of the shapes ``outs``."""
    names = *operands, *outs

    def with_names(*refs: Ref) -> None:
        kernel(dict(zip(names, refs, strict=True)))

    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in outs.values())
    found = launch(with_names, grid, shapes, warps, name=name, interpret=interpret)(*operands.values())
    return dict(zip(outs, found, strict=True))


def _project(refs: Refs, *, down: PlanePart, inject: PlanePart | None, blocks: MixerBlocks, interpret: bool) -> None:
    """Sums over one part's columns, of one block of rows of ``down`` or, in the last block, of all else.

    streams f32[T, C, E], norm f32[C*E], words u32[.], table u32[.], whole u32[1], with inject: inject_table as table,
    with a pending write: y f32[T, E], weights f32[T, C]
    -> sums f32[parts, T, r], squares f32[parts, T], inject_sums f32[parts, T, C], written f32[T, C, E].
    """
    num_tokens, num_streams, _ = refs["streams"].shape
    columns, num_rows = blocks.items * ITEM, blocks.down_rows
    part, block, last = pl.program_id(0), pl.program_id(1), down.layout.rows // blocks.down_rows
    tokens = _tokens(pl.program_id(2), blocks.down_tokens, num_tokens)
    parts_each = blocks.parts // num_streams
    stream = jax.lax.div(part, jnp.int32(parts_each))
    first = (part - stream * parts_each) * columns  # of the stream's columns
    lane, row = jnp.arange(blocks.items, dtype=jnp.int32), jnp.arange(num_rows, dtype=jnp.int32)

    def values(token: jax.Array, at: jax.Array) -> jax.Array:
        found = refs["streams"][token, stream, first + at]
        return found + refs["weights"][token, stream] * refs["y"][token, first + at] if "y" in refs else found

    def products(rows: PlaneRows, matrix: PlanePart, table: Ref) -> list[jax.Array]:
        def value(t: int, s: int) -> jax.Array:
            at = lane * ITEM + s
            return refs["norm"][part * columns + at] * values(tokens[t], at)

        return _products(refs, rows, matrix, part * blocks.items + lane, table, value, len(tokens), interpret)

    def keep(name: str, at: Any, found: Sequence[jax.Array]) -> None:
        for token, sums in zip(tokens, found, strict=True):
            refs[name][part, token, at] = sums

    of_down, here = _rows(down, block, row, num_rows), pl.ds(block * num_rows, num_rows)
    if inject is None:
        pl.when(block < last)(lambda: keep("sums", here, products(of_down, down, refs["table"])))
    else:
        # its few rows several times: a tile of their number would be moved about between threads
        row_of = jnp.bitwise_and(row, num_streams - 1)
        of_inject = PlaneRows(inject.first_word + row_of, jnp.int32(num_streams))
        if inject.layout.type_name == down.layout.type_name:
            # one code for both: two in a kernel take ten times as long to compile
            rows = PlaneRows(*(jnp.where(block < last, x, y) for x, y in zip(of_down, of_inject, strict=True)))
            rows = rows.aligned(min(num_rows, num_streams))
            found = products(rows, down, refs["table"])
            pl.when(block < last)(lambda: keep("sums", here, found))
            pl.when(block == last)(lambda: keep("inject_sums", row_of, found))
        else:
            pl.when(block < last)(lambda: keep("sums", here, products(of_down, down, refs["table"])))
            other = partial(products, of_inject, inject, refs["inject_table"])
            pl.when(block == last)(lambda: keep("inject_sums", row_of, other()))

    @pl.when(block == last)
    def write() -> None:
        for token in tokens:
            x = values(token, jnp.arange(columns, dtype=jnp.int32))
            refs["squares"][part, token] = jnp.sum(x * x)
            if "written" in refs:
                refs["written"][token, stream, pl.ds(first, columns)] = x


def _hidden(refs: Refs, *, num_streams: int, width: int, eps: float) -> None:
    """What one token's parts come to.

    What `_project` gives -> hidden f32[T, H], 0 past the last row of ``down``; scales f32[T, C], one over the root mean
    square of each stream; with inject: weights f32[T, C].
    """
    token, num_parts = pl.program_id(0), refs["squares"].shape[0] // num_streams
    rank = jnp.arange(refs["hidden"].shape[1], dtype=jnp.int32)
    scales = _scales(refs["squares"], token, num_streams, width, eps)
    z = _scaled_sum(scales, num_parts, partial(_padded, refs["sums"], token, rank))
    refs["hidden"][token, :] = z * _sigmoid(z)
    for stream, scale in enumerate(scales):
        refs["scales"][token, stream] = scale
    if "weights" in refs:
        z = _scaled_sum(scales, num_parts, partial(_whole, refs["inject_sums"], token))
        refs["weights"][token, :] = 2.0 * _sigmoid(z)


def _mix(refs: Refs, *, up: PlanePart, blocks: MixerBlocks, interpret: bool) -> None:
    """The mean over the streams of some columns.

    streams f32[T, C, E], norm f32[C*E], words u32[.], table u32[.], whole u32[1] and what `_hidden` gives
    -> mixed f32[T, E].
    """
    num_tokens, num_streams, width = refs["streams"].shape
    tokens, num_rows = _tokens(pl.program_id(1), blocks.up_tokens, num_tokens), blocks.up_rows
    item = jnp.arange(refs["hidden"].shape[1] // ITEM, dtype=jnp.int32)
    # the same columns of every stream, one after the other
    lane = jnp.arange(num_streams * num_rows, dtype=jnp.int32)
    stream = jax.lax.div(lane, jnp.int32(num_rows))
    within = lane - stream * num_rows
    column = pl.program_id(0) * num_rows + within

    sums = _products(
        refs, _rows(up, stream * (width // num_rows) + pl.program_id(0), within, num_rows), up,
        jnp.minimum(item, up.layout.num_items - 1),  # of those past the end ``hidden`` is 0
        refs["table"], lambda t, s: refs["hidden"][tokens[t], item * ITEM + s], len(tokens), interpret,
    )  # fmt: skip
    norm = refs["norm"][stream * width + column]
    for token, total in zip(tokens, sums, strict=True):
        normed = norm * refs["scales"][token, stream] * refs["streams"][token, stream, column]
        gated = (normed * _sigmoid(total)).reshape(num_streams, num_rows)
        refs["mixed"][token, pl.ds(pl.program_id(0) * num_rows, num_rows)] = jnp.sum(gated, axis=0) / num_streams


def _tokens(group: jax.Array, of_group: int, num_tokens: int) -> list[jax.Array]:
    """The tokens of a group; past the last one it is computed again."""
    return [jnp.minimum(group * of_group + i, num_tokens - 1) for i in range(of_group)]


def _rows(part: PlanePart, block: jax.Array, within: jax.Array, num_rows: int) -> PlaneRows:
    """Rows ``within: i32[R]`` of blocks of ``num_rows`` rows, of one, i32[], or each of its own, i32[R]."""
    tile_rows = part.layout.tile_rows
    per_tile = jnp.int32(tile_rows // num_rows)
    tile = jax.lax.div(block, per_tile)
    first = part.first_word + tile * (part.layout.row_words * tile_rows) + (block - tile * per_tile) * num_rows
    return PlaneRows(first + within, jnp.int32(tile_rows))


def _products(
    refs: Refs,
    rows: PlaneRows,
    matrix: PlanePart,
    items: jax.Array,
    table: Ref,
    value: Callable[[int, int], jax.Array],
    num_tokens: int,
    interpret: bool,
) -> list[jax.Array]:
    """Products of J items of R rows with each token's values, f32[R] each.

    Args:
        items: i32[J]. value: position s of the items of the t-th token, f32[J].
    """
    load = lambda word: refs["words"][word[:, None] * rows.stride + rows.start[None, :]]  # noqa: E731
    raw = raw_words(load, matrix.layout, items)
    if not interpret:
        plt.debug_barrier()  # or the compiler reads each word where it is needed, and waits for memory at each
    zero = jnp.zeros(raw[0].shape, jnp.float32)
    found = add_items(
        fields_of(raw, matrix.layout, items), matrix.layout.type_name, table, refs["whole"][0],
        lambda t, s: value(t, s)[:, None], None, (zero,) * num_tokens, interpret,
    )  # fmt: skip
    return [jnp.sum(total, axis=0) for total in found]


def _padded(sums: Ref, token: jax.Array, rank: jax.Array, part: int) -> jax.Array:
    """Sums of one part, 0 past the last row: f32[len(rank)]."""
    return plt.load(sums.at[part, token, rank], mask=rank < sums.shape[2], other=0.0)


def _whole(sums: Ref, token: jax.Array, part: int) -> jax.Array:
    return sums[part, token, :]


def _scales(squares: Ref, token: jax.Array, num_streams: int, width: int, eps: float) -> list[jax.Array]:
    """One over the root mean square of each stream: C scalars."""
    num_parts = squares.shape[0] // num_streams
    totals = [sum(squares[c * num_parts + i, token] for i in range(num_parts)) for c in range(num_streams)]
    return [1.0 / jnp.sqrt(total / width + eps) for total in totals]


def _scaled_sum(scales: Sequence[jax.Array], num_parts: int, sums_of: Callable[[int], jax.Array]) -> jax.Array:
    """The product of the normed streams with some rows, over C: the parts of each stream are added in their order."""
    of_streams = [sum(sums_of(c * num_parts + i) for i in range(num_parts)) for c in range(len(scales))]
    return sum(scale * total for scale, total in zip(scales, of_streams)) / len(scales)  # type: ignore[return-value]


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))
