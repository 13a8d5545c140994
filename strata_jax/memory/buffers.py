"""What the compiled programs need beside weights and state: estimates of the largest temporaries, term by term.

Parts of a block run one after the other and share memory, so a phase is charged the terms that live throughout and
those of its largest part. The terms follow the reference engine (``engine/``); XLA may fuse some away. Letters: T rows
of the program, C streams, E width, B index blocks, K experts per token, F expert width, V vocabulary.
With kernels the largest part of a chunk is the draft block (`draft inputs`): with its streams beside the trunk's XLA
counts 141.4 MB at T 512, 473.5 at 2,048 and 1,837.2 at 8,192 (an H200, jax 0.11.2, 30,656 cells), where its terms and
the input and output that live throughout give 180.9, 526.9 and 1,911.0.
Measured 2026-11 with XLA on a CPU, 512 rows of the real widths in F32, 65,536 cells: GDN 88 MiB (here 88), attention
187 (here 271: keys and values are gathered one after the other there), experts 69 (here 87).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from strata_jax.memory.attention_kernels import WINDOW_PIECE_CELLS, attention_problem
from strata_jax.memory.dense_planes import MAX_KERNEL_ROWS
from strata_jax.memory.expert_kernels import kernel_layers
from strata_jax.memory.layout import (
    GATHER_TILE_VALUES,
    MATRIX_TILE_WEIGHTS,
    MAX_GROUP_ROWS,
    MAX_WINDOW_TOKENS,
    expert_tile_rows,
    padded_chunk,
)
from strata_jax.memory.ledger import Entry, Origin, Owner, Phase, during
from strata_jax.memory.sizes import F32_BYTES, ModelSizes, gdn_channels
from strata_jax.memory.staging import NUM_BUFFERS, stage_need

BF16_BYTES = 2
SORT_WORDS = 8  # of a pair: expert and place before and after the sort, its scratch, token and row
PACKED_WEIGHT_BYTES = 1  # of a weight in a packed matrix, rounded up (Q8_0: 1.06)


@dataclass(frozen=True, slots=True)
class Term:
    """One temporary: its bytes and the formula that gave them."""

    item: str
    num_bytes: int
    rule: str


@dataclass(frozen=True, slots=True)
class Cells:
    """What the buffers depend on besides the model and the rows: the context and how its cells are stored.

    expert_kernels: whether experts are computed by kernels where there are some.
    stage_bytes: buffers through which chunks that are long enough have missing experts copied ahead.
    kv_type: of the cells; not all have kernels for all sizes of heads.
    """

    context_cells: int
    cells_per_page: int
    cell_bytes: int
    expert_kernels: bool = False
    stage_bytes: int = 0
    kv_type: str = "f32"


@lru_cache(maxsize=1024)
def prompt_buffers(sizes: ModelSizes, chunk_tokens: int, cells: Cells, *, with_draft: bool, all_logits: bool
                   ) -> tuple[Entry, ...]:  # fmt: skip
    """Return the entries of the prefill phase for chunks of `chunk_tokens`, padded as the programs pad them."""
    rows = padded_chunk(chunk_tokens)
    parts = prompt_parts(sizes, rows, cells, with_draft=with_draft, logits_rows=rows if all_logits else 1)
    throughout = _throughout(sizes, rows, by_kernels=_chunk_by_kernels(sizes, rows, cells, with_draft=with_draft))
    entries = _entries(Phase.PREFILL, Owner.PROMPT_BUFFERS, throughout, parts)
    need = stage_need(sizes, with_draft=with_draft, expert_kernels=cells.expert_kernels)
    if not cells.stage_bytes or not need.stages(rows):
        return entries
    rule = f"{NUM_BUFFERS} buffers of {cells.stage_bytes // NUM_BUFFERS:,} B"
    item = "staged experts"
    return (*entries, during(Phase.PREFILL, Owner.PROMPT_BUFFERS, item, cells.stage_bytes, rule, Origin.COMPUTED))


@lru_cache(maxsize=1024)
def decode_buffers(sizes: ModelSizes, window_tokens: int, cells: Cells, *, with_draft: bool) -> tuple[Entry, ...]:
    """Return the entries of the decode phase for windows of `window_tokens`."""
    g, rows = sizes.geometry, window_tokens
    channels, heads = gdn_channels(g), g.gdn_key_heads + g.gdn_value_heads
    num_gdn, windows = len(g.recurrent_layers), sorted({1, rows})  # rounds of either write over the last one's
    per_layer = sum(
        (n + g.conv_kernel - 1) * channels + n * (heads * g.gdn_head_dim + g.gdn_value_heads) for n in windows
    )
    kept = Term(
        "rows kept until acceptance", num_gdn * per_layer * F32_BYTES,
        f"{num_gdn} GDN layers x {per_layer:,} values x 4 B, windows of {' and '.join(map(str, windows))}",
    )  # fmt: skip
    results = Term(
        "results for the host", sum(windows) * g.vocab_size * F32_BYTES
        + len(windows) * 2 * sizes.blocks(with_draft) * g.num_experts * F32_BYTES,
        f"windows of {' and '.join(map(str, windows))}: V {g.vocab_size:,} logits a row, uses of all experts twice",
    )  # fmt: skip
    state = Term(
        "recurrent update", 2 * g.gdn_value_heads * g.gdn_head_dim**2 * F32_BYTES,
        f"2 x {g.gdn_value_heads} heads x {g.gdn_head_dim}^2 x 4 B",
    )  # fmt: skip
    parts = prompt_parts(sizes, rows, cells, with_draft=with_draft, logits_rows=rows)
    parts["sampling"] = (
        Term("logits and sampling", 6 * rows * g.vocab_size * F32_BYTES, f"6 x T {rows} x V {g.vocab_size:,} x 4 B"),
    )
    return _entries(
        Phase.DECODE, Owner.DECODE_BUFFERS, (*_throughout(sizes, rows, by_kernels=False), kept, results, state), parts
    )


def prompt_parts(
    sizes: ModelSizes, rows: int, cells: Cells, *, with_draft: bool, logits_rows: int
) -> dict[str, tuple[Term, ...]]:
    """Return the temporaries of each part of a pass over `rows` tokens; only one part lives at a time."""
    g = sizes.geometry
    product = _product_terms(sizes, rows, with_draft=with_draft, kernels=cells.expert_kernels)
    parts = {"head": (*_head_terms(sizes, logits_rows), *product)}
    by_kernel = kernel_layers(g, sizes.blocks(with_draft)) if cells.expert_kernels else (False,)
    if not all(by_kernel):
        parts["experts"] = _expert_terms(sizes, rows, with_draft)
    if any(by_kernel):
        width = max(width for width, used in zip(g.expert_width, by_kernel) if used)
        parts["experts by kernels"] = _kernel_terms(sizes, rows, width)
    in_chunks = _chunk_by_kernels(sizes, rows, cells, with_draft=with_draft)
    tile = product
    if in_chunks:
        parts["product"], tile = product, product[:1]  # the rounded input is gone when a block needs most
    if g.recurrent_layers:
        gdn = _gdn_kernel_terms(sizes, rows, product[0]) if in_chunks else (*_gdn_terms(sizes, rows), *product)
        parts["GDN"] = gdn
    ratios = {g.compress_ratio[i] for i in sizes.attention_layers(with_draft)}
    for ratio in sorted(ratios):
        name = f"sparse attention {ratio}" if ratio else "dense attention"
        by_kernels = cells.expert_kernels and attention_problem(g, ratio, cells.kv_type) is None
        terms = _attention_kernel_terms if by_kernels else _attention_terms
        parts[name] = (*terms(sizes, rows, cells, ratio), *tile)
        if in_chunks and with_draft:
            width = g.num_streams * g.embed_width
            rule = f"T {rows} x C*E {width:,} x 4 B"
            parts[name] += (Term("the trunk's streams, in the draft block", rows * width * F32_BYTES, rule),)
    if g.ple_layer is not None:
        parts["n-gram table"] = (*_table_terms(sizes, rows, times=1 if in_chunks else 4), *product)
    if with_draft:
        width = g.num_streams * g.embed_width
        times = 4 if in_chunks else 3  # its streams come beside the trunk's
        joined = Term("draft inputs", rows * times * width * F32_BYTES, f"T {rows} x {times} x C*E {width:,} x 4 B")
        parts["draft inputs"] = (joined, *tile)
    return parts


def _entries(phase: Phase, owner: Owner, throughout: tuple[Term, ...], parts: dict[str, tuple[Term, ...]]
             ) -> tuple[Entry, ...]:  # fmt: skip
    largest = max(parts, key=lambda name: sum(term.num_bytes for term in parts[name]))
    entries = [during(phase, owner, term.item, term.num_bytes, term.rule) for term in throughout]
    entries += [
        during(phase, owner, f"{largest}: {term.item}", term.num_bytes, term.rule)
        for term in parts[largest]
        if term.num_bytes
    ]
    return tuple(entries)


def _chunk_by_kernels(sizes: ModelSizes, rows: int, cells: Cells, *, with_draft: bool) -> bool:
    """Whether these are the programs of a prompt chunk with kernels, whose temporaries XLA was asked for."""
    by_kernel = kernel_layers(sizes.geometry, sizes.blocks(with_draft))
    return cells.expert_kernels and rows > MAX_WINDOW_TOKENS and all(by_kernel)


def _throughout(sizes: ModelSizes, rows: int, *, by_kernels: bool) -> tuple[Term, ...]:
    """What lives in all parts; in a chunk by kernels the streams are written in place, and parts count their mixers."""
    g = sizes.geometry
    width = g.num_streams * g.embed_width
    shape = f"T {rows} x C {g.num_streams} x E {g.embed_width:,} x 4 B"
    ends = Term(
        "mixer: input and output", 2 * rows * g.embed_width * F32_BYTES, f"2 x T {rows} x E {g.embed_width:,} x 4 B"
    )
    if by_kernels:
        return Term("residual streams", rows * width * F32_BYTES, shape), ends
    return (
        Term("residual streams", 2 * rows * width * F32_BYTES, f"2 x {shape}"),
        Term("mixer: normed streams and gates", 2 * rows * width * F32_BYTES, f"2 x {shape}"),
        ends,
    )


def _product_terms(sizes: ModelSizes, rows: int, *, with_draft: bool, kernels: bool) -> tuple[Term, ...]:
    """Temporaries of a product with a dense matrix (`engine/matrix.py`, `kernels/quant_matmul`)."""
    weights = sizes.stored_tile_weights[with_draft] if kernels else sizes.decoded_tile_weights
    weights = min(weights, MATRIX_TILE_WEIGHTS)
    tile = Term(
        "decoded matrix", weights * (F32_BYTES + PACKED_WEIGHT_BYTES),
        f"{weights:,} weights x (4 B + {PACKED_WEIGHT_BYTES} B packed)",
    )  # fmt: skip
    if not kernels or rows <= MAX_WINDOW_TOKENS:
        return (tile,)
    width = sizes.geometry.num_streams * sizes.geometry.embed_width
    rounded = Term("rounded input", rows * width * BF16_BYTES, f"T {rows} x C*E {width:,} x 2 B")
    planes = sizes.plane_tile_weights if rows > MAX_KERNEL_ROWS else 0
    if planes * BF16_BYTES > tile.num_bytes:
        tile = Term("decoded matrix", planes * BF16_BYTES, f"{planes:,} weights x 2 B")
    return tile, rounded


def _gdn_terms(sizes: ModelSizes, rows: int) -> tuple[Term, ...]:
    g = sizes.geometry
    channels, values = gdn_channels(g), g.gdn_value_heads * g.gdn_head_dim
    per_token = 2 * channels + 4 * values
    rule = f"T {rows} x (2 x {channels:,} channels + 4 x {values:,} values) x 4 B"
    return (Term("projections and outputs", rows * per_token * F32_BYTES, rule),)


def _gdn_kernel_terms(sizes: ModelSizes, rows: int, tile: Term) -> tuple[Term, ...]:
    """Temporaries of a GDN block of a chunk by kernels, mixers and products included.

    XLA's own count on an H200 with jax 0.11.2, inputs and outputs of mixers included: T 512: 101.7 MB (here 134.2),
    1,024: 150.6 (205.5), 2,048: 325.5 (348.1), 4,096: 611.1 (633.3), 8,192: 1,136.0 (1,203.8).
    """
    g = sizes.geometry
    channels, values = gdn_channels(g), g.gdn_value_heads * g.gdn_head_dim
    rule = f"T {rows} x (2 x {channels:,} channels + 1.5 x {values:,} values) x 4 B"
    planes = Term(
        "decoded matrix", sizes.plane_tile_weights * BF16_BYTES, f"{sizes.plane_tile_weights:,} weights x 2 B"
    )
    return (
        Term("projections and outputs", rows * (4 * channels + 3 * values) // 2 * F32_BYTES, rule),
        max(planes, tile, key=lambda term: term.num_bytes),
    )


def _attention_terms(sizes: ModelSizes, rows: int, cells: Cells, ratio: int) -> tuple[Term, ...]:
    g = sizes.geometry
    query, kv = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    per_token = 4 * query + 2 * kv
    projections = Term(
        "projections and output", rows * per_token * F32_BYTES,
        f"T {rows} x (4 x {query:,} query + 2 x {kv:,} K/V values) x 4 B",
    )  # fmt: skip
    if not ratio:
        page = cells.cells_per_page
        num_bytes = page * (2 * kv * F32_BYTES + cells.cell_bytes) + 3 * rows * g.num_heads * page * F32_BYTES
        rule = (
            f"{page} cells x (2 x {kv:,} x 4 B + {cells.cell_bytes} B)"
            f" + 3 x T {rows} x {g.num_heads} heads x {page} x 4 B"
        )
        return projections, Term("one page of K/V and scores", num_bytes, rule)
    num_blocks = cells.context_cells // ratio + 1
    kept = min(g.index_top_k // ratio, num_blocks)
    attended = (kept + 1) * ratio
    tile = max(1, min(rows, GATHER_TILE_VALUES // (attended * kv)))
    gathered = tile * attended * (2 * kv * F32_BYTES + cells.cell_bytes + 2 * g.num_heads * F32_BYTES)
    return (
        projections,
        Term("index scores", 2 * rows * num_blocks * F32_BYTES, f"2 x T {rows} x B {num_blocks:,} x 4 B"),
        Term("K/V gathered and scored", gathered,
             f"{tile} tokens x {attended:,} cells x (2 x {kv:,} x 4 B + {cells.cell_bytes} B"
             f" + 2 x {g.num_heads} heads x 4 B)"),
    )  # fmt: skip


def _attention_kernel_terms(sizes: ModelSizes, rows: int, cells: Cells, ratio: int) -> tuple[Term, ...]:
    """Temporaries of `engine/attention_kernels.py`: scores are gone before there is output, and nothing is decoded.

    XLA's own count on an H200, mixers and a decoded matrix included, at 30,656 cells: T 512: 86.4 MB (here 137.2),
    2,048: 285.1 (352.2), 8,192: 1,060.8 (1,212.1); at 131,072 cells, compiled without the device, T 2,048: 504.6
    (583.6). Between these, a block of cells takes a token 4.3 B, in the draft block 4.5.
    """
    g = sizes.geometry
    query, kv, index = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim, g.index_heads * g.index_dim
    per_token = 3 * query + 2 * kv + 2 * index + 2 * g.index_dim
    num_blocks = cells.context_cells // ratio + 1
    kept = min(g.index_top_k // ratio, num_blocks)
    pieces = -(-(kept + 1) * ratio // WINDOW_PIECE_CELLS) if rows <= MAX_WINDOW_TOKENS else 0
    output = query * (1 + pieces)
    return (
        Term("projections and queries", rows * per_token * F32_BYTES,
             f"T {rows} x (3 x {query:,} query + 2 x {kv:,} K/V + 2 x {index + g.index_dim:,} index values) x 4 B"),
        Term("index scores, then output", rows * (max(num_blocks * 9 // 8, output) + kept) * F32_BYTES,
             f"T {rows} x (the larger of 9/8 x B {num_blocks:,} and {1 + pieces} x {query:,}, + {kept} blocks) x 4 B"),
    )  # fmt: skip


def _expert_terms(sizes: ModelSizes, rows: int, with_draft: bool) -> tuple[Term, ...]:
    g = sizes.geometry
    tile, width = (
        expert_tile_rows(rows, g.num_experts_used, g.num_experts),
        max(g.expert_width[: sizes.blocks(with_draft)]),
    )
    pairs, blob = rows * g.num_experts_used, max(sizes.blobs)
    decoded = 3 * g.embed_width * width
    return (
        Term("expert outputs", (pairs + tile) * g.embed_width * F32_BYTES,
             f"(T {rows} x K {g.num_experts_used} + tile {tile}) x E {g.embed_width:,} x 4 B"),
        Term("one expert packed and decoded", blob + decoded * F32_BYTES,
             f"{blob:,} B + 3 x E {g.embed_width:,} x F {width} x 4 B"),
        Term("tile of one expert", tile * (2 * g.embed_width + 3 * width) * F32_BYTES,
             f"tile {tile} x (2 x E {g.embed_width:,} + 3 x F {width}) x 4 B"),
        _router_term(sizes, rows),
    )  # fmt: skip


def _kernel_terms(sizes: ModelSizes, rows: int, width: int) -> tuple[Term, ...]:
    """Temporaries of `engine/expert_kernels.py`: nothing decoded, rows sorted by expert and their results.

    The tokens in bfloat16 are gone before the outputs come. XLA's own count for one H200 without the router, compiled
    without the device, F 640 and E 2,560: T 4: 513,552 B (here 512,000), T 512: 33.08 MB (33.77), T 8,192: 525.8
    (527.7).
    """
    g = sizes.geometry
    experts, used, embed = g.num_experts, g.num_experts_used, g.embed_width
    pairs = rows * used
    if rows <= MAX_WINDOW_TOKENS:
        return (
            Term("hidden rows and expert outputs", pairs * (width + embed) * F32_BYTES,
                 f"T {rows} x K {used} x (F {width} + E {embed:,}) x 4 B"),
            _router_term(sizes, rows),
        )  # fmt: skip
    padded = pairs + MAX_GROUP_ROWS
    shape = f"(T {rows} x K {used} + {MAX_GROUP_ROWS}) x"
    return (
        Term("hidden rows", 2 * padded * width * BF16_BYTES, f"2 x {shape} F {width} x 2 B"),
        Term("expert outputs", padded * embed * BF16_BYTES, f"{shape} E {embed:,} x 2 B"),
        Term("sorted pairs", (SORT_WORDS * pairs + 8 * experts) * F32_BYTES,
             f"({SORT_WORDS} x T {rows} x K {used} + 8 x {experts} experts) x 4 B"),
        _router_term(sizes, rows),
    )  # fmt: skip


def _router_term(sizes: ModelSizes, rows: int) -> Term:
    g = sizes.geometry
    return Term(
        "router and shared expert",
        rows * (2 * g.num_experts + 3 * g.shared_expert_width + 2 * g.embed_width) * F32_BYTES,
        f"T {rows} x (2 x {g.num_experts} experts + 3 x {g.shared_expert_width} shared"
        f" + 2 x E {g.embed_width:,}) x 4 B",
    )


def _head_terms(sizes: ModelSizes, logits_rows: int) -> tuple[Term, ...]:
    vocab = sizes.geometry.vocab_size
    return (Term("logits", 2 * logits_rows * vocab * F32_BYTES, f"2 x {logits_rows} rows x V {vocab:,} x 4 B"),)


def _table_terms(sizes: ModelSizes, rows: int, *, times: int) -> tuple[Term, ...]:
    """Temporaries of the n-gram part; ``times``: streams that live beside those of the pass."""
    g = sizes.geometry
    width, row = g.num_streams * g.embed_width, len(g.ple_vocab_sizes) * g.ple_row_width
    return (
        Term("n-gram rows", rows * (sizes.table_row_bytes + row * F32_BYTES),
             f"T {rows} x ({sizes.table_row_bytes:,} B packed + {row:,} x 4 B)"),
        Term("n-gram keys and convolution", times * rows * width * F32_BYTES,
             f"{times} x T {rows} x C*E {width:,} x 4 B"),
    )  # fmt: skip
