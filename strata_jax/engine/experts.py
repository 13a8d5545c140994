"""Mixture of experts: routing, and expert products on packed blobs read from the arena or from the bank.

A blob is one expert's gate, up and down matrices, one after the other, in 32-bit words: as packed in the file, for the
products here, or in planes, for the kernels (`expert_kernels.py`). The product reads it from the arena when the expert
is resident and from the bank otherwise; the arithmetic is the same.
Contributions are summed in ascending order of expert number, for a window and for a prompt chunk alike.
Shapes: T tokens, X experts, K experts per token, E model width, F expert width. Source: qwen4exp (`ffn_*`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from strata_jax.engine import expert_kernels
from strata_jax.engine.arena import read_pages
from strata_jax.engine.matrix import Matrix, linear, linears, matmul_t
from strata_jax.engine.replacement import Kept, Turn, take_turn
from strata_jax.geometry import Geometry
from strata_jax.kernels.dequant import dequantize_words
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.kernels.route import Routing
from strata_jax.kernels.route.reference import choose_experts as choose_by_sorting
from strata_jax.kernels.route.reference import count_uses, keep_real, weigh_shared
from strata_jax.memory.layout import MAX_WINDOW_TOKENS, expert_tile_rows

R = TypeVar("R")


@dataclass(frozen=True)
class BlobPart:
    """One packed matrix (rows, cols) inside a blob."""

    type_name: str
    rows: int
    cols: int
    first_word: int
    num_bytes: int

    @property
    def num_words(self) -> int:
        return -(-self.num_bytes // 4)


@dataclass(frozen=True)
class BlobLayout:
    """A blob as the file packs it: ``parts`` is (gate_up, down) or (gate, up, down)."""

    parts: tuple[BlobPart, ...]
    num_words: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerBank:
    """All experts of one block in host memory.

    Attributes:
        blobs: u32[X, blob_words]. num_pages: the pages of the arena that a blob fills.
        layout: of a blob: as packed in the file, for the reference, or in planes, for the kernels; None: not known.
        in_chunks: a prompt is read: the kernels for chunks compute it, however short it is.
        in_passes: of the block's program these are only asked; programs of their own compute them (`OpenExperts`).
    """

    blobs: jax.Array
    layout: BlobLayout | ExpertLayout | None = field(metadata={"static": True})
    num_pages: int = field(metadata={"static": True})
    in_chunks: bool = field(default=False, metadata={"static": True})
    in_passes: bool = field(default=False, metadata={"static": True})

    def bare(self) -> LayerBank:
        """The same blobs without what is inside them, for programs that only copy whole blobs."""
        return replace(self, layout=None)

    def has_window_kernels(self, num_tokens: int) -> bool:
        """Whether the kernels for windows compute so many tokens."""
        return isinstance(self.layout, ExpertLayout) and not self.in_chunks and num_tokens <= MAX_WINDOW_TOKENS

    def fetch(self, expert: jax.Array) -> jax.Array:
        """One expert's words, u32[blob_words], brought into device memory."""
        words = jax.lax.dynamic_index_in_dim(self.blobs, expert, keepdims=False)
        return jax.device_put(words, jax.memory.Space.Device)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Router and shared expert of one block (the routed experts are in the bank)."""

    router: Matrix
    shared_router: jax.Array  # f32[E]
    shared_gate: Matrix
    shared_up: Matrix
    shared_down: Matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertCounts:
    """Routed (token, expert) pairs of a call, those served from the arena, and uses of each expert of one block i32[X].

    Where several blocks are counted together there are no `uses`.
    """

    lookups: jax.Array
    hits: jax.Array
    uses: jax.Array | None = None

    def __add__(self, other: ExpertCounts) -> ExpertCounts:
        both = None if self.uses is None or other.uses is None else self.uses + other.uses
        return ExpertCounts(self.lookups + other.lookups, self.hits + other.hits, both)


def no_counts(num_experts: int | None = None) -> ExpertCounts:
    """Nothing counted yet: of single experts too if there are some."""
    uses = None if num_experts is None else jnp.zeros(num_experts, jnp.int32)
    return ExpertCounts(jnp.int32(0), jnp.int32(0), uses)


@dataclass(frozen=True)
class Routed:
    """The experts of each token: ``ids: i32[T, K]`` ascending, X = none, and ``weights: f32[T, K]``, 0 there.

    Attributes:
        shared: f32[T, 1], the weight of the shared expert.
        hits: i32[], pairs whose expert is resident. uses: i32[X], tokens of each expert.
        window: what the window kernels need besides; None: they do not run.
    """

    ids: jax.Array
    weights: jax.Array
    shared: jax.Array
    hits: jax.Array
    uses: jax.Array
    window: Routing | None = None


def route(u: jax.Array, w: ExpertWeights, pages: jax.Array, count: jax.Array, num_used: int, bank: LayerBank) -> Routed:
    """Choose the experts of T tokens of which the first ``count`` are real."""
    scores = linear(u, w.router)
    if bank.has_window_kernels(u.shape[0]):
        assert isinstance(bank.layout, ExpertLayout)
        found = expert_kernels.route(scores, u, w.shared_router, pages, count, num_used, bank.layout)
        return Routed(found.ids, found.weights, found.shared, found.hits, found.uses, found)
    choose = expert_kernels.choose if isinstance(bank.layout, ExpertLayout) else choose_by_sorting
    ids, weights = keep_real(*choose(scores, num_used), count, pages.shape[0])
    return Routed(ids, weights, weigh_shared(u, w.shared_router), *count_uses(ids, pages))


def mixture(
    u: jax.Array,
    w: ExpertWeights,
    bank: LayerBank,
    arrays: Sequence[jax.Array],
    pages: jax.Array | Turn,
    count: jax.Array,
    g: Geometry,
) -> tuple[jax.Array, ExpertCounts, tuple[jax.Array, Kept] | None]:
    """Routed plus shared experts for T tokens of which the first ``count`` are real.

    Args:
        arrays: the arena's core and its segments; no resident expert lies in a segment left out.
        pages: i32[X], first arena page of each expert of this block, -1 = read it from the bank. Or the block's turn:
            then what it misses is fetched first.

    Returns:
        f32[T, E] (rows past ``count`` hold the shared expert only), the counts; after a turn the core and the rest
        of what it has changed.
    """
    turn, pages = (pages, pages.pages) if isinstance(pages, Turn) else (None, pages)
    to, turned = route(u, w, pages, count, g.num_experts_used, bank), None
    shared = _shared(u, w, to)
    if turn is not None:
        most, kernels = min(g.num_experts, to.ids.size), isinstance(bank.layout, ExpertLayout)
        arrays, done = take_turn(turn, to.uses, bank.blobs, tuple(arrays), most, kernels=kernels)
        pages, turned = done.pages, (arrays[0], Kept(arrays[1:], done.tables))
    counts = ExpertCounts(count.astype(jnp.int32) * g.num_experts_used, to.hits, to.uses)
    if not isinstance(bank.layout, ExpertLayout):
        in_jnp = _window if u.shape[0] <= MAX_WINDOW_TOKENS else _chunk
        routed = in_jnp(u, to.ids, to.weights, bank, arrays, pages, g)
    elif to.window is not None:
        routed = expert_kernels.window(to.window, tuple(arrays), bank.blobs, pages, bank.layout)
    else:
        routed = expert_kernels.chunk(u, to.ids, to.weights, tuple(arrays), bank.blobs, pages, bank.layout)
    return routed + shared, counts, turned


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OpenExperts:
    """What a chunk asks of a block's experts, some of which are still to be brought.

    Attributes:
        u: f32[T, E]. ids: i32[T, K], X = none; weights: f32[T, K], 0 there.
        shared: f32[T, E], the output of the shared expert.
        pages: i32[X], as of `mixture`.
    """

    u: jax.Array
    ids: jax.Array
    weights: jax.Array
    shared: jax.Array
    pages: jax.Array


def ask_experts(
    u: jax.Array, w: ExpertWeights, bank: LayerBank, pages: jax.Array, count: jax.Array, g: Geometry
) -> tuple[OpenExperts, ExpertCounts]:
    """`mixture` up to the routed experts; the rest is `expert_kernels.start_rows`, `add_rows` and `sum_experts`."""
    to = route(u, w, pages, count, g.num_experts_used, bank)
    counts = ExpertCounts(count.astype(jnp.int32) * g.num_experts_used, to.hits, to.uses)
    return OpenExperts(u, to.ids, to.weights, _shared(u, w, to), pages), counts


def sum_experts(rows: expert_kernels.ExpertRows, asked: OpenExperts) -> jax.Array:
    """Routed plus shared experts: f32[T, E]."""
    return expert_kernels.sum_rows(rows, asked.weights) + asked.shared


def _shared(u: jax.Array, w: ExpertWeights, to: Routed) -> jax.Array:
    gate, up = linears(u, (w.shared_gate, w.shared_up))
    return to.shared * linear(jax.nn.silu(gate) * up, w.shared_down)


def _window(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    bank: LayerBank,
    arrays: Sequence[jax.Array],
    pages: jax.Array,
    g: Geometry,
) -> jax.Array:
    """Few tokens: every active expert is applied to all of them, with weight 0 where it was not chosen."""
    num_tokens = u.shape[0]
    if num_tokens == 1:
        active, shares = ids[0], weights[0, :, None]
        num_active = jnp.sum(active < g.num_experts)
    else:
        used = jnp.zeros(g.num_experts + 1, bool).at[ids.reshape(-1)].set(True)[: g.num_experts]
        size = min(g.num_experts, num_tokens * g.num_experts_used)
        active, num_active = jnp.nonzero(used, size=size, fill_value=0)[0], jnp.sum(used)
        shares = jnp.sum(jnp.where(ids == active[:, None, None], weights, 0.0), axis=-1)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        y = _on_blob(bank, arrays, pages, active[i], lambda words: _apply(u, _decode(words, bank)))
        return total + shares[i][:, None] * y

    return jax.lax.fori_loop(0, num_active, step, jnp.zeros_like(u))


def _chunk(
    u: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    bank: LayerBank,
    arrays: Sequence[jax.Array],
    pages: jax.Array,
    g: Geometry,
) -> jax.Array:
    """Many tokens: pairs sorted by expert, each expert decoded once and applied to its rows in tiles."""
    num_tokens, width = u.shape
    num_pairs = num_tokens * g.num_experts_used
    tile = expert_tile_rows(num_tokens, g.num_experts_used, g.num_experts)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    token_of = jnp.pad(order // g.num_experts_used, (0, tile))
    counts = jnp.zeros(g.num_experts + 1, jnp.int32).at[ids.reshape(-1)].add(1)[: g.num_experts]
    first = jnp.cumsum(counts) - counts

    def expert_step(expert: jax.Array, out: jax.Array) -> jax.Array:
        def work(out: jax.Array) -> jax.Array:
            matrices = _on_blob(bank, arrays, pages, expert, lambda words: _decode(words, bank))

            def tile_step(i: jax.Array, out: jax.Array) -> jax.Array:
                row = first[expert] + i * tile
                x = u[jax.lax.dynamic_slice_in_dim(token_of, row, tile)]
                # rows past the expert's last belong to the next expert, which writes them again
                return jax.lax.dynamic_update_slice_in_dim(out, _apply(x, matrices), row, 0)

            return jax.lax.fori_loop(0, (counts[expert] + tile - 1) // tile, tile_step, out)

        return jax.lax.cond(counts[expert] > 0, work, lambda out: out, out)

    out = jax.lax.fori_loop(0, g.num_experts, expert_step, jnp.zeros((num_pairs + tile, width)))
    row_of = jnp.zeros(num_pairs, jnp.int32).at[order].set(jnp.arange(num_pairs)).reshape(ids.shape)
    total = jnp.zeros_like(u)
    for i in range(g.num_experts_used):
        total = total + weights[:, i, None] * out[row_of[:, i]]
    return total


def _on_blob(
    bank: LayerBank, arrays: Sequence[jax.Array], pages: jax.Array, expert: jax.Array, f: Callable[[jax.Array], R]
) -> R:
    """Apply ``f`` to the expert's words, from the arena if it is resident, else from the bank."""

    def resident() -> R:
        run = read_pages(arrays, pages[expert], bank.num_pages)
        return f(run.reshape(-1)[: bank.blobs.shape[1]])

    return jax.lax.cond(pages[expert] >= 0, resident, lambda: f(bank.fetch(expert)))


def _decode(words: jax.Array, bank: LayerBank) -> tuple[jax.Array, ...]:
    """The blob's matrices as f32[rows, cols]."""
    assert isinstance(bank.layout, BlobLayout)
    return tuple(_decode_part(words[p.first_word : p.first_word + p.num_words], p) for p in bank.layout.parts)


def _decode_part(words: jax.Array, part: BlobPart) -> jax.Array:
    return dequantize_words(words, part.type_name, part.num_bytes).reshape(part.rows, part.cols)


def _apply(x: jax.Array, matrices: tuple[jax.Array, ...]) -> jax.Array:
    """SwiGLU of one expert: f32[R, E] -> f32[R, E]."""
    if len(matrices) == 2:
        gate_up = matmul_t(x, matrices[0])
        half = matrices[0].shape[0] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
    else:
        gate, up = matmul_t(x, matrices[0]), matmul_t(x, matrices[1])
    return matmul_t(jax.nn.silu(gate) * up, matrices[-1])
