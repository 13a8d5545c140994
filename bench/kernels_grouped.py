"""How near do the grouped and the dense products on packed weights come to what the GPU can do?

Held fixed: the model's shapes (width 2,560, 512 experts of 640, 10 a token), random weights in planes, random tokens,
routing by noisy scores with a mild skew. Varied: types, tokens of a chunk, block sizes, where experts lie. Every timed
variant is first checked: results start as NaN, rows of several experts are compared with float64 products of the same
blocks decoded by the `gguf` package. Beside each: XLA's bfloat16 product of the same size on decoded weights (cuBLAS),
the time in which the layer's experts would come over the bus, and the time to read their bytes from device memory.

    python bench/kernels_grouped.py [seconds] [arena|dense|grouped|types ...]

arena: experts that span pages of an arena above 8 GiB and of a second array, and experts read straight from host
memory. It writes JSON rows to $OUT/kernels_grouped.jsonl as they come and a table at the end.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from kernels_expert_gemv import matrix_of

from strata_jax.kernels.expert_gemv import ExpertLayout, LaunchBlocks, expert_layout
from strata_jax.kernels.grouped_matmul import (
    Blocks,
    Source,
    TileMap,
    arena_sources,
    choose_blocks,
    combine,
    grouped_down,
    grouped_swiglu,
    sort_pairs,
    tile_map,
)
from strata_jax.kernels.planes import PLANE_TYPES, PlaneLayout, decode_planes, plane_layout
from strata_jax.kernels.quant_matmul import MatmulBlocks, PlanePart
from strata_jax.kernels.quant_matmul import triton as dense
from strata_jax.kernels.quant_matmul.blocks import choose_gemv_launch, choose_matmul_blocks

WIDTH, EXPERT_WIDTH, NUM_EXPERTS, NUM_USED = 2560, 640, 512, 10
PAGE_WORDS = 4096
PAD = 256
CHECKED_ROWS = 64
START = time.time()
ARGS = sys.argv[1:]
LIMIT_S = float(ARGS[0]) if ARGS and ARGS[0].replace(".", "").isdigit() else 95.0
OUT = Path(os.environ.get("OUT", "."))
POOL = ThreadPoolExecutor(max(2, (os.cpu_count() or 4) - 2))
TABLE: list[str] = []
ROOFS: dict[str, float] = {}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}  # trying out Triton products takes XLA seconds for each shape


def left() -> float:
    return LIMIT_S - (time.time() - START)


def record(**row: Any) -> None:
    """Write one row and remember it for the table."""
    row["at_s"] = round(time.time() - START, 1)
    with (OUT / "kernels_grouped.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    line = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if k != "at_s")
    TABLE.append(line)
    print(f"[{row['at_s']:5.1f}] {line}", flush=True)


def median_ms(call: Callable[[], Any], repeats: int = 7, inner: int = 3) -> float:
    """Median time of one call, `inner` of them in flight; 21 calls after 2 to warm up."""
    jax.block_until_ready(call())
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / inner * 1e3)
    return statistics.median(times)


def rel_err(got: Any, expected: np.ndarray) -> float:
    """NaN if anything is not finite."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected))


def guarded(fn: Callable[..., Any], *args: Any, **names: Any) -> Any:
    """Run one part; what goes wrong is a row, not the end."""
    if left() < 3:
        record(op=fn.__name__, skipped="out of time", **names)
        return None
    try:
        return fn(*args)
    except Exception as error:
        short = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        record(op=fn.__name__, error=short, where=traceback.format_exc()[-300:].replace("\n", " "), **names)
        return None


# Compilation in the background ----------------------------------------------------------------------------------------


