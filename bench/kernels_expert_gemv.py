"""How near do the expert kernels of a decode window come to the time that their bytes need?

Held fixed: one layer of the full model (E 2560, F 640, 512 experts, 10 per token), random packed planes with scales
that keep activations near 1, pages of 16 KiB. Every call reads other experts than the call before, 1.1 GB in turn, so
the cache does not serve them. Bound: bytes of resident experts / measured HBM rate + bytes of the others / measured
zero-copy rate. Results are compared with float64 products of the same blocks decoded by the `gguf` package.

    python bench/kernels_expert_gemv.py [--seconds 100] [--out FOLDER] [--save bench/results/NAME.json]

Prints one table; JSON rows go to FOLDER/kernels_expert_gemv.jsonl ($OUT, or a temporary folder) as they come.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", message=".*[Tt]riton.*", category=DeprecationWarning)

import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGMLQuantizationType
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from strata_jax.kernels.expert_gemv import (
    Blocks,
    ExpertLayout,
    LaunchBlocks,
    expert_gemv,
    expert_layout,
    input_rows,
    pack_input,
    plan_window,
    planned_gemv,
    triton,
)
from strata_jax.kernels.expert_gemv.blocks import TABLE
from strata_jax.kernels.expert_gemv.vectors import down_rows
from strata_jax.kernels.planes import PlaneLayout, from_planes
from strata_jax.kernels.route import choose_experts, route_window

E, F, X, K = 2560, 640, 512, 10
PAGE_WORDS = 4096
START = time.time()
ROWS: list[dict[str, Any]] = []
TYPE_PAIRS = [
    ("IQ3_XXS", "IQ4_NL"),
    ("IQ3_XXS", "Q2_0"),
    ("IQ3_S", "Q2_0"),
    ("IQ2_S", "IQ4_NL"),
    ("IQ2_XS", "Q2_0"),
    ("IQ4_XS", "Q8_0"),
    ("Q6_K", "Q5_1"),
    ("Q5_K", "Q4_0"),
    ("Q4_K", "Q5_0"),
    ("IQ2_XXS", "Q8_0"),
    ("Q2_0", "Q2_0"),
    ("Q8_0", "IQ4_NL"),
]
GATE_UP = [(32, 4), (32, 8), (32, 2), (64, 8), (64, 4)]
DOWN = [(128, 4), (64, 2), (32, 1), (64, 4), (32, 2), (128, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100, help="start nothing new after this time")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0]
    with open(options.out / "kernels_expert_gemv.jsonl", "w") as file:

        def stage(name: str, fn: Callable[[], dict[str, Any] | None], least_s: float = 3) -> None:
            left = options.seconds - (time.time() - START)
            row: dict[str, Any] = {"stage": name}
            started = time.time()
            try:
                row |= (fn() or {}) if left > least_s else {"skipped": f"{left:.0f} s left"}
            except Exception as error:
                row |= {"error": f"{type(error).__name__}: {error}"[:300], "where": traceback.format_exc()[-300:]}
            row["took_s"] = round(time.time() - started, 2)
            ROWS.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        stage("device", lambda: {"kind": device.device_kind, "jax": jax.__version__, "platform": device.platform})
        run_all(stage)
    if options.save:
        device_row, *rows = ROWS
        machine = {name: device_row[name] for name in ("kind", "jax", "platform")}
        options.save.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    print_table()


def run_all(stage: Callable[..., None]) -> None:
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    layout = expert_layout("IQ3_XXS", "IQ3_XXS", "IQ4_NL", E, F)
    state: dict[str, Any] = {}

    def make() -> dict[str, Any]:
        words = random_experts(layout, X, seed=0)
        state["words"], state["bank"] = words, jax.device_put(words, host)
        state["arena"] = arena_of(words)
        state["bank"].block_until_ready()
        return {"expert_bytes": 4 * layout.num_words, "bank_gb": words.nbytes / 1e9}

    stage("make", make)
    stage("roof hbm copy", lambda: state.setdefault("hbm", hbm_roof()))
    stage("roof zero-copy 10", lambda: zero_copy_roof(state["bank"], 10))
    stage("roof zero-copy 80", lambda: state.setdefault("pcie", zero_copy_roof(state["bank"], 80)))
    for gate_up, down in TYPE_PAIRS[:3]:
        stage(f"check {gate_up}+{down} T=1", functools.partial(check_types, gate_up, down))

    sets = id_sets(1, X)
    x = pack_input(jax.random.normal(jax.random.key(1), (1, E), jnp.float32), input_rows(layout))
    h = pack_input(jax.random.normal(jax.random.key(2), (K, F), jnp.float32), down_rows(layout))
    resident = jnp.arange(X, dtype=jnp.int32) * pages_per_expert(layout)

    def one_launch(which: str, rows: int, warps: int) -> dict[str, Any]:
        blocks = LaunchBlocks(rows, warps)

        def call(ids: jax.Array, arena: jax.Array, bank: jax.Array, pages: jax.Array) -> jax.Array:
            plan = plan_window(ids, pages)
            if which == "gate_up":
                return triton.gate_up(x, plan, (arena,), bank, pages, layout, blocks).reshape(-1)[:128]
            return triton.down(h, plan, (arena,), bank, pages, layout, blocks, 1).reshape(-1)[:128]

        part = layout.gate.num_words + layout.up.num_words if which == "gate_up" else layout.down.num_words
        us, _ = time_loop(looped(call, None), sets, state["arena"], state["arena"][:X, :1], resident)
        return {**us, "gb_s": round(K * part * 4 / us["us"] / 1e3, 1), "share_of_hbm": share(K * part * 4, us, state)}

    for rows, warps in GATE_UP:
        stage(f"gate_up T=1 100% rows={rows} warps={warps}", functools.partial(one_launch, "gate_up", rows, warps))
    for rows, warps in DOWN:
        stage(f"down T=1 100% rows={rows} warps={warps}", functools.partial(one_launch, "down", rows, warps))

    blocks = best_blocks()
    for tokens in (1, 4):
        stage(f"window T={tokens}", functools.partial(windows, tokens, layout, blocks, state, host), 8)
    eight = Blocks(LaunchBlocks(32, 8), blocks.down)
    stage("window T=4, 8 warps", functools.partial(windows, 4, layout, eight, state, host), 8)
    for tokens in (1, 4, 8, 2048, 8192):
        stage(f"route T={tokens}", functools.partial(routes, tokens, layout))
    for gate_up, down in TYPE_PAIRS[3:]:
        stage(f"check {gate_up}+{down} T=1", functools.partial(check_types, gate_up, down))
    for tokens in (2, 8, 6):
        stage(f"window T={tokens}", functools.partial(windows, tokens, layout, blocks, state, host), 12)
    for gate_up, down in [*TYPE_PAIRS[1:5], ("Q2_0", "Q2_0")]:
        stage(f"types {gate_up}+{down} T=1 100%", functools.partial(other_types, gate_up, down, blocks, state))


# What is measured -----------------------------------------------------------------------------------------------------


def windows(
    tokens: int, layout: ExpertLayout, blocks: Blocks, state: dict[str, Any], host: jax.sharding.Sharding
) -> dict[str, Any]:
    """The whole operation at 0, 50 and 100 % hits, the window without any expert, and tokens that share experts."""
    u = jax.random.normal(jax.random.key(3), (tokens, E), jnp.float32)
    weights = jnp.full((tokens, K), 0.1, jnp.float32)

    x = jax.block_until_ready(pack_input(u, input_rows(layout)))  # as `kernels/route` makes it beside the routing

    def call(ids: jax.Array, arena: jax.Array, bank: jax.Array, pages: jax.Array) -> jax.Array:
        plan = plan_window(ids, pages)
        return planned_gemv(x, plan, weights, (arena,), bank, pages, layout, blocks=blocks)

    sets, shared = id_sets(tokens, X), id_sets(tokens, X, shared=True)
    every = np.arange(X) * pages_per_expert(layout)
    loop = looped(call, host)
    out: dict[str, Any] = {"blocks": repr(blocks)}
    expected = oracle_window(
        np.asarray(u), np.asarray(sets[-1]), np.asarray(weights), np.asarray(state["words"]), layout
    )
    if "loop_failed" not in state:
        try:
            jax.block_until_ready(loop(sets, state["arena"], state["bank"], jnp.asarray(every, jnp.int32)))
        except Exception as error:
            state["loop_failed"] = f"{type(error).__name__}: {error}"[:300]
    if "loop_failed" in state:  # then the host starts every call, which takes longer than a call with 100 % hits
        out["started one by one because"] = state["loop_failed"]
        loop = one_by_one(call, host)
    seen = []
    for hits in (1.0, 0.5, 0.0):
        pages = jnp.asarray(np.where(np.arange(X) % 10 < 10 * hits, every, -1), jnp.int32)
        us, got = time_loop(loop, sets, state["arena"], state["bank"], pages, least_runs=20 if hits == 1 else 7)
        seen.append(got)
        real = float(np.mean(np.asarray(pages)[np.asarray(sets).reshape(-1)] >= 0))
        num_bytes = [tokens * K * 4 * layout.num_words * part for part in (real, 1 - real)]
        bound_us = num_bytes[0] / state["hbm"]["gb_s"] / 1e3 + num_bytes[1] / state["pcie"]["gb_s"] / 1e3
        out[f"{hits:.0%}"] = {
            **us,
            "hits": round(real, 3),
            "bound_us": round(bound_us, 1),
            "share": round(bound_us / us["us"], 3),
            "error": relative(got, expected),
        }
    out["same_bits_wherever"] = bool(all((got == seen[0]).all() for got in seen))
    pages = jnp.asarray(every, jnp.int32)
    if tokens > 1:
        shared = shared[: len(sets)]  # the same shape: no second compilation
        out["shared_100%"] = time_loop(loop, shared, state["arena"], state["bank"], pages)[0]
    out["no experts"] = time_loop(loop, jnp.full_like(sets, X), state["arena"], state["bank"], pages)[0]
    return out


def routes(tokens: int, layout: ExpertLayout) -> dict[str, Any]:
    """Routing of a layer by the kernel and by XLA: of a window with its plan and its vectors, of a chunk alone."""
    scores, u = (jax.random.normal(jax.random.key(i), (20, tokens, n), jnp.float32) for i, n in enumerate((X, E)))
    pages = jnp.where(jnp.arange(X) % 2, jnp.arange(X, dtype=jnp.int32), -1)
    out: dict[str, Any] = {}
    found = {}
    for backend in ("triton", "reference"):

        def call(i: jax.Array, *_: jax.Array, backend: str = backend) -> jax.Array:
            if tokens > 8:
                ids, weights = choose_experts(scores[i], K, backend=backend)
                return ids + weights
            rows = input_rows(layout)
            to = route_window(scores[i], u[i], u[0, 0], pages, jnp.int32(tokens), K, rows, backend=backend)
            used = (
                jnp.sum(to.x.astype(jnp.float32))
                + jnp.sum(to.plan.row_of + to.hits)
                + jnp.sum(to.shared)
                + jnp.sum(to.uses)
            )
            return to.ids + to.weights + 0 * used

        out[backend], found[backend] = time_loop(looped(call, None), jnp.arange(20), pages, pages, pages)
    out["right"] = bool((np.abs(found["triton"] - found["reference"]) < 1e-6 * X).all())
    return out


def other_types(gate_up: str, down: str, blocks: Blocks, state: dict[str, Any]) -> dict[str, Any]:
    layout = expert_layout(gate_up, gate_up, down, E, F)
    num_experts = 120
    words = random_experts(layout, num_experts, seed=4)
    u = jax.random.normal(jax.random.key(3), (1, E), jnp.float32)
    weights = jnp.full((1, K), 0.1, jnp.float32)

    def call(ids: jax.Array, arena: jax.Array, bank: jax.Array, pages: jax.Array) -> jax.Array:
        return expert_gemv(u, ids, weights, (arena,), bank, pages, layout, backend="triton", blocks=blocks)

    pages = jnp.arange(num_experts, dtype=jnp.int32) * pages_per_expert(layout)
    us, _ = time_loop(looped(call, None), id_sets(1, num_experts), arena_of(words), jnp.asarray(words), pages)
    num_bytes = K * 4 * layout.num_words
    return {**us, "gb_s": round(num_bytes / us["us"] / 1e3, 1), "share_of_hbm": share(num_bytes, us, state)}


def check_types(gate_up: str, down: str) -> dict[str, Any]:
    """One token, three experts, one of them in the arena's core, one in a segment, one in the bank."""
    layout = expert_layout(gate_up, gate_up, down, E, F)
    words = random_experts(layout, 4, seed=5)
    per = pages_per_expert(layout)
    core, segment = arena_of(words[1:2]), arena_of(words[3:4])
    bank = words.copy()
    bank[[1, 3]] = 0xFFFFFFFF
    pages = jnp.asarray([-1, 0, -1, per], jnp.int32)
    ids, weights = np.asarray([[1, 2, 3]], np.int32), np.asarray([[0.5, -0.3, 0.8]], np.float32)
    u = np.random.default_rng(6).standard_normal((1, E)).astype(np.float32)
    blocks = Blocks(LaunchBlocks(32, 4), LaunchBlocks(64, 2))

    def call(u: jax.Array, ids: jax.Array, arrays: Any, bank: jax.Array, pages: jax.Array) -> jax.Array:
        return expert_gemv(u, ids, weights, arrays, bank, pages, layout, backend="triton", blocks=blocks)

    got = np.asarray(jax.jit(call)(u, ids, (core, segment), bank, pages))
    error = relative(got, oracle_window(u, ids, weights, words, layout))
    return {"error": error, "right": bool(error < 1e-5), "blob_bytes": 4 * layout.num_words}


