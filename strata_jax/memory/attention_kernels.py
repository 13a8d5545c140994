"""Which attention layers the GPU kernels can compute: a question of sizes alone.

The kernels (``kernels/index_select``, ``kernels/sparse_attention``) choose blocks and attend to them in packed cells.
Their tiles have sides that are powers of two, none below 16 values. No JAX here: the planner asks, too.
"""

from __future__ import annotations

from strata_jax.geometry import Geometry
from strata_jax.kv_types import sides

MIN_SIDE = 16  # a product on tensor cores takes no narrower tile
WINDOW_PIECE_CELLS = 64  # cells of a token that one program of a window reads; the pieces are added up afterwards
MAX_BLOCK_CELLS = 32  # cells of a block: it lies in one tile of the kernel
TILES_OF_HEAD = {"f32": 1, "f16": 2, "bf16": 2, "int8": 4, "q4_0": 8}
"""Tiles that a head of each format is decoded into: the values that share a 32-bit word."""


def attention_problem(g: Geometry, ratio: int, kv_type: str) -> str | None:
    """Return why the kernels cannot compute attention with blocks of `ratio` cells; None if they can."""
    if ratio == 0:
        return "dense attention is computed by the reference"
    powers = {
        "cells of a block": ratio,
        "K/V heads": g.num_kv_heads,
        "head size": g.head_dim,
        "index heads": g.index_heads,
        "index head size": g.index_dim,
    }
    for name, value in powers.items():
        if value < 1 or value & (value - 1):
            return f"{name}: {value} is no power of two"
    if not 2 <= ratio <= MAX_BLOCK_CELLS:
        return f"blocks have {ratio} cells, not 2 to {MAX_BLOCK_CELLS}"
    least = MIN_SIDE * max(TILES_OF_HEAD[side] for side in sides(kv_type))
    if g.head_dim < least:
        return f"heads of {g.head_dim} values are smaller than {least}, which kv.type={kv_type} needs"
    if g.index_dim < MIN_SIDE:
        return f"index heads of {g.index_dim} values are smaller than {MIN_SIDE}"
    return None


def attention_notes(g: Geometry, kv_type: str) -> tuple[str, ...]:
    """Say which attention layers the reference computes in a run with kernels, and why."""
    layers: dict[str, list[int]] = {}
    for layer in g.attention_layers:
        problem = attention_problem(g, g.compress_ratio[layer], kv_type)
        if problem is not None:
            layers.setdefault(problem, []).append(layer)
    return tuple(
        f"engine.kernels: attention in {'block' if len(where) == 1 else 'blocks'} {', '.join(map(str, where))} is"
        f" computed by the reference: {problem}"
        for problem, where in layers.items()
    )
