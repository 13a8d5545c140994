"""How long does sparse attention take, stage by stage, in windows and in prompt chunks, beside plain jnp?

Held fixed: the model's widths, int8 cells in pages in disorder, random values; every token chooses its blocks by its
own scores. Varied: tokens, context, the sizes of the kernels' tiles. Every result is first compared: queries, scores
and outputs with plain jnp in float32 (relative error), cells and the choice of blocks word for word. A time is
one call's share of a program that makes one for each of several layers with cells and keys of their own; beside it the
time to read their bytes at the rate of a device copy in this process. "attention" is all that lies between the
projections and the output's product.

"index" has the kernels' own times by trace, which leave out what a call costs.

    python bench/kernels_attention.py [window|chunk|sizes|index ...]

It writes JSON rows to $OUT/kernels_attention.jsonl as they come; the last lines are a table.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from h200_measure import spread, times_of
from kernel_rows import Rows
from traces import kernel_us

from strata_jax.kernels.attention_inputs import CellShape, Norms, Projections, attention_inputs
from strata_jax.kernels.index_select import Blocks as IndexBlocks
from strata_jax.kernels.index_select import best_blocks, index_scores
from strata_jax.kernels.sparse_attention import Blocks, sparse_attention
from strata_jax.kv_types import cell_bytes
from strata_jax.presets import model_geometry

ON_GPU = jax.default_backend() == "gpu"  # elsewhere the references run: that only shows that the script works
G = model_geometry("synthetic_full" if ON_GPU else "synthetic_small")
KV_TYPE, PAGE_BYTES, RATIO = "int8", 65_536, 4
LAYERS = 12 if ON_GPU else 2
WINDOWS, CHUNKS = ((1, 2, 4, 8), (512, 2048, 8192)) if ON_GPU else ((2,), (64,))
CONTEXTS = (2048, 32_768, 131_072) if ON_GPU else (512,)
WINDOW_SIZES = [Blocks(32, piece, parts, warps) for piece in (32, 64, 128) for parts, warps in ((2, 4), (2, 8), (3, 8))]
CHUNK_SIZES = [Blocks(cells, 0, parts, warps) for parts in (1, 2) for cells, warps in ((32, 4), (64, 4), (64, 8))]
INDEX_SIZES = [
    IndexBlocks(), IndexBlocks(split_tokens=0), *(IndexBlocks(choose_warp_blocks=n) for n in (128, 512, 1024)),
    *(IndexBlocks(score_blocks=n) for n in (32, 128)), *(IndexBlocks(score_programs=n) for n in (132, 528)),
    IndexBlocks(score_blocks=32, score_programs=528), IndexBlocks(score_warps=8),
]  # fmt: skip
CALLS = 10  # of a traced program
INDEX_KERNELS = "_score_kernel", "_choose_kernel"
INDEX_CASES = ((1, 2800), (1, 32_768), (1, 131_072), (4, 131_072)) if ON_GPU else ((2, 512),)
SIDES = cell_bytes(KV_TYPE, G.num_kv_heads, G.head_dim)
PAGE_CELLS = PAGE_BYTES // sum(SIDES) // RATIO * RATIO
KEPT = G.index_top_k // RATIO
BACKEND = "triton" if ON_GPU else "reference"
ROWS = Rows("kernels_attention")
# jitted: calls of one shape are lowered and compiled once in the programs that make many of them
INPUTS = jax.jit(attention_inputs, static_argnames=("shape", "backend"))
SCORES = jax.jit(index_scores, static_argnames=("backend", "blocks"))
CHOICE = jax.jit(best_blocks, static_argnames=("num_kept", "backend", "blocks"))
ATTEND = jax.jit(sparse_attention, static_argnames=("ratio", "kv_type", "cells_per_page", "backend", "sizes"))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def rel_err(found: Any, expected: Any) -> float:
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


class Layers:
    """Cells and index keys of some layers in one arena, filled up to `context`, and what a window brings."""

    def __init__(self, tokens: int, context: int) -> None:
        self.tokens, self.context = tokens, context
        num_cells = context + 8192
        groups = -(-num_cells // PAGE_CELLS)
        self.shape = CellShape(KV_TYPE, G.num_kv_heads, PAGE_CELLS, num_cells, RATIO, G.rope_dim, G.rope_base, 1e-6)
        order = np.random.default_rng(0).permutation(LAYERS * groups).astype(np.int32)
        self.pages = [jnp.asarray(part) for part in np.split(order, LAYERS)]
        self.arena = jax.jit(partial(_arena, LAYERS * groups))()
        self.keys = [normal(i, num_cells // RATIO + 1, G.index_dim) for i in range(LAYERS)]
        heads, index = G.num_heads * 2 * G.head_dim, G.index_heads * G.index_dim
        side = G.num_kv_heads * G.head_dim
        self.projected = Projections(*(normal(50 + i, tokens, n) for i, n in enumerate((heads, side, side, index,
                                                                                       G.index_dim))))  # fmt: skip
        self.norms = Norms(*(jnp.ones(n) for n in (G.head_dim, G.head_dim, G.index_dim, G.index_dim)))
        self.tail = normal(60, RATIO - 1, G.index_dim)
        self.start, self.count = jnp.int32(context - tokens), jnp.int32(tokens)

    def inputs(self, arena: jax.Array, keys: jax.Array, pages: jax.Array, backend: str) -> Any:
        rest = self.tail, pages, self.start, self.count, arena, keys
        return INPUTS(self.projected, self.norms, *rest, shape=self.shape, backend=backend)

    def attend(self, q: jax.Array, arena: jax.Array, pages: jax.Array, blocks: jax.Array, positions: jax.Array,
               backend: str, sizes: Blocks | None = None) -> jax.Array:  # fmt: skip
        return ATTEND(
            q, arena, pages, blocks, positions, ratio=RATIO, kv_type=KV_TYPE, cells_per_page=PAGE_CELLS,
            backend=backend, sizes=sizes,
        )  # fmt: skip

    def time(self, op: str, call: Any, *args: Any, num_bytes: float, copy_gb_s: float, kept: int = 0, **notes: Any
             ) -> None:  # fmt: skip
        """Time a program of one call for each layer; ``num_bytes`` is what a layer must read.

        The first ``kept`` arguments are updated in place: they come back as the first results.
        """
        started = time.perf_counter()
        program = jax.jit(call, donate_argnums=tuple(range(kept))).lower(*args).compile()
        compile_s = time.perf_counter() - started
        state = list(args[:kept])

        def run() -> Any:
            results = program(*state, *args[kept:])
            state[:] = results[:kept]
            return results

        seconds = [s / LAYERS for s in times_of(run, repeats=20 if self.tokens < 64 else 7)]
        ROWS.record(op=op, tokens=self.tokens, context=self.context, **spread(seconds), compile_s=compile_s,
               bytes_ms=num_bytes / copy_gb_s / 1e6, **notes)  # fmt: skip


def _arena(num_pages: int) -> jax.Array:
    """Random codes, and scales between 2^-7 and 2^-6."""
    words = jax.random.bits(jax.random.key(9), (num_pages, PAGE_BYTES // 4), jnp.uint32)
    codes, side = G.num_kv_heads * G.head_dim // 4, SIDES[0] // 4  # keys and values have the same format
    place = jnp.arange(PAGE_BYTES // 4) % side
    return jnp.where(place < codes, words, words & jnp.uint32(0x03FF03FF) | jnp.uint32(0x20002000))


def stages(tokens: int, context: int, copy_gb_s: float) -> None:
    layers = Layers(tokens, context)
    arena, keys, pages = layers.arena, layers.keys[0], layers.pages[0]
    made, expected = (layers.inputs(arena, keys, pages, backend) for backend in (BACKEND, "reference"))
    scores, plain = (SCORES(made.index_q, made.keys, made.seen, backend=b) for b in (BACKEND, "reference"))
    seen = int(made.seen[0])
    blocks, choice = (CHOICE(scores, made.seen, num_kept=KEPT, backend=b) for b in (BACKEND, "reference"))
    # plain jnp gathers all kept cells in float32: few tokens at a time
    few = slice(0, 8)
    args = made.q[few], made.arena, pages, blocks[few], made.positions[few]
    out = layers.attend(made.q, made.arena, pages, blocks, made.positions, BACKEND)
    ROWS.record(
        op="check", tokens=tokens, context=context, q=rel_err(made.q, expected.q),
        keys=rel_err(made.keys, expected.keys), cells_differ=int((made.arena != expected.arena).sum()),
        scores=rel_err(scores[:, :seen], plain[:, :seen]), blocks_differ=int((blocks != choice).sum()),
        out=rel_err(out[few], layers.attend(*args, "reference")),
    )  # fmt: skip
    key_bytes, cell = context // RATIO * G.index_dim * 4, sum(SIDES)
    kept_bytes = min(context, G.index_top_k) * cell * tokens
    timed = partial(layers.time, copy_gb_s=copy_gb_s)

    def all_scores(q: jax.Array, keys: Any, seen: jax.Array) -> Any:
        return [SCORES(q, k, seen, backend=BACKEND) for k in keys]

    def all_choices(scores: Any, seen: jax.Array) -> Any:
        return [CHOICE(s, seen, num_kept=KEPT, backend=BACKEND) for s in scores]

    def all_outputs(q: jax.Array, arena: jax.Array, pages: Any, blocks: jax.Array, positions: jax.Array) -> Any:
        return [layers.attend(q, arena, p, blocks, positions, BACKEND) for p in pages]

    timed("scores", all_scores, made.index_q, layers.keys, made.seen, num_bytes=key_bytes)
    timed("choice", all_choices, [scores + i for i in range(LAYERS)], made.seen, num_bytes=scores.nbytes)
    attend_args = made.q, made.arena, layers.pages, blocks, made.positions
    timed("kept cells", all_outputs, *attend_args, num_bytes=kept_bytes)
    for backend in dict.fromkeys((BACKEND, "reference") if tokens <= 8 else (BACKEND,)):

        def whole(arena: jax.Array, keys: Any, pages: Any, backend: str = backend) -> Any:
            outs, new_keys = [], []
            for k, p in zip(keys, pages):
                made = layers.inputs(arena, k, p, backend)
                scores = SCORES(made.index_q, made.keys, made.seen, backend=backend)
                blocks = CHOICE(scores, made.seen, num_kept=KEPT, backend=backend)
                outs.append(layers.attend(made.q, made.arena, p, blocks, made.positions, backend))
                arena = made.arena
                new_keys.append(made.keys)
            return arena, new_keys, outs

        state = jax.tree.map(jnp.copy, (arena, layers.keys))
        num_bytes = key_bytes + kept_bytes
        timed("attention", whole, *state, layers.pages, num_bytes=num_bytes, kept=2, backend=backend)


def section_window(copy_gb_s: float) -> None:
    for context in CONTEXTS:
        for tokens in WINDOWS:
            stages(tokens, context, copy_gb_s)


def section_chunk(copy_gb_s: float) -> None:
    for tokens, context in ((t, c) for t in CHUNKS for c in CONTEXTS if t <= c and (t <= 2048 or c < 131_072)):
        stages(tokens, context, copy_gb_s)


def section_sizes(copy_gb_s: float) -> None:
    """Other tiles for the kernel that attends."""
    cases = [(1, WINDOW_SIZES), (4, WINDOW_SIZES), (2048, CHUNK_SIZES)] if ON_GPU else [(2, WINDOW_SIZES[:1])]
    for tokens, choices in cases:
        layers = Layers(tokens, CONTEXTS[len(CONTEXTS) // 2])
        made = layers.inputs(layers.arena, layers.keys[0], layers.pages[0], BACKEND)
        scores = SCORES(made.index_q, made.keys, made.seen, backend=BACKEND)
        blocks = CHOICE(scores, made.seen, num_kept=KEPT, backend=BACKEND)
        args = made.q, made.arena, layers.pages, blocks, made.positions
        for sizes in choices:

            def call(q: Any, arena: Any, pages: Any, *rest: Any, sizes: Blocks = sizes, layers: Layers = layers) -> Any:
                return [layers.attend(q, arena, p, *rest, BACKEND, sizes) for p in pages]

            num_bytes = min(layers.context, G.index_top_k) * sum(SIDES) * tokens
            layers.time(f"{sizes}", call, *args, num_bytes=num_bytes, copy_gb_s=copy_gb_s)


def section_index(copy_gb_s: float) -> None:
    """Other sizes for the kernels that score and choose."""
    for tokens, context in INDEX_CASES:
        layers = Layers(tokens, context)
        made = layers.inputs(layers.arena, layers.keys[0], layers.pages[0], BACKEND)
        for sizes in INDEX_SIZES:

            def all_layers(q: jax.Array, keys: Any, seen: jax.Array, sizes: IndexBlocks = sizes) -> Any:
                how: Any = {"backend": BACKEND, "blocks": sizes}
                scores = [SCORES(q, k, seen, **how) for k in keys]
                return [CHOICE(s, seen, num_kept=KEPT, **how) for s in scores]

            program, args = jax.jit(all_layers), (made.index_q, layers.keys, made.seen)
            jax.block_until_ready(program(*args))
            us = kernel_us(lambda p=program, a=args: [p(*a) for _ in range(CALLS)], INDEX_KERNELS, CALLS * LAYERS)
            bytes_us = context // RATIO * G.index_dim * 4 / copy_gb_s / 1e3
            ROWS.record(
                op="index", tokens=tokens, context=context, scores_us=us[INDEX_KERNELS[0]],
                choice_us=us[INDEX_KERNELS[1]], scores_bytes_us=bytes_us, sizes=f"{sizes}",
            )  # fmt: skip


if __name__ == "__main__":
    sections = {"window": section_window, "chunk": section_chunk, "sizes": section_sizes, "index": section_index}
    ROWS.run(sections)
