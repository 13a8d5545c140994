"""What the stream mixer's kernels read: one mixer in planes, and how its products are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from strata_jax.kernels.planes import ITEM, PlaneLayout
from strata_jax.kernels.quant_matmul.tiles import THREAD_ROWS, PlanePart

# Of a program, chosen on an H200: the model's mixer has 120 and 160 programs of one pass over what they read. With more
# tokens they take longer to compile, and those of `project` twice as long as those of `mix`.
_MAX_ITEMS, _MAX_DOWN_ROWS, _MAX_UP_ROWS = 16, 64, 16
_MAX_DOWN_TOKENS, _MAX_UP_TOKENS = 2, 4
_HIDDEN_WARPS, _UP_WARPS = 8, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixerPlanes:
    """One residual-stream mixer: ``down: [r, C*E]``, ``up: [C*E, r]``, ``inject: [C, C*E]``, each in planes.

    Attributes:
        norm: f32[C*E].
        words: u32[n], which has all matrices. down, up: where they are.
        inject: the same; None for a mixer that is only read (the output mixers).
    """

    norm: jax.Array
    words: jax.Array
    down: PlanePart = field(metadata={"static": True})
    up: PlanePart = field(metadata={"static": True})
    inject: PlanePart | None = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixerRead:
    """What a read gives.

    Attributes:
        streams: f32[T, C, E], with the pending write carried out.
        mixed: f32[T, E], the sublayer's input.
        inject: f32[T, C], weights of the sublayer's output in each stream; None without an inject matrix.
    """

    streams: jax.Array
    mixed: jax.Array
    inject: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingWrite:
    """A sublayer's output ``y: f32[T, E]`` that the streams do not have yet, and its weights ``inject: f32[T, C]``."""

    y: jax.Array
    inject: jax.Array


@dataclass(frozen=True, slots=True)
class MixerBlocks:
    """How the three launches are cut.

    Attributes:
        items: items (of 32 columns) of one stream that a program of `project` reads, a power of two.
        parts: such parts of all streams; a row of ``down`` is summed over them in their order.
        down_rows, down_tokens, down_warps: of a program of `project`, which decodes its weights once for its tokens.
        hidden_warps: of a program of `hidden`, which has one token.
        up_rows, up_tokens, up_warps: of a program of `mix`; rows of each stream.
    """

    items: int
    parts: int
    down_rows: int
    down_tokens: int
    down_warps: int
    hidden_warps: int
    up_rows: int
    up_tokens: int
    up_warps: int


def mixer_problem(num_streams: int, width: int) -> str | None:
    """Why the kernels cannot run C = `num_streams` streams of E = `width`; None if they can."""
    if width % ITEM:
        return f"a stream of {width} columns is no whole number of items of {ITEM}"
    if num_streams & (num_streams - 1):
        return f"{num_streams} streams are no power of two"
    return None


def mixer_blocks(shape: tuple[int, ...], down: PlaneLayout, up: PlaneLayout) -> MixerBlocks:
    """Return the blocks for streams f32[T, C, E] for which there is no `mixer_problem`."""
    num_tokens, num_streams, width = shape
    num_items = width // ITEM
    items, down_rows = min(_MAX_ITEMS, num_items & -num_items), min(_MAX_DOWN_ROWS, down.tile_rows)
    down_tokens, up_tokens = (-(-num_tokens // -(-num_tokens // most)) for most in (_MAX_DOWN_TOKENS, _MAX_UP_TOKENS))
    return MixerBlocks(
        items=items,
        parts=num_streams * num_items // items,
        down_rows=down_rows,
        down_tokens=down_tokens,
        down_warps=max(1, items * down_rows // (32 * THREAD_ROWS)),
        hidden_warps=_HIDDEN_WARPS,
        up_rows=min(_MAX_UP_ROWS, up.tile_rows, width & -width),
        up_tokens=up_tokens,
        up_warps=_UP_WARPS,
    )
