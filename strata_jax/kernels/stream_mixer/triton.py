"""The residual-stream mixer as two Pallas-Triton launches on planes.

`_project`: one program for each (part of a stream's columns, block of rows of ``down``). RMS norm scales all columns of
a stream alike, so a program multiplies by the columns as they are and the consumer scales the sums: nobody waits for
the norm. The last block of a part carries out the pending write, sums squares and multiplies by ``inject``.
`_mix`: one program for each block of columns, of all streams. It adds the parts up in their order, which gives
``silu(down x)`` to every program at little cost, multiplies by its rows of ``up`` and takes the mean over the streams.

A matrix tile is decoded to [columns, rows] in registers (`interleave`), so vectors of columns are read as they lie.
Products and sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.launch import launch
from strata_jax.kernels.planes import ITEM, Load, PlaneLayout, decode_tile, load_fields, lookup_table
from strata_jax.kernels.quant_matmul.tiles import PlanePart, interleave, row_loader
from strata_jax.kernels.stream_mixer.layout import MixerBlocks, MixerPlanes, MixerRead, PendingWrite, mixer_blocks

Ref = Any
Refs = Mapping[str, Ref]
_WARPS = 4


def read(
    streams: jax.Array, w: MixerPlanes, eps: float, pending: PendingWrite | None, *, interpret: bool = False
) -> MixerRead:
    """As `strata_jax.kernels.stream_mixer.read`."""
    num_tokens, num_streams, width = streams.shape
    down, up, inject = w.down, w.up, w.inject
    blocks = mixer_blocks(streams.shape, down.layout, up.layout)
    common = {"streams": streams, "norm": w.norm, "words": w.words[None]}

    operands = common | {"table": jnp.asarray(lookup_table(down.layout.type_name))}
    outs = {"sums": (blocks.parts, num_tokens, down.layout.rows), "squares": (blocks.parts, num_tokens)}
    if inject is not None:
        operands |= {"inject_table": jnp.asarray(lookup_table(inject.layout.type_name))}
        outs["inject_sums"] = blocks.parts, num_tokens, num_streams
    if pending is not None:
        operands |= {"y": pending.y, "weights": pending.inject}
        outs["written"] = streams.shape
    kernel = partial(_project, down=down, inject=inject, blocks=blocks)
    num_groups = num_tokens // blocks.tokens
    grid = blocks.parts, down.layout.rows // blocks.down_rows + 1, num_groups
    found = _launch("mixer_project", kernel, grid, operands, outs, interpret)
    streams = common["streams"] = found.pop("written", streams)

    operands = common | found | {"table": jnp.asarray(lookup_table(up.layout.type_name))}
    outs = {"mixed": (num_tokens, width)}
    if inject is not None:
        outs["weights"] = num_tokens, num_streams
    kernel = partial(_mix, up=up, blocks=blocks, eps=eps, early=num_groups == 1)
    result = _launch("mixer_mix", kernel, (width // blocks.up_rows, num_groups), operands, outs, interpret)
    return MixerRead(streams, result["mixed"], result.get("weights"))


def _launch(
    name: str,
    kernel: Any,
    grid: tuple[int, ...],
    operands: Mapping[str, jax.Array],
    outs: Mapping[str, tuple[int, ...]],
    interpret: bool,
) -> dict[str, jax.Array]:
    """Start ``kernel(refs)``, refs by name: operands, then float32 results of the shapes ``outs``."""
    names = *operands, *outs

    def with_names(*refs: Ref) -> None:
        kernel(dict(zip(names, refs, strict=True)))

    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in outs.values())
    found = launch(with_names, grid, shapes, _WARPS, name=name, interpret=interpret)(*operands.values())
    return dict(zip(outs, found, strict=True))


def _project(refs: Refs, *, down: PlanePart, inject: PlanePart | None, blocks: MixerBlocks) -> None:
    """Sums over one part's columns, of one block of rows of ``down`` or, in the last block, of all else.

    streams f32[T, C, E], norm f32[C*E], words u32[1, .], table u32[.], with inject: inject_table likewise, with a
    pending write: y f32[T, E], weights f32[T, C]
    -> sums f32[parts, T, r], squares f32[parts, T], inject_sums f32[parts, T, C], written f32[T, C, E].
    """
    num_streams, columns = refs["streams"].shape[1], blocks.items * ITEM
    part, block = pl.program_id(0), pl.program_id(1)
    tokens = [pl.program_id(2) * blocks.tokens + i for i in range(blocks.tokens)]
    parts_each = blocks.parts // num_streams
    stream = jax.lax.div(part, jnp.int32(parts_each))
    here = pl.ds((part - stream * parts_each) * columns, columns)
    items = part * blocks.items + jnp.arange(blocks.items, dtype=jnp.int32)
    num_blocks = down.layout.rows // blocks.down_rows

    def values(token: jax.Array) -> jax.Array:
        found = refs["streams"][token, stream, here]
        return found + refs["weights"][token, stream] * refs["y"][token, here] if "y" in refs else found

    def products(load: Load, table: Ref, layout: PlaneLayout) -> list[jax.Array]:
        fields = load_fields(load, layout, items)
        norm = refs["norm"][pl.ds(part * columns, columns)]
        scaled = [norm * values(token) for token in tokens]
        weights = interleave(list(decode_tile(fields, layout.type_name, lambda index: table[index])))
        return [jnp.sum(weights * x[:, None], axis=0) for x in scaled]

    @pl.when(block < num_blocks)
    def _() -> None:
        row = block * blocks.down_rows
        load = row_loader(refs["words"], 0, down, row, blocks.down_rows)
        for token, sums in zip(tokens, products(load, refs["table"], down.layout)):
            refs["sums"][part, token, pl.ds(row, blocks.down_rows)] = sums

    @pl.when(block == num_blocks)
    def _() -> None:
        for token in tokens:
            x = values(token)
            refs["squares"][part, token] = jnp.sum(x * x)
            if "written" in refs:
                refs["written"][token, stream, here] = x
        if inject is not None:
            # rows are repeated up to a tile of a usual size: those of a few rows are moved about between threads
            lane = jnp.arange(blocks.down_rows, dtype=jnp.int32)
            row_of = jnp.bitwise_and(lane, num_streams - 1)
            first = inject.first_word // num_streams
            load = lambda word: refs["words"][0, (first + word)[:, None] * num_streams + row_of[None, :]]  # noqa: E731
            for token, sums in zip(tokens, products(load, refs["inject_table"], inject.layout)):
                refs["inject_sums"][part, token, row_of] = sums  # the same sum from each lane of a row


def _mix(refs: Refs, *, up: PlanePart, blocks: MixerBlocks, eps: float, early: bool) -> None:
    """The mean over the streams of some columns.

    streams f32[T, C, E], norm f32[C*E], words u32[1, .], table u32[.] and what `_project` gives
    -> mixed f32[T, E], with inject: weights f32[T, C].

    All loads of weights come ``early``, before the sums, which they do not need, or each with its stream: so many
    registers fewer that an H200 has room for the programs of four tokens at once.
    """
    _, num_streams, width = refs["streams"].shape
    first = pl.program_id(0) * blocks.up_rows
    here = pl.ds(first, blocks.up_rows)
    tokens = [pl.program_id(1) * blocks.tokens + i for i in range(blocks.tokens)]
    item = jnp.arange(pl.next_power_of_2(up.layout.num_items), dtype=jnp.int32)
    items = jnp.minimum(item, up.layout.num_items - 1)  # of those past the end ``hidden`` is 0
    rank = jnp.arange(item.shape[0] * ITEM, dtype=jnp.int32)
    num_parts = blocks.parts // num_streams

    starts = [stream * width + first for stream in range(num_streams)]
    loads = [row_loader(refs["words"], 0, up, start, blocks.up_rows) for start in starts]
    fields: Iterable[Any] = (load_fields(load, up.layout, items) for load in loads)
    if early:
        fields = list(fields)
    scales = [_scales(refs["squares"], token, num_streams, width, eps) for token in tokens]
    hidden = []
    for token, of_streams in zip(tokens, scales):
        z = _scaled_sum(of_streams, num_parts, partial(_padded, refs["sums"], token, rank))
        hidden.append(z * _sigmoid(z))
    mixed = [jnp.zeros(blocks.up_rows, jnp.float32)] * len(tokens)
    for stream, (start, own) in enumerate(zip(starts, fields, strict=True)):
        decoded = decode_tile(own, up.layout.type_name, lambda index: refs["table"][index])
        weights = interleave(list(decoded))
        norm = refs["norm"][pl.ds(start, blocks.up_rows)]
        for i, token in enumerate(tokens):
            gate = _sigmoid(jnp.sum(weights * hidden[i][:, None], axis=0))
            mixed[i] = mixed[i] + gate * (norm * scales[i][stream] * refs["streams"][token, stream, here])
    for i, token in enumerate(tokens):
        refs["mixed"][token, here] = mixed[i] / num_streams

    if "weights" in refs:

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            for token, of_streams in zip(tokens, scales):
                z = _scaled_sum(of_streams, num_parts, partial(_whole, refs["inject_sums"], token))
                refs["weights"][token, :] = 2.0 * _sigmoid(z)


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
