"""How long do the kernels of a block take that are not of experts or attention: mixers, the gated delta net of a window
and of a prompt, the dense products of a window?

Held fixed: the model's widths, the types of its mixers (Q6_K, Q8_0), random weights and inputs. Varied: tokens. Every
result is first compared with float64. A time is one call's share of a program that makes 32 of them on weights or
states of its own, more than the cache holds; of prompts: 4. Beside it: the time to read and write the bytes at the rate
of a device copy in this process. The prompt also runs without the kernels, whole sublayers both times. "us" are the
kernels' own times, by trace, without what a call costs; dense products have only these, and the head's are of whole
numbers and of floats.

    python bench/kernels_blocks.py [mixer|window|prompt|dense ...]

It writes JSON rows to $OUT/kernels_blocks.jsonl as they come; the last lines are a table.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
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

from strata_jax.engine import gdn
from strata_jax.engine.matrix import Matrix
from strata_jax.kernels.gdn_chunks import gdn_chunks
from strata_jax.kernels.gdn_window import GdnVectors, WindowRows, gdn_advance, gdn_window
from strata_jax.kernels.planes import PlaneLayout, decode_planes, plane_layout
from strata_jax.kernels.quant_matmul import PlanePart, own_words
from strata_jax.kernels.quant_matmul.blocks import GemvLaunch, choose_gemv_launch
from strata_jax.kernels.quant_matmul.triton import gemv
from strata_jax.kernels.stream_mixer import MixerPlanes, PendingWrite, read
from strata_jax.memory.layout import GDN_CHUNK_TOKENS
from strata_jax.presets import model_geometry

G = model_geometry("synthetic_full" if jax.default_backend() == "gpu" else "synthetic_small")
C, E, RANK, EPS = G.num_streams, G.embed_width, G.mixer_rank, G.rms_eps
HK, HV, D, TAPS = G.gdn_key_heads, G.gdn_value_heads, G.gdn_head_dim, G.conv_kernel
CHANNELS, VALUES, KV_WIDTH = (2 * HK + HV) * D, HV * D, G.num_kv_heads * G.head_dim
ON_GPU = jax.default_backend() == "gpu"  # elsewhere the references run: that only shows that the script works
WINDOWS, PROMPTS, COPIES, PROMPT_COPIES = ((1, 2, 4, 8), (512, 2048, 8192), 32, 4) if ON_GPU else ((2,), (128,), 2, 1)
DENSE_WINDOWS = (1, 2, 3, 4, 5, 6, 8) if ON_GPU else (2,)
# type, rows of the matrices of a launch, columns: projections of a delta net and of attention, an output, the head
DENSE = (
    ("Q6_K", (CHANNELS, VALUES, HV, HV), E), ("Q6_K", (2 * G.num_heads * G.head_dim, *2 * (KV_WIDTH,)), E),
    ("Q6_K", (E,), VALUES), ("IQ4_XS", (G.vocab_size,), E),
)  # fmt: skip
COLD_BYTES = 2e8 if ON_GPU else 1e6  # of matrices in turn: several times a GPU's cache
MIXER_KERNELS = "mixer_project", "mixer_hidden", "mixer_mix"
ROWS = Rows("kernels_blocks")
# jitted: calls of one shape are lowered and compiled once in the programs that make many of them
READ, WINDOW, ADVANCE = jax.jit(read, static_argnums=2), jax.jit(gdn_window, static_argnums=7), jax.jit(gdn_advance)
GEMV = jax.jit(gemv, static_argnums=(2, 3, 4))


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def rel_err(got: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected))


def compiled(call: Any, *args: Any, donate: tuple[int, ...] = ()) -> tuple[Any, float]:
    started = time.perf_counter()
    program = jax.jit(call, donate_argnums=donate).lower(*args).compile()
    return program, time.perf_counter() - started


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


# Mixers ---------------------------------------------------------------------------------------------------------------


def words_of(layout: PlaneLayout, seed: int) -> jax.Array:
    """Random bits, but f16 fields between 2^-7 and 2^-6, so that weights are finite."""
    words = np.random.default_rng(seed).integers(0, 2**32, layout.num_words, np.uint32)
    rows = words.reshape(-1, layout.row_words, layout.tile_rows)
    for field in layout.fields:
        if field.name in ("d", "m"):
            at = slice(field.first, field.first + field.num_words)
            rows[:, at] = rows[:, at] & np.uint32(0x03FF03FF) | np.uint32(0x20002000)
    return jnp.asarray(words)


def mixer(seed: int) -> MixerPlanes:
    down, inject = plane_layout("Q6_K", RANK, C * E), plane_layout("Q6_K", C, C * E)
    layouts = down, plane_layout("Q8_0", C * E, RANK), inject
    norm = 0.002 * (1 + 0.1 * normal(seed, C * E))  # random weights are large
    down, up, inject = (words_of(layout, 3 * seed + i) for i, layout in enumerate(layouts))
    firsts = len(up), 0, len(up) + len(down)  # the tallest tiles first
    parts = [PlanePart(layout, first) for layout, first in zip(layouts, firsts)]
    return MixerPlanes(norm, jnp.concatenate([up, down, inject]), *parts)


def decoded(w: MixerPlanes, part: PlanePart) -> np.ndarray:
    return np.asarray(decode_planes(own_words(w.words, part), part.layout), np.float64)


def mixed_in_float64(streams: jax.Array, w: MixerPlanes, pending: PendingWrite) -> np.ndarray:
    f64 = partial(np.asarray, dtype=np.float64)
    s = f64(streams) + f64(pending.inject)[:, :, None] * f64(pending.y)[:, None, :]
    normed = f64(w.norm).reshape(C, E) * s / np.sqrt((s**2).mean(-1, keepdims=True) + EPS)
    z = normed.reshape(len(s), -1) @ decoded(w, w.down).T / C
    gate = sigmoid((z * sigmoid(z)) @ decoded(w, w.up).T).reshape(s.shape)
    return (gate * normed).mean(1)


def section_mixer(copy_gb_s: float) -> None:
    mixers = [mixer(i) for i in range(COPIES)]
    num_bytes = sum(layout.num_words * 4 for layout in (mixers[0].down.layout, mixers[0].up.layout)) + C * E * 4
    for tokens in WINDOWS:
        streams, pending = normal(1, tokens, C, E), PendingWrite(normal(2, tokens, E), normal(3, tokens, C))
        found = READ(streams, mixers[0], EPS, pending)
        error = rel_err(found.mixed, mixed_in_float64(streams, mixers[0], pending))

        def chain(streams: jax.Array, pending: PendingWrite, mixers: list[MixerPlanes]) -> tuple[jax.Array, jax.Array]:
            for w in mixers:
                step = READ(streams, w, EPS, pending)
                assert step.inject is not None
                streams, pending = step.streams, PendingWrite(step.mixed, step.inject)
            return streams, pending.y

        program, compile_s = compiled(chain, streams, pending, mixers)
        call = partial(program, streams, pending, mixers)
        seconds = [s / COPIES for s in times_of(call)]
        us = {f"{name}_us": took for name, took in kernel_us(call, MIXER_KERNELS, COPIES).items()}
        ROWS.record(op="mixer read and write", tokens=tokens, **spread(seconds), **us,
               bytes_ms=num_bytes / copy_gb_s / 1e6, compile_s=compile_s, rel_err=error, ok=error < 1e-5)  # fmt: skip


# Gated delta net ------------------------------------------------------------------------------------------------------


def vectors(seed: int) -> GdnVectors:
    a = -jnp.exp(normal(seed + 2, HV))
    return GdnVectors(normal(seed, CHANNELS, TAPS, scale=0.5), normal(seed + 1, HV), a, 1 + 0.1 * normal(seed + 3, D))


def window_in_float64(args: tuple[jax.Array, ...], w: GdnVectors) -> tuple[np.ndarray, np.ndarray]:
    """Outputs f64[T, Hv*D] and the state after all tokens."""
    qkv, gate, alpha, beta, memory, history = (np.asarray(x, np.float64) for x in args)
    conv, dt_bias, a, norm = (np.asarray(x, np.float64) for x in (w.conv, w.dt_bias, w.a, w.norm))
    inputs, outs = np.concatenate([history, qkv]), []
    for t in range(len(qkv)):
        x = sum(inputs[t + j] * conv[:, j] for j in range(TAPS))
        heads = (x * sigmoid(x)).reshape(-1, D)
        unit = heads[: 2 * HK] / np.sqrt((heads[: 2 * HK] ** 2).sum(-1, keepdims=True) + EPS)
        q, k = np.tile(unit[:HK] / D**0.5, (HV // HK, 1)), np.tile(unit[HK:], (HV // HK, 1))
        memory = memory * np.exp(a * np.logaddexp(0, alpha[t] + dt_bias))[:, None, None]
        delta = sigmoid(beta[t])[:, None] * (heads[2 * HK :] - np.einsum("hk,hkv->hv", k, memory))
        memory = memory + k[:, :, None] * delta[:, None, :]
        o = np.einsum("hk,hkv->hv", q, memory)
        outs.append((norm * o / np.sqrt((o**2).mean(-1, keepdims=True) + EPS)).reshape(-1) * sigmoid(gate[t]))
    return np.stack(outs), memory


def section_window(copy_gb_s: float) -> None:
    state_bytes = HV * D * D * 4
    w = vectors(1)

    def run(qkv: Any, gate: Any, alpha: Any, beta: Any, memory: Any, history: Any) -> tuple[jax.Array, WindowRows]:
        return WINDOW(qkv, gate, alpha, beta, w, memory, history, EPS)

    for tokens in WINDOWS:
        products = (
            normal(5, tokens, CHANNELS),
            normal(6, tokens, VALUES),
            normal(7, tokens, HV),
            normal(8, tokens, HV),
        )
        memories = [normal(10 + i, HV, D, D, scale=0.1) for i in range(COPIES)]
        histories = [normal(90 + i, TAPS - 1, CHANNELS) for i in range(COPIES)]
        out, rows = run(*products, memories[0], histories[0])
        count = jnp.int32(tokens)
        after, _ = ADVANCE(memories[0], histories[0], rows, count)
        expected, memory = window_in_float64((*products, memories[0], histories[0]), w)
        error = max(rel_err(out, expected), rel_err(after, memory))

        def windows(*args: Any) -> list[jax.Array]:
            *products, memories, histories = args
            return [run(*products, *state)[0] for state in zip(memories, histories)]

        def advances(memories: Any, histories: Any, rows: Any, count: Any) -> Any:
            return tuple(zip(*(ADVANCE(*state, rows, count) for state in zip(memories, histories))))

        program, compile_s = compiled(windows, *products, memories, histories)
        call = partial(program, *products, memories, histories)
        seconds = [s / COPIES for s in times_of(call)]
        us = kernel_us(call, ["_window"], COPIES)["_window"]
        ROWS.record(op="window", tokens=tokens, **spread(seconds), us=us, bytes_ms=state_bytes / copy_gb_s / 1e6,
               compile_s=compile_s, rel_err=error, ok=error < 1e-5)  # fmt: skip
        program, compile_s = compiled(advances, memories, histories, rows, count, donate=(0, 1))
        advance = in_place(program, (memories, histories), rows, count)
        seconds = [s / COPIES for s in times_of(advance)]
        ROWS.record(op="advance", tokens=tokens, **spread(seconds), bytes_ms=2 * state_bytes / copy_gb_s / 1e6,
               compile_s=compile_s)  # fmt: skip


def in_place(program: Any, states: Any, rows: WindowRows, count: jax.Array) -> Callable[[], Any]:
    """A call that advances the states that it left the time before."""
    kept = [states]

    def call() -> Any:
        kept[0] = tuple(map(list, program(*kept[0], rows, count)))
        return kept[0]

    return call


# Dense products of a window -------------------------------------------------------------------------------------------


def section_dense(copy_gb_s: float) -> None:
    """Compared: the first tile of rows of the last matrix."""
    for type_name, all_rows, cols in DENSE:
        layouts = [plane_layout(type_name, rows, cols) for rows in all_rows]
        firsts = [*itertools.accumulate((layout.num_words for layout in layouts), initial=0)]
        parts, num_bytes = tuple(map(PlanePart, layouts, firsts)), 4 * firsts[-1]
        num_copies = max(1, round(COLD_BYTES / num_bytes))
        copies = [jnp.concatenate([words_of(layout, i) for layout in layouts]) for i in range(num_copies)]
        tile = PlanePart(plane_layout(type_name, layouts[-1].tile_rows, cols), firsts[-2])
        matrix = np.asarray(decode_planes(own_words(copies[0], tile), tile.layout), np.float64)
        for tokens in DENSE_WINDOWS:
            x, chosen = normal(tokens, tokens, cols), choose_gemv_launch(tokens, layouts)
            for blocks in dict.fromkeys([chosen, choose_gemv_launch(tokens, layouts, whole_numbers=False)]):
                program, compile_s = compiled(partial(in_turn, parts=parts, blocks=blocks), x, copies)
                error = rel_err(program(x, copies)[0][-1][:, : len(matrix)], np.asarray(x, np.float64) @ matrix.T)
                us = kernel_us(partial(program, x, copies), ["kernel", "pack"], num_copies)
                ROWS.record(
                    op="dense", type=type_name, rows=all_rows, cols=cols, tokens=tokens,
                    whole_numbers=blocks.whole_numbers, us=us["kernel"], pack_us=us["pack"],
                    bytes_us=num_bytes / copy_gb_s / 1e3, compile_s=compile_s, rel_err=error, ok=error < 1e-5,
                )  # fmt: skip


def in_turn(x: jax.Array, copies: list[jax.Array], parts: tuple[PlanePart, ...], blocks: GemvLaunch) -> list[Any]:
    """Products with the same matrices of each of some copies."""
    return [GEMV(x, words, parts, blocks, not ON_GPU) for words in copies]


def sublayer(seed: int) -> gdn.GdnWeights:
    def matrix(rows: int, cols: int, at: int) -> Matrix:
        layout = plane_layout("Q8_0", rows, cols)
        return Matrix(words_of(layout, 10 * seed + at), "Q8_0", cols, layout)

    v = vectors(seed)
    return gdn.GdnWeights(
        qkv=matrix(CHANNELS, E, 0), gate=matrix(VALUES, E, 1), conv=v.conv, beta=matrix(HV, E, 2),
        alpha=matrix(HV, E, 3), dt_bias=v.dt_bias, a=v.a, norm=v.norm, out=matrix(E, VALUES, 4),
    )  # fmt: skip


def section_prompt(copy_gb_s: float) -> None:
    layers = [sublayer(i) for i in range(PROMPT_COPIES)]
    for tokens in PROMPTS:
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (normal(i, tokens, HK, D) for i in (1, 2)))
        v, log_a, beta = (
            normal(3, tokens, HV, D),
            -jnp.exp(normal(4, tokens, HV) - 3),
            jax.nn.sigmoid(normal(5, tokens, HV)),
        )
        memory, count = normal(6, HV, D, D, scale=0.1), jnp.int32(tokens)
        args = (q / D**0.5, k, v, log_a, beta, memory, count)
        program, compile_s = compiled(lambda *args: gdn_chunks(*args, chunk=GDN_CHUNK_TOKENS), *args)
        error = of_state = float("nan")
        if tokens == PROMPTS[0]:
            state, outs = np.asarray(memory, np.float64), []
            q64, k64, v64, log64, beta64 = (np.asarray(x, np.float64) for x in args[:5])
            for t in range(tokens):
                key, query = (np.tile(x[t], (HV // HK, 1)) for x in (k64, q64))
                state = state * np.exp(log64[t])[:, None, None]
                delta = beta64[t][:, None] * (v64[t] - np.einsum("hk,hkv->hv", key, state))
                state = state + key[:, :, None] * delta[:, None, :]
                outs.append(np.einsum("hk,hkv->hv", query, state))
            out, after = program(*args)
            error, of_state = rel_err(out, np.stack(outs)), rel_err(after, state)
        num_bytes = 4 * tokens * (2 * HK * D + 2 * HV * D + 4 * HV * GDN_CHUNK_TOKENS)
        ROWS.record(op="prompt, recurrence alone", tokens=tokens, **spread(times_of(partial(program, *args))),
               bytes_ms=num_bytes / copy_gb_s / 1e6, compile_s=compile_s, rel_err=error,
               state_rel_err=of_state, ok=not (error > 1e-3 or of_state > 1e-5))  # fmt: skip

        def run(u: jax.Array, layers: Any, state: gdn.GdnState, count: jax.Array, *, kernels: bool) -> jax.Array:
            for w in layers:
                u, state = gdn.prefill(u, w, state, count, G, kernels=kernels)
            return u

        u, state = normal(9, tokens, E), gdn.GdnState(memory, normal(8, TAPS - 1, CHANNELS))
        for kernels in (True, False):
            program, compile_s = compiled(partial(run, kernels=kernels), u, layers, state, count)
            seconds = [s / PROMPT_COPIES for s in times_of(partial(program, u, layers, state, count), repeats=7)]
            ROWS.record(op="prompt, sublayer", tokens=tokens, kernels=kernels, **spread(seconds), compile_s=compile_s,
                   temp_mb=program.memory_analysis().temp_size_in_bytes / 1e6)  # fmt: skip


if __name__ == "__main__":
    ROWS.run({"mixer": section_mixer, "window": section_window, "prompt": section_prompt, "dense": section_dense})
