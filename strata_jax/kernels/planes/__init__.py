"""Packed matrices as planes of 32-bit words: what GPU kernels read instead of GGUF blocks.

GGUF blocks are 18 to 210 bytes long, so a thread that reads them makes unaligned, uncoalesced accesses. Planes hold the
same bits in another order. A row is cut into *items* of 32 weights; its row string lists, field by field, what all
items have (codes, signs, scales, ...). Rows are then grouped in tiles of `tile_rows`, and each tile is transposed, so
that one line of a tile is the same word of `tile_rows` neighbouring rows: u32[row_tiles, row_words, tile_rows]. Fields
of fewer than 32 bits share a word with those of the next items of the same row, never with another row. A matrix keeps
its number of bytes, except that a row's field is padded to whole words (at the widths of the model: nothing).

    layout = plane_layout("IQ3_XXS", rows=640, cols=2560)       # static; sizes and offsets in words
    words = to_planes(packed, layout)                           # numpy u8[rows, row_bytes] -> u32[layout.num_words]
    packed = from_planes(words, layout)                         # its inverse
    matrix = decode_planes(words, layout)                       # jnp: f32[rows, cols], equal to `dequantize` to the bit

Inside a kernel, for J items and R rows at a time (every array is [J, R]: rows contiguous, items outside):

    items = first_item + jnp.arange(J)                          # i32[J], item j holds columns 32 j ... 32 j + 31
    fields = load_fields(load, layout, items)                   # all the loads, nothing else
    for s, tile in enumerate(decode_tile(fields, layout.type_name, lookup)):   # s = 0 ... 31, in order
        ...                                                     # tile: f32[J, R], weights of columns 32 * items + s

`load(word)` gets i32[J] (index into the row string) and returns u32[J, R]: word `word[j]` of R rows of one row tile.
In a matrix that starts at word `first` of an array, word w of row r lies at
``first + ((r // tile_rows) * row_words + w) * tile_rows + r % tile_rows`` (`word_address`).
`lookup(index)` gets u32[J, R] and returns ``lookup_table(type_name)[index]``, a small u32 table that the kernel has as
an operand (types without a codebook never call it).

A product need not scale every weight: `decode_codes` yields unscaled codes (whole numbers up to 127 in magnitude, exact
in bfloat16), `decode_scales` one or two scales per item (two: of weights 0-15 and 16-31) and `decode_offset` what is
added to each weight of an item, or None:  weight = code * scale + offset.
`quads.decode_quads` gives the codes as signed bytes, four to a word, for integer dot products.
"""

from __future__ import annotations

from strata_jax.gguf.planes import (
    ITEM,
    MAX_TILE_ROWS,
    PLANE_TYPES,
    Field,
    PlaneLayout,
    plane_layout,
    word_address,
)
from strata_jax.kernels.planes.decode import (
    Load,
    Lookup,
    decode_codes,
    decode_offset,
    decode_plane_rows,
    decode_planes,
    decode_scales,
    decode_tile,
    fields_of,
    load_fields,
    lookup_table,
    raw_words,
)
from strata_jax.kernels.planes.repack import from_planes, to_planes

__all__ = [
    "ITEM",
    "MAX_TILE_ROWS",
    "PLANE_TYPES",
    "Field",
    "Load",
    "Lookup",
    "PlaneLayout",
    "decode_codes",
    "decode_offset",
    "decode_plane_rows",
    "decode_planes",
    "decode_scales",
    "decode_tile",
    "fields_of",
    "from_planes",
    "load_fields",
    "lookup_table",
    "plane_layout",
    "raw_words",
    "to_planes",
    "word_address",
]
