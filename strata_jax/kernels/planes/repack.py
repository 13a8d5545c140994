"""GGUF blocks to planes and back in numpy: a permutation of bits.

Nearly every field lies in its block as whole 16- or 32-bit units: those move in one strided copy, whose two ends are
views of the blocks and of the planes. The other fields (Q4_K, Q5_K, Q6_K) are put together from masked and shifted
16-bit units, of many blocks at a time. Work goes through some tiles of rows at a time: a matrix of any size needs no
more memory than itself, its planes and some MiB, and threads that repack one each seldom wait for Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from strata_jax.gguf.blocks import block_type
from strata_jax.gguf.planes import PlaneLayout, Source, sources

_CHUNK_BYTES = 2**22


def to_planes(packed: np.ndarray, layout: PlaneLayout, out: np.ndarray | None = None) -> np.ndarray:
    """Repack a matrix: u8[rows, row_bytes] as the file holds it -> u32[layout.num_words]. No bit is lost.

    Args:
        out: where the words go, contiguous, and what is returned; None = a new array.

    Raises:
        ValueError: `packed` or `out` has another shape or type than the layout.
    """
    expected = (layout.rows, layout.row_bytes)
    if packed.dtype != np.uint8 or packed.shape != expected:
        raise ValueError(
            f"{layout.type_name} {layout.rows} x {layout.cols} is uint8{list(expected)}, "
            f"got {packed.dtype}{list(packed.shape)}"
        )
    words = np.empty(layout.num_words, np.uint32) if out is None else out
    if words.dtype != np.uint32 or words.shape != (layout.num_words,) or not words.flags.c_contiguous:
        raise ValueError(f"out is contiguous uint32[{layout.num_words}], got {words.dtype}{list(words.shape)}")
    if words.nbytes != packed.nbytes:
        words[:] = 0  # fields that do not fill their last word
    for blocks, planes in _chunks(np.ascontiguousarray(packed), words, layout):
        for of_blocks, of_planes in _copies(blocks, planes, layout):
            of_planes[...] = of_blocks
        if permuted := _permuted(planes, layout):
            halves = np.ascontiguousarray(_halves(blocks, layout).T)
            for source, of_planes in permuted:
                of_planes[...] = _gather_bits(halves, source).reshape(of_planes.shape)
    return words


def from_planes(words: np.ndarray, layout: PlaneLayout) -> np.ndarray:
    """Undo `to_planes`: u32[layout.num_words] -> u8[rows, row_bytes].

    Raises:
        ValueError: `words` are not u32 or of another number.
    """
    if words.dtype != np.uint32 or words.shape != (layout.num_words,):
        raise ValueError(
            f"{layout.type_name} {layout.rows} x {layout.cols} in planes is uint32[{layout.num_words}], "
            f"got {words.dtype}{list(words.shape)}"
        )
    packed = np.zeros((layout.rows, layout.row_bytes), np.uint8)
    for blocks, planes in _chunks(packed, np.ascontiguousarray(words), layout):
        for of_blocks, of_planes in _copies(blocks, planes, layout):
            of_blocks[...] = of_planes
        if permuted := _permuted(planes, layout):
            into = _halves(blocks, layout)
            halves = np.zeros((into.shape[1], into.shape[0]), np.uint16)
            for source, of_planes in permuted:
                _scatter_bits(of_planes.reshape(-1, halves.shape[1]), source, halves)
            into |= halves.T
    return packed


# Both sides of a field ------------------------------------------------------------------------------------------------


def _chunks(packed: np.ndarray, words: np.ndarray, layout: PlaneLayout) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield some row tiles at a time: u8[tiles, tile_rows, row_bytes] and their u32[tiles, row_words, tile_rows]."""
    blocks = packed.reshape(-1, layout.tile_rows, layout.row_bytes)
    planes = words.reshape(-1, layout.row_words, layout.tile_rows)
    step = max(1, _CHUNK_BYTES // (layout.tile_rows * layout.row_bytes))
    for first in range(0, len(blocks), step):
        yield blocks[first : first + step], planes[first : first + step]


def _copies(blocks: np.ndarray, planes: np.ndarray, layout: PlaneLayout) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield two views of equal shape, in the blocks and in the planes, for every field of whole units."""
    block_bytes = block_type(layout.type_name).block_bytes
    num_blocks = layout.row_bytes // block_bytes
    shape, strides = (*blocks.shape[:2], num_blocks), (*blocks.strides[:2], block_bytes)
    for i, source in enumerate(sources(layout.type_name)):
        if (units := _units(source)) is None:
            continue
        size, first, step = units
        if size == 4:
            of_planes = _field_words(planes, layout, i)
            m, k = of_planes.shape[:2]
            yield np.ndarray((m, k, *shape), "<u4", blocks, first, (k * step, step, *strides)), of_planes
            continue
        of_blocks = np.ndarray(shape, "<u2", blocks, first, strides)
        field = layout.fields[i]
        words = planes[:, field.first : field.first + field.num_words]
        for half in range(2):  # two blocks share a word
            taken = of_blocks[..., half::2]
            yield taken, words.view("<u2")[:, : taken.shape[-1], half::2].swapaxes(1, 2)


def _permuted(planes: np.ndarray, layout: PlaneLayout) -> list[tuple[Source, np.ndarray]]:
    """The other fields: bits of a block in another order. Each with its view of the planes."""
    all_sources = enumerate(sources(layout.type_name))
    return [(source, _field_words(planes, layout, i)) for i, source in all_sources if _units(source) is None]


def _field_words(planes: np.ndarray, layout: PlaneLayout, index: int) -> np.ndarray:
    """View whole words of a field: u32[words of a block / k, k, tiles, rows, blocks], k words per item or 1."""
    field, num_blocks = layout.fields[index], layout.cols // block_type(layout.type_name).block_len
    part = planes[:, field.first : field.first + field.num_words]
    part = part.reshape(len(planes), max(1, field.bits // 32), num_blocks, -1, layout.tile_rows)
    return part.transpose(3, 1, 0, 4, 2)


@cache
def _units(source: Source) -> tuple[int, int, int] | None:
    """The bytes of a field's units in a block (4, or 2 if there is one only), the first one's place and their step.

    None if the field is not such units.
    """
    bits = source.bits.reshape(-1)
    size = 4 if bits.size % 32 == 0 else 2
    runs = bits.reshape(-1, 8 * size)
    starts = runs[:, 0]
    steps = np.unique(np.diff(starts))
    whole = (runs == starts[:, None] + np.arange(8 * size)).all() and (starts % 8 == 0).all() and len(steps) <= 1
    if not whole or (size == 2 and len(runs) > 1):
        return None
    return size, int(starts[0]) // 8, int(steps[0]) // 8 if len(steps) else size


# Bits in another order ------------------------------------------------------------------------------------------------


def _halves(blocks: np.ndarray, layout: PlaneLayout) -> np.ndarray:
    """View blocks as 16-bit units: u16[blocks, block_bytes / 2]. Blocks of every type are an even number of bytes."""
    return blocks.reshape(-1, block_type(layout.type_name).block_bytes).view("<u2")


def _gather_bits(halves: np.ndarray, source: Source) -> np.ndarray:
    """Put a field together: u16[block_bytes / 2, blocks] -> u32[words of a block, blocks]."""
    found = np.zeros((source.bits.size // 16, halves.shape[1]), np.uint16)
    for into, half, shift, mask in _moves(source):
        found[into] |= _shifted(halves[half] & np.uint16(mask), shift)
    return found[0::2] | found[1::2].astype(np.uint32) << np.uint32(16)


def _scatter_bits(words: np.ndarray, source: Source, halves: np.ndarray) -> None:
    """Undo `_gather_bits`: add the bits of ``words`` to ``halves``."""
    found = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=1).astype(np.uint16)
    found = found.reshape(-1, words.shape[1])
    for into, half, shift, mask in _moves(source):
        halves[half] |= _shifted(found[into], -shift) & np.uint16(mask)


def _shifted(value: np.ndarray, shift: int) -> np.ndarray:
    return value << np.uint16(shift) if shift >= 0 else value >> np.uint16(-shift)


@cache
def _moves(source: Source) -> tuple[tuple[int, int, int, int], ...]:
    """(16-bit unit of the field, 16-bit unit of the block, shift to the left, mask of the block's bits)."""
    masks: dict[tuple[int, int, int], int] = {}
    for to, bit in enumerate(source.bits.reshape(-1).tolist()):
        key = to // 16, bit // 16, to % 16 - bit % 16
        masks[key] = masks.get(key, 0) | 1 << bit % 16
    return tuple((*key, mask) for key, mask in masks.items())