def start(
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    shardings: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Future[Any]:
    """Trace now, compile in the pool."""
    try:
        more = {} if shardings is None else {"in_shardings": shardings}
        lowered = jax.jit(fn, donate_argnums=donate, **more).lower(*args)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

    def compile_it() -> Any:
        try:
            return lowered.compile(compiler_options=dict(options) if options else None)
        except Exception:
            if not options:
                raise
            return lowered.compile()  # a compiler that no longer knows the options

    return POOL.submit(compile_it)


def wait(future: Future[Any]) -> Any:
    return future.result(timeout=max(5.0, left()))


# Data -----------------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(1, 2))
def random_words(key: jax.Array, parts: tuple[PlaneLayout, ...], count: int) -> jax.Array:
    """u32[count, words of the parts]: random bits; f16 fields between 2^-7 and 2^-6, so that weights are finite."""
    size = sum(part.num_words for part in parts)
    # one hash of the place: random enough here, and made in one pass
    at = jax.lax.broadcasted_iota(jnp.uint32, (count, size), 0) * np.uint32(size)
    at = at + jax.lax.broadcasted_iota(jnp.uint32, (count, size), 1) + jax.random.bits(key, (), jnp.uint32)
    for factor in (0x7FEB352D, 0x846CA68B):
        at = (at ^ (at >> np.uint32(16))) * np.uint32(factor)
    words, first = at ^ (at >> np.uint32(15)), 0
    pieces = []
    for part in parts:
        tiles = words[:, first : first + part.num_words].reshape(count, -1, part.row_words, part.tile_rows)
        place = np.arange(part.row_words)
        halves = np.zeros(part.row_words, bool)
        for field in part.fields:
            if field.name in ("d", "m"):
                halves |= (place >= field.first) & (place < field.first + field.num_words)
        small = tiles & np.uint32(0x03FF03FF) | np.uint32(0x20002000)
        pieces.append(jnp.where(halves[:, None], small, tiles).reshape(count, -1))
        first += part.num_words
    return jnp.concatenate(pieces, axis=1)


def routing(num_tokens: int, num_experts: int) -> jax.Array:
    """Ascending expert numbers of each token, i32[T, K]: hot experts get about five times the mean load."""
    rng = np.random.default_rng(num_tokens)
    bias = -0.35 * np.log(1 + np.arange(num_experts))
    rng.shuffle(bias)
    scores = bias + rng.gumbel(size=(num_tokens, num_experts))
    return jnp.asarray(np.sort(np.argsort(-scores, axis=1)[:, :NUM_USED], axis=1).astype(np.int32))


class Layer:
    """A layer's experts, one blob a line; decoded matrices of those that are checked."""

    def __init__(self, gate_type: str, down_type: str, num_experts: int = NUM_EXPERTS) -> None:
        self.layout: ExpertLayout = expert_layout(gate_type, gate_type, down_type, WIDTH, EXPERT_WIDTH)
        self.words = random_words(jax.random.key(1), self.layout.parts, num_experts)
        self.lines = jnp.arange(num_experts, dtype=jnp.int32)
        self.num_bytes = self.words.size * 4
        self.matrix = cache(self._matrix)

    def _matrix(self, expert: int, part: int) -> np.ndarray:
        first, layout = self.layout.firsts[part], self.layout.parts[part]
        blob = np.asarray(jax.lax.dynamic_index_in_dim(self.words, expert, keepdims=False))
        return matrix_of(blob[first : first + layout.num_words], layout).astype(np.float64)

    def hidden(self, x: np.ndarray, expert: int) -> np.ndarray:
        gate, up = (x @ self.matrix(expert, part).T for part in range(2))
        return gate / (1 + np.exp(-gate)) * up


class Chunk:
    """The tokens of a chunk and their routing; which rows of which experts are checked."""

    def __init__(self, num_tokens: int, num_experts: int = NUM_EXPERTS, check_all: bool = False) -> None:
        self.num_tokens = num_tokens
        self.ids = routing(num_tokens, num_experts)
        self.u = jax.random.normal(jax.random.key(num_tokens), (num_tokens, WIDTH), jnp.bfloat16)
        self.pairs = jax.jit(sort_pairs, static_argnums=(1, 2))(self.ids, num_experts, PAD)
        self.num_rows = num_tokens * NUM_USED + PAD
        self.counts, first = np.asarray(self.pairs.count), np.asarray(self.pairs.first)
        used = [int(e) for e in np.argsort(self.counts) if self.counts[e]]
        some = used if check_all else sorted({used[-1], used[len(used) // 2], used[0], int(max(used))})
        self.rows = {
            e: np.linspace(first[e], first[e] + self.counts[e] - 1, CHECKED_ROWS).round().astype(np.int32) for e in some
        }
        self.token_of, self.tokens = np.asarray(self.pairs.token_of), np.asarray(self.u, np.float32)

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * NUM_USED

    def tiles(self, blocks: Blocks) -> TileMap:
        return to_tiles(self.pairs, blocks.rows)


to_tiles = jax.jit(tile_map, static_argnums=1)
some_rows = jax.jit(lambda x, rows: x[rows].astype(jnp.float32))


@jax.jit
def num_bad(x: jax.Array, total: jax.Array) -> jax.Array:
    """How many rows that should be filled are not finite."""
    return jnp.sum(~jnp.all(jnp.isfinite(x), axis=1) & (jnp.arange(x.shape[0]) < total))


def tag(op: str, blocks: Blocks) -> str:
    if blocks.rings is not None:
        ring = blocks.rings[OPS.index(op)]
        return f"Mosaic M{'/'.join(map(str, ring.rows))} S{ring.stages} B{ring.batch}"
    cut = blocks.swiglu if op == "swiglu" else blocks.down
    return f"M{blocks.rows} R{cut.rows} w{cut.warps}{' swap' if blocks.swap else ''}"


# Grouped --------------------------------------------------------------------------------------------------------------


def submit(op: str, layout: ExpertLayout, chunk: Chunk, blocks: Blocks, words: Any, host: Any = None) -> Future[Any]:
    """Compile one of the two products: a call of (result, input, token_of, tiles, words, lines)."""
    out, x = inputs(op, chunk, jax.ShapeDtypeStruct)

    def fn(
        out: jax.Array, x: jax.Array, token_of: jax.Array, tiles: TileMap, words: jax.Array, lines: jax.Array
    ) -> jax.Array:
        if op == "swiglu":
            return grouped_swiglu(x, token_of, tiles, [Source(words, lines)], layout, out, blocks)
        return grouped_down(x, tiles, [Source(words, lines)], layout, out, blocks)

    lines = jax.ShapeDtypeStruct(chunk.counts.shape, jnp.int32)
    words, shardings = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=host), None
    if host is not None:
        shardings = (None, None, None, None, host, None)
    tiles = chunk.tiles(blocks)
    return start(fn, out, x, chunk.pairs.token_of, tiles, words, lines, donate=(0,), shardings=shardings)


def inputs(op: str, chunk: Chunk, make: Callable[[tuple[int, int], Any], Any]) -> tuple[Any, Any]:
    """Result and input, made by ``make(shape, dtype)``; the input of swiglu is the chunk's tokens."""
    if op == "swiglu":
        return make((chunk.num_rows, EXPERT_WIDTH), jnp.bfloat16), chunk.u
    return make((chunk.num_rows, WIDTH), jnp.float32), make((chunk.num_rows, EXPERT_WIDTH), jnp.bfloat16)


def start_values(op: str, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
    """A result of NaN, and the input."""
    out, _ = inputs(op, chunk, lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    if op == "swiglu":
        return out, chunk.u
    return out, jax.random.normal(jax.random.key(3), (chunk.num_rows, EXPERT_WIDTH), jnp.bfloat16)


def error_of(op: str, layer: Layer, chunk: Chunk, x: jax.Array, got: jax.Array) -> float:
    """The largest error of a checked expert; NaN if a row is missing."""
    if int(num_bad(got, jnp.int32(chunk.num_pairs))):
        return float("nan")
    errors = []
    for expert, rows in chunk.rows.items():
        if op == "swiglu":
            exact = layer.hidden(chunk.tokens[chunk.token_of[rows]].astype(np.float64), expert)
        else:
            exact = np.asarray(some_rows(x, rows), np.float64) @ layer.matrix(expert, 2).T
        errors.append(rel_err(some_rows(got, rows), exact))
    return max(errors)


def run_grouped(
    op: str, layer: Layer, chunk: Chunk, blocks: Blocks, job: Future[Any], words: jax.Array, **more: Any
) -> None:
    compiled, tiles = wait(job), chunk.tiles(blocks)
    out, x = start_values(op, chunk)
    state = [compiled(out, x, chunk.pairs.token_of, tiles, words, layer.lines)]
    error = error_of(op, layer, chunk, x, state[0])

    def call() -> jax.Array:  # into the same result again and again
        state[0] = compiled(state[0], x, chunk.pairs.token_of, tiles, words, layer.lines)
        return state[0]

    ms = median_ms(call)
    parts = layer.layout.parts[:2] if op == "swiglu" else layer.layout.parts[2:]
    flop = 2 * chunk.num_pairs * sum(part.rows * part.cols for part in parts)
    num_tiles = int(tiles.num[0])
    record(op=op, type=parts[0].type_name, tokens=chunk.num_tokens, blocks=tag(op, blocks), ms=ms,
           tflops=flop / ms / 1e9, tiles_per_expert=num_tiles / int((chunk.counts > 0).sum()),
           part_mb=len(layer.lines) * sum(part.num_words for part in parts) * 4e-6, **more,
           rel_err=error, ok=error < 5e-3)  # fmt: skip


def section_grouped() -> None:
    kind = jax.devices()[0].device_kind
    layer = Layer("IQ3_XXS", "IQ4_NL")
    record(op="bytes", types="IQ3_XXS/IQ4_NL", layer_mb=layer.num_bytes / 1e6,
           stream_ms_at_49_5=layer.num_bytes / 49.5e6, hbm_ms=layer.num_bytes / ROOFS["hbm"] / 1e6)  # fmt: skip
    narrow = Blocks(16, LaunchBlocks(64, 4), LaunchBlocks(64, 4), swap=True)
    jobs: list[Any] = []
    chunks = [Chunk(tokens) for tokens in (2048, 512, 8192)]
    for chunk in chunks:
        chosen = choose_blocks(chunk.num_pairs / NUM_EXPERTS, layer.layout.tile_rows, kind)
        variants = [chosen, narrow] if chunk.num_tokens == 512 else [chosen]
        if chosen.rings is not None:
            variants.append(replace(chosen, rings=None))  # the same tiles by Triton
        for blocks in variants:
            jobs += [(op, chunk, blocks, submit(op, layer.layout, chunk, blocks, layer.words)) for op in OPS]
        jobs.append(("layer", chunk, chosen, submit_layer(layer, chunk, chosen)))
        jobs.append(("xla", chunk, chosen, submit_batched(chunk)))
    for op, chunk, blocks, job in jobs:
        if op == "layer":
            guarded(run_layer, layer, chunk, blocks, job, tokens=chunk.num_tokens)
        elif op == "xla":
            guarded(run_batched, chunk, job, tokens=chunk.num_tokens)
        else:
            guarded(run_grouped, op, layer, chunk, blocks, job, layer.words, blocks=tag(op, blocks))


OPS = ("swiglu", "down")


def submit_layer(layer: Layer, chunk: Chunk, blocks: Blocks) -> Future[Any]:
    """Sorting, tile map, both products and the weighted sum in one program."""

    def fn(u: jax.Array, ids: jax.Array, weights: jax.Array, words: jax.Array, lines: jax.Array) -> jax.Array:
        pairs = sort_pairs(ids, NUM_EXPERTS, blocks.rows)
        tiles = tile_map(pairs, blocks.rows)
        h = jnp.zeros((pairs.token_of.shape[0], EXPERT_WIDTH), jnp.bfloat16)
        h = grouped_swiglu(u, pairs.token_of, tiles, [Source(words, lines)], layer.layout, h, blocks)
        y = jnp.zeros((pairs.token_of.shape[0], WIDTH), jnp.float32)
        y = grouped_down(h, tiles, [Source(words, lines)], layer.layout, y, blocks)
        return combine(y, pairs, weights)

    return start(fn, chunk.u, chunk.ids, jnp.ones(chunk.ids.shape), layer.words, layer.lines)


def run_layer(layer: Layer, chunk: Chunk, blocks: Blocks, job: Future[Any]) -> None:
    compiled = wait(job)
    weights = jax.random.uniform(jax.random.key(5), chunk.ids.shape)
    got = compiled(chunk.u, chunk.ids, weights, layer.words, layer.lines)
    ms = median_ms(lambda: compiled(chunk.u, chunk.ids, weights, layer.words, layer.lines))
    temp = compiled.memory_analysis().temp_size_in_bytes
    finite = bool(jnp.isfinite(got).all())
    record(op="whole layer", tokens=chunk.num_tokens, rows=blocks.rows, ms=ms, stream_ms=layer.num_bytes / 49.5e6,
           tok_s_48_layers=chunk.num_tokens / (ms * 48e-3), temp_mb=temp / 1e6, ok=finite)  # fmt: skip


def submit_batched(chunk: Chunk) -> Future[Any]:
    """XLA's product of decoded weights, every expert with the mean number of rows (padded to 16)."""
    rows = -(-chunk.num_pairs // NUM_EXPERTS // 16) * 16
    x = jax.ShapeDtypeStruct((NUM_EXPERTS, rows, WIDTH), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((NUM_EXPERTS, WIDTH, 2 * EXPERT_WIDTH), jnp.bfloat16)
    product = partial(jnp.einsum, "xrk,xkn->xrn", preferred_element_type=jnp.bfloat16)
    return start(product, x, w, options=CUBLAS)


def run_batched(chunk: Chunk, job: Future[Any]) -> None:
    compiled = wait(job)
    rows = -(-chunk.num_pairs // NUM_EXPERTS // 16) * 16
    x, w = (jnp.ones((NUM_EXPERTS, *shape), jnp.bfloat16) for shape in ((rows, WIDTH), (WIDTH, 2 * EXPERT_WIDTH)))
    ms = median_ms(lambda: compiled(x, w))
    flop = 2 * NUM_EXPERTS * rows * WIDTH * 2 * EXPERT_WIDTH
    record(op="XLA bf16 gate+up, decoded", tokens=chunk.num_tokens, rows=rows, ms=ms, tflops=flop / ms / 1e9)


# Every type -----------------------------------------------------------------------------------------------------------


TYPES = [
    ("IQ3_S", "Q2_0"), ("IQ2_S", "Q8_0"), ("IQ2_XS", "Q5_1"), ("Q2_0", "Q4_0"), ("IQ4_XS", "Q5_0"), ("Q4_K", "IQ4_NL"),
    ("Q5_K", ""), ("Q6_K", ""), ("Q8_0", ""), ("IQ4_NL", ""), ("IQ2_XXS", ""),
]  # fmt: skip


def section_types() -> None:
    """Each expert type in the grouped products: right, and how long at 2,048 tokens."""
    chunk = Chunk(2048)
    blocks = choose_blocks(chunk.num_pairs / NUM_EXPERTS, 128, jax.devices()[0].device_kind)
    jobs = []
    for gate, down in TYPES:
        layout = expert_layout(gate, gate, down or "Q2_0", WIDTH, EXPERT_WIDTH)
        words = jax.ShapeDtypeStruct((NUM_EXPERTS, layout.num_words), jnp.uint32)
        ops = OPS if down else OPS[:1]
        jobs.append((gate, down or "Q2_0", [(op, submit(op, layout, chunk, blocks, words)) for op in ops]))
    for gate, down, products in jobs:
        layer = guarded(Layer, gate, down, type=gate)
        for op, job in products if layer else ():
            guarded(run_grouped, op, layer, chunk, blocks, job, layer.words, type=gate, blocks=tag(op, blocks))


# Where experts lie ----------------------------------------------------------------------------------------------------


def section_arena() -> None:
    """Experts that span pages of two arrays, one of more than 2^31 words; experts in host memory."""
    kind = jax.devices()[0].device_kind
    few = Layer("IQ3_XXS", "IQ4_NL", 24)
    chunk = Chunk(256, 24, check_all=True)
    core_pages = int(os.environ.get("CORE_PAGES", "800000"))  # 13.1 GB
    per_expert = -(-few.layout.num_words // PAGE_WORDS)
    shapes = [(core_pages, PAGE_WORDS), (9 * per_expert, PAGE_WORDS)]
    words = [jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in shapes]
    variants = [choose_blocks(mean, few.layout.tile_rows, kind) for mean in (10, 40)]
    jobs = [
        (op, blocks, [submit(op, few.layout, chunk, blocks, array) for array in words])
        for blocks in variants
        for op in OPS
    ]
    all_experts, large = Layer("IQ3_XXS", "IQ4_NL"), Chunk(2048)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    blocks = choose_blocks(large.num_pairs / NUM_EXPERTS, 128, kind)
    bank_jobs = [(op, submit(op, all_experts.layout, large, blocks, all_experts.words, host)) for op in OPS]
    arrays, pages = fill_arena(few, shapes)
    for op, blocks_, futures in jobs:
        guarded(run_arena, op, few, chunk, blocks_, futures, arrays, pages, blocks=tag(op, blocks_))
    for array in arrays:
        array.delete()
    bank = guarded(jax.device_put, all_experts.words, host)
    for op, job in bank_jobs if bank is not None else ():
        guarded(zero_copy, op, all_experts, large, blocks, job, bank)


def zero_copy(op: str, layer: Layer, chunk: Chunk, blocks: Blocks, job: Future[Any], bank: jax.Array) -> None:
    run_grouped(op, layer, chunk, blocks, job, bank, words_in="host memory", pinned_gb_s=ROOFS.get("pinned_gb_s"))


def fill_arena(layer: Layer, shapes: list[tuple[int, int]]) -> tuple[list[jax.Array], jax.Array]:
    """Experts in shuffled slots: the core's first, its last, and some on both sides of 2^31 words; 8 in the segment."""
    num_experts, num_words = layer.words.shape
    per_expert = -(-num_words // PAGE_WORDS)
    core_pages = shapes[0][0]
    in_core = np.linspace(0, core_pages - per_expert, num_experts - 8).astype(np.int32)
    in_segment = core_pages + 1 + per_expert * np.arange(8, dtype=np.int32)
    pages = np.random.default_rng(4).permutation(np.concatenate([in_core, in_segment]))
    arrays = [jnp.full(shape, 0xFFFFFFFF, jnp.uint32) for shape in shapes]  # NaN where an f16 is read

    @partial(jax.jit, donate_argnums=0)
    def write(array: jax.Array, blob: jax.Array, page: jax.Array) -> jax.Array:
        run = jnp.pad(blob, (0, per_expert * PAGE_WORDS - num_words), constant_values=np.uint32(0xFFFFFFFF))
        return jax.lax.dynamic_update_slice(array, run.reshape(per_expert, PAGE_WORDS), (page, jnp.int32(0)))

    for expert, page in enumerate(pages):
        i = int(page >= core_pages)
        arrays[i] = write(arrays[i], layer.words[expert], jnp.int32(page - i * core_pages))
    return arrays, jnp.asarray(pages, jnp.int32)


def run_arena(
    op: str,
    layer: Layer,
    chunk: Chunk,
    blocks: Blocks,
    futures: list[Future[Any]],
    arrays: list[jax.Array],
    pages: jax.Array,
) -> None:
    out, x = start_values(op, chunk)
    for (array, lines), future in zip(arena_sources(arrays, pages), futures):
        out = wait(future)(out, x, chunk.pairs.token_of, chunk.tiles(blocks), array, lines)
    error = error_of(op, layer, chunk, x, out)
    record(op=f"check {op} in an arena", blocks=tag(op, blocks), experts=len(chunk.rows), core_words=arrays[0].size,
           pages_per_expert=-(-layer.layout.num_words // PAGE_WORDS), rel_err=error, ok=error < 5e-3)  # fmt: skip


# Dense ----------------------------------------------------------------------------------------------------------------


def section_dense() -> None:
    cases: list[tuple[str, int, int, list[int]]] = [
        ("Q5_K", 248_320, 1, [1, 4]),
        ("Q6_K", 248_320, 1, [1, 4]),
        ("Q8_0", 10_240, 4, [1, 4, 512, 2048]),  # four matrices in turn, more than the cache holds
    ]
    jobs, xla = [], {}
    for type_name, rows, copies, all_tokens in cases:
        layout = plane_layout(type_name, rows, WIDTH)
        for tokens in all_tokens:
            variants: list[Any] = [choose_gemv_launch(tokens, [layout])]
            if tokens > 8:
                variants = [choose_matmul_blocks(tokens, layout), MatmulBlocks(128, LaunchBlocks(128, 8)), None]
            jobs += [(layout, tokens, copies, b, submit_dense(layout, tokens, copies, b)) for b in variants]
            if (rows, tokens) not in xla:
                xla[rows, tokens] = submit_plain(rows, tokens, copies)
    for (rows, tokens), job in xla.items():
        guarded(run_plain, rows, tokens, 4 if rows == 10_240 else 1, job)
    data: dict[PlaneLayout, jax.Array] = {}
    for layout, tokens, copies, blocks, job in jobs:
        if layout not in data:
            data = {layout: random_words(jax.random.key(7), (layout,), copies)}
        guarded(run_dense, layout, tokens, copies, blocks, job, data[layout], type=layout.type_name, blocks=str(blocks))
    others = [name for name in PLANE_TYPES if name not in {case[0] for case in cases}]
    for type_name, check in [(name, submit_small(name)) for name in others if left() > 10]:
        guarded(check_dense, type_name, check, type=type_name)


def dtype_of(tokens: int) -> Any:
    return jnp.float32 if tokens <= 8 else jnp.bfloat16


def submit_dense(layout: PlaneLayout, tokens: int, copies: int, blocks: Any) -> Future[Any]:
    """Products with `copies` matrices in turn; ``blocks`` None: decoded by XLA to bfloat16, then multiplied."""
    part = PlanePart(layout)

    def one(x: jax.Array, words: jax.Array, line: jax.Array) -> jax.Array:
        if blocks is None:
            matrix = decode_planes(words[line[0]], layout).astype(jnp.bfloat16)
            return jnp.dot(x, matrix.T, preferred_element_type=jnp.float32)
        return dense.matmul(x, words, line, part, blocks)

    def fn(x: jax.Array, words: Any, lines: jax.Array) -> list[jax.Array]:
        if tokens <= 8:
            return [dense.gemv(x, own, [part], blocks)[0] for own in words]
        return [one(x, words, lines[i : i + 1]) for i in range(copies)]

    shape = jax.ShapeDtypeStruct
    x = shape((tokens, layout.cols), dtype_of(tokens))
    matrix = shape((layout.num_words,), jnp.uint32)
    words = [matrix] * copies if tokens <= 8 else shape((copies, layout.num_words), jnp.uint32)
    return start(fn, x, words, shape((copies,), jnp.int32), options=CUBLAS if blocks is None else None)


def submit_plain(rows: int, tokens: int, copies: int) -> Future[Any]:
    w = [jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)] * copies
    x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16)
    return start(lambda x, w: [jnp.dot(x, m.T, preferred_element_type=jnp.float32) for m in w], x, w, options=CUBLAS)


def run_plain(rows: int, tokens: int, copies: int, job: Future[Any]) -> None:
    compiled = wait(job)
    x, w = (
        jnp.ones((tokens, WIDTH), jnp.bfloat16),
        [jnp.full((rows, WIDTH), 1 + i, jnp.bfloat16) for i in range(copies)],
    )
    ms = median_ms(lambda: compiled(x, w)) / copies
    record(op="XLA bf16, decoded", shape=f"{tokens}x{WIDTH}x{rows}", ms=ms,
           tflops=2 * tokens * rows * WIDTH / ms / 1e9, gb_s=2 * rows * WIDTH / ms / 1e6)  # fmt: skip


def run_dense(layout: PlaneLayout, tokens: int, copies: int, blocks: Any, job: Future[Any], words: jax.Array) -> None:
    compiled, lines = wait(job), jnp.arange(copies, dtype=jnp.int32)
    x = jax.random.normal(jax.random.key(8), (tokens, layout.cols), dtype_of(tokens))
    operand = list(words) if tokens <= 8 else words  # a slice inside of the program would be a copy
    got = compiled(x, operand, lines)[-1]
    error = 0.0
    for first in (0, layout.rows - 512):  # the first rows and the last
        rows = plane_layout(layout.type_name, 512, layout.cols, layout.tile_rows)
        at = first * layout.row_words
        weights = matrix_of(np.asarray(words[-1, at : at + rows.num_words]), rows)
        exact = np.asarray(x[-CHECKED_ROWS:], np.float64) @ weights.astype(np.float64).T
        error = max(error, rel_err(got[-CHECKED_ROWS:, first : first + 512], exact))
    ms = median_ms(lambda: compiled(x, operand, lines)) / copies
    bound_ms = layout.num_words * 4 / ROOFS["hbm"] / 1e6
    name = "decoded by XLA, then multiplied" if blocks is None else "gemv" if tokens <= 8 else "matmul"
    record(op=name, type=layout.type_name, shape=f"{tokens}x{layout.cols}x{layout.rows}", blocks=dense_tag(blocks),
           ms=ms, bytes_bound_ms=bound_ms, of_bound=bound_ms / ms,
           tflops=2 * tokens * layout.rows * layout.cols / ms / 1e9, rel_err=error,
           ok=error < (1e-5 if tokens <= 8 else 5e-3))  # fmt: skip


def dense_tag(blocks: Any) -> str:
    if isinstance(blocks, MatmulBlocks):
        return f"M{blocks.rows} R{blocks.launch.rows} w{blocks.launch.warps}"
    if blocks is None:
        return ""
    (own,) = blocks.matrices
    return f"R{own.rows} J{own.items} S{own.splits} w{blocks.warps} T{blocks.tokens}"


def submit_small(type_name: str) -> Future[Any]:
    layout, shape = plane_layout(type_name, 256, WIDTH), jax.ShapeDtypeStruct
    blocks = choose_gemv_launch(3, [layout])
    words = shape((layout.num_words,), jnp.uint32)
    x, parts = shape((3, WIDTH), jnp.float32), [PlanePart(layout)]
    return start(lambda x, words: dense.gemv(x, words, parts, blocks)[0], x, words)


def check_dense(type_name: str, job: Future[Any]) -> None:
    """The product of three rows with a small matrix of each type; that of many rows shares the experts' decoding."""
    layout = plane_layout(type_name, 256, WIDTH)
    words = random_words(jax.random.key(9), (layout,), 1)
    x = jax.random.normal(jax.random.key(11), (3, WIDTH), jnp.float32)
    exact = np.asarray(x, np.float64) @ matrix_of(np.asarray(words[0]), layout).astype(np.float64).T
    error = rel_err(wait(job)(x, words[0]), exact)
    record(op="check gemv", type=type_name, rel_err=error, ok=error < 1e-5)


# Roofs ----------------------------------------------------------------------------------------------------------------


def measure_roofs() -> None:
    """Device memory (bytes read and written), the bus from pinned memory, and a large bfloat16 product."""
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    job = start(lambda x: x @ x, x, options=CUBLAS)
    a = jnp.ones(2**29, jnp.uint32)  # 2 GiB
    add = jax.jit(lambda a: a + 1)
    ROOFS["hbm"] = 2 * a.nbytes / median_ms(lambda: add(a)) / 1e6
    compiled, ones = wait(job), jax.random.normal(jax.random.key(1), x.shape, x.dtype)
    ROOFS["bf16_tflops"] = 2 * 8192**3 / median_ms(lambda: compiled(ones)) / 1e9
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    near = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    pinned = jax.device_put(jnp.ones(2**27, jnp.uint32), host)  # 512 MiB
    ROOFS["pinned_gb_s"] = pinned.nbytes / median_ms(lambda: jax.device_put(pinned, near), inner=1) / 1e6
    record(op="roofs", device=device.device_kind, jax=jax.__version__, **ROOFS)


def main() -> None:
    sections = {"arena": section_arena, "dense": section_dense, "grouped": section_grouped, "types": section_types}
    guarded(measure_roofs)
    for name in [a for a in ARGS if not a.replace(".", "").isdigit()] or sections:
        guarded(sections[name])
        record(op="section", name=name, left_s=left())
    print("\n" + "\n".join(TABLE))
    print(f"took {time.time() - START:.1f} s")
    os._exit(0)  # compilations that nobody waits for any more must not hold the machine


if __name__ == "__main__":
    main()