def hbm_roof() -> dict[str, Any]:
    data = jnp.ones((2**29,), jnp.uint32)
    add = jax.jit(lambda a, b: a + b)
    seconds = median_s(lambda: add(data, jnp.uint32(1)))
    return {"gb_s": round(2 * data.nbytes / seconds / 1e9, 1)}


def zero_copy_roof(bank: jax.Array, num_experts: int) -> dict[str, Any]:
    """Copy the first 132 x 16 KiB of some experts from host memory in one launch, nothing decoded."""
    run, per = 4096, 132

    def kernel(ids_ref: Any, bank_ref: Any, out_ref: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        out_ref[j, pl.ds(i * run, run)] = bank_ref[ids_ref[j], pl.ds(i * run, run)]

    copy = pl.pallas_call(
        kernel,
        grid=(per, num_experts),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((num_experts, run * per), jnp.uint32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )
    fn = jax.jit(copy, in_shardings=(None, bank.sharding))
    order = np.random.default_rng(0).permutation(X).astype(np.int32)
    picks = [jnp.asarray(np.roll(order, -num_experts * i)[:num_experts]) for i in range(8)]
    turn = iter(range(10**9))
    seconds = median_s(lambda: fn(picks[next(turn) % 8], bank))
    return {"gb_s": round(num_experts * run * per * 4 / seconds / 1e9, 2)}


# Data -----------------------------------------------------------------------------------------------------------------


def random_experts(layout: ExpertLayout, num_experts: int, seed: int) -> np.ndarray:
    """u32[num_experts, num_words]: random codes, block scales that make weights near 1/sqrt(cols)."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (num_experts, layout.num_words), dtype=np.uint32)
    for part, first in zip(layout.parts, layout.firsts):
        scale = 1.0 / np.sqrt(part.cols) / unit_deviation(part.type_name)
        tiles = words[:, first : first + part.num_words].reshape(num_experts, -1, part.row_words, part.tile_rows)
        for field in part.fields:
            if field.name in ("d", "m"):
                shape = (num_experts, tiles.shape[1], field.num_words, part.tile_rows, 2)
                value = rng.uniform(0.5, 1.0, shape).astype(np.float32) * np.float32(scale)
                value *= rng.integers(0, 2, shape, dtype=np.int8) * 2 - 1
                into = value.astype(np.float16).view(np.uint32)[..., 0]
                tiles[:, :, field.first : field.first + field.num_words] = into
        words[:, first : first + part.num_words] = tiles.reshape(num_experts, -1)
    return words


@functools.cache
def unit_deviation(type_name: str) -> float:
    """Standard deviation of weights of random codes whose block scale is 0.75."""
    layout = expert_layout(type_name, type_name, "Q8_0", 2560, 64).gate
    words = np.random.default_rng(7).integers(0, 2**32, layout.num_words, dtype=np.uint32)
    tiles = words.reshape(-1, layout.row_words, layout.tile_rows)
    for field in layout.fields:
        if field.name in ("d", "m"):
            tiles[:, field.first : field.first + field.num_words] = np.full(2, 0.75, np.float16).view(np.uint32)[0]
    return float(np.std(matrix_of(words, layout)))


def matrix_of(words: np.ndarray, layout: PlaneLayout) -> np.ndarray:
    """Decode with the `gguf` package: f32[rows, cols]."""
    packed = from_planes(np.ascontiguousarray(words), layout)
    if layout.type_name == "Q2_0":  # unknown to gguf 0.19.0
        blocks = packed.reshape(-1, 18)
        codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return ((codes.reshape(-1, 64).astype(np.float32) - 1) * scale).reshape(layout.rows, -1)
    return gguf.quants.dequantize(packed, GGMLQuantizationType[layout.type_name])


def oracle_window(
    u: np.ndarray, ids: np.ndarray, weights: np.ndarray, words: np.ndarray, layout: ExpertLayout
) -> np.ndarray:
    """In float64, the first token and the last; the others NaN."""
    out = np.full(u.shape, np.nan)
    for t in {0, len(u) - 1}:
        total = np.zeros(u.shape[1])
        for expert, weight in zip(ids[t], weights[t]):
            parts = zip(layout.parts, layout.firsts)
            gate, up, down = (matrix_of(words[expert, f : f + p.num_words], p).astype(np.float64) for p, f in parts)
            g = gate @ u[t].astype(np.float64)
            total += weight * (down @ (g / (1 + np.exp(-g)) * (up @ u[t].astype(np.float64))))
        out[t] = total
    return out


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    rows = ~np.isnan(expected[:, 0])
    return float(np.linalg.norm(got[rows] - expected[rows]) / np.linalg.norm(expected[rows]))


def pages_per_expert(layout: ExpertLayout) -> int:
    return -(-layout.num_words // PAGE_WORDS)


def arena_of(words: np.ndarray) -> jax.Array:
    """All experts in slots, one after the other: u32[pages, PAGE_WORDS]."""
    per = -(-words.shape[1] // PAGE_WORDS)
    data = jnp.pad(jnp.asarray(words), ((0, 0), (0, per * PAGE_WORDS - words.shape[1])))
    return jax.block_until_ready(data.reshape(-1, PAGE_WORDS))


def id_sets(tokens: int, num_experts: int, shared: bool = False) -> jax.Array:
    """i32[sets, T, K]: every expert once; `shared`: half of a token's experts are those of its neighbour too."""
    per_set = K if shared else tokens * K
    order = np.random.default_rng(8).permutation(num_experts)
    num_sets = num_experts // per_set
    sets = order[: num_sets * per_set].reshape(num_sets, -1, K)
    if shared:
        other = np.roll(sets, 1, axis=0)
        mixed = np.concatenate([sets[..., : K // 2], other[..., K // 2 :]], axis=-1)
        sets = np.concatenate([sets if t % 2 == 0 else mixed for t in range(tokens)], axis=1)
    return jnp.asarray(np.sort(sets, axis=-1), jnp.int32)


# Time -----------------------------------------------------------------------------------------------------------------


def looped(call: Callable[..., jax.Array], bank_sharding: Any) -> Callable[..., jax.Array]:
    """All sets of experts one after the other in one program; returns what the last call returned."""

    def loop(sets: jax.Array, arena: jax.Array, bank: jax.Array, pages: jax.Array) -> jax.Array:
        def step(i: jax.Array, last: jax.Array) -> jax.Array:
            return call(sets[i], arena, bank, pages)

        first = jax.eval_shape(call, sets[0], arena, bank, pages)
        return jax.lax.fori_loop(0, sets.shape[0], step, jnp.zeros(first.shape, first.dtype))

    return jax.jit(loop, in_shardings=(None, None, bank_sharding, None))


def one_by_one(call: Callable[..., jax.Array], bank_sharding: Any) -> Callable[..., jax.Array]:
    fn = jax.jit(call, in_shardings=(None, None, bank_sharding, None))

    def loop(sets: jax.Array, arena: jax.Array, bank: jax.Array, pages: jax.Array) -> jax.Array:
        return [fn(ids, arena, bank, pages) for ids in sets][-1]

    return loop


def time_loop(
    loop: Callable[..., jax.Array], sets: jax.Array, *operands: jax.Array, least_runs: int = 20
) -> tuple[dict[str, Any], np.ndarray]:
    """Time per call over all sets, and the result of the last call."""
    result = np.asarray(loop(sets, *operands))
    each = sorted(1e6 * t / sets.shape[0] for t in run_times(lambda: loop(sets, *operands), least_runs))
    us = {
        "us": round(each[len(each) // 2], 2),
        "us_min": round(each[0], 2),
        "us_max": round(each[-1], 2),
        "runs": len(each),
        "calls_per_run": int(sets.shape[0]),
    }
    return us, result


def median_s(fn: Callable[[], Any]) -> float:
    times = sorted(run_times(fn, 20))
    return times[len(times) // 2]


def run_times(fn: Callable[[], Any], runs: int) -> Iterator[float]:
    for _ in range(2):
        jax.block_until_ready(fn())
    for _ in range(runs):
        started = time.perf_counter()
        jax.block_until_ready(fn())
        yield time.perf_counter() - started


def share(num_bytes: int, us: dict[str, Any], state: dict[str, Any]) -> float:
    return round(num_bytes / state["hbm"]["gb_s"] / 1e3 / us["us"], 3)


def best_blocks() -> Blocks:
    """The fastest of the variants timed so far."""

    def best(which: str, default: LaunchBlocks) -> LaunchBlocks:
        rows = [r for r in ROWS if r["stage"].startswith(f"{which} T=1") and "us" in r]
        if not rows:
            return default
        words = min(rows, key=lambda r: r["us"])["stage"].split()
        return LaunchBlocks(int(words[-2].split("=")[1]), int(words[-1].split("=")[1]))

    default = TABLE["NVIDIA H200"][0][1]
    return Blocks(best("gate_up", default.gate_up), best("down", default.down))


def print_table() -> None:
    print(f"\n{time.time() - START:.0f} s in all")
    for row in ROWS:
        rest = {k: v for k, v in row.items() if k not in ("stage", "where", "took_s")}
        print(f"{row['stage']:48} {row['took_s']:6.1f} s  {json.dumps(rest)[:900]}")
        if "error" in row and isinstance(row["error"], str):
            print("    ", row["where"].replace("\n", " | ")[-300:])


if __name__ == "__main__":
    main()
