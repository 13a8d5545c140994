"""What `h200.py` measures: roofs, prompts, rounds, logits; each returns the numbers of one row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from traces import trace_numbers, traced

from strata_jax.kv_types import cell_bytes
from strata_jax.memory.sizes import model_sizes

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine
    from strata_jax.engine.session import Session
    from strata_jax.geometry import Geometry
    from strata_jax.synthetic.full import SyntheticModel

COPY_WORDS = 2**26  # 256 MiB
LAUNCHES = 400
IN_A_ROW = 16  # operations of a roof in one program, so that starting it does not count
PRODUCT = (8192, 2560, 1280)
COUNTED = 16  # rounds in which uses of experts are read, for the bytes of the bound


def times_of(call: Callable[[], Any], repeats: int = 20) -> list[float]:
    """Seconds of each call after two."""
    import jax

    found = []
    for i in range(repeats + 2):
        started = time.perf_counter()
        jax.block_until_ready(call())
        if i >= 2:
            found.append(time.perf_counter() - started)
    return found


def spread(seconds: Sequence[float], name: str = "ms") -> dict[str, Any]:
    """Median, range and count, in milliseconds."""
    ms = [1000 * s for s in seconds]
    return {name: statistics.median(ms), f"{name}_min": min(ms), f"{name}_max": max(ms), "runs": len(ms)}


def _rate(seconds: Sequence[float], amount: float, name: str) -> dict[str, Any]:
    return {name: amount / statistics.median(seconds), **spread(seconds)}


def hbm_roof() -> dict[str, Any]:
    """Device memory: bytes read and written by copies that follow each other in one program."""
    import jax
    import jax.numpy as jnp

    def copies(x: jax.Array) -> jax.Array:
        for _ in range(IN_A_ROW):
            x = jax.lax.optimization_barrier(x + jnp.uint32(1))
        return x

    data, step = jnp.arange(COPY_WORDS, dtype=jnp.uint32), jax.jit(copies)
    return _rate(times_of(lambda: step(data)), IN_A_ROW * 2 * data.nbytes / 1e9, "hbm_gb_s")


def link_roof() -> dict[str, Any]:
    """Pinned host memory to the device."""
    import jax

    from strata_jax.engine.engine import bank_sharding

    host = jax.device_put(np.arange(COPY_WORDS, dtype=np.uint32), bank_sharding())
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    # a jitted copy: `device_put` of an array that is there already would copy nothing
    copy = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device) + np.uint32(1), out_shardings=there)
    return _rate(times_of(lambda: copy(host)), host.nbytes / 1e9, "link_gb_s")


def product_roof() -> dict[str, Any]:
    """XLA's own bf16 product at the size of a chunk's."""
    import jax
    import jax.numpy as jnp

    m, k, n = PRODUCT if jax.default_backend() == "gpu" else (64, 64, 64)  # a CPU only shows that the script works
    a, b = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate([(m, k), (k, n)]))
    many = jax.jit(lambda a, b: [a @ (b * (i + 1)) for i in range(IN_A_ROW)])
    return _rate(times_of(lambda: many(a, b)), IN_A_ROW * 2 * m * k * n / 1e12, "bf16_tflops") | {"shape": (m, k, n)}


def experts_roof(g: Geometry, chunk: int) -> dict[str, Any]:
    """XLA's own bf16 products of a block's experts, already decoded, each with its mean rows of a chunk."""
    import jax
    import jax.numpy as jnp

    num, rows = g.num_experts, -(-chunk * g.num_experts_used // g.num_experts)
    width, hidden = g.embed_width, g.expert_width[0]

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        dims = (((2,), (1,)), ((0,), (0,)))
        return jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    found: dict[str, Any] = {"rows": rows}
    for name, k, n in (("gate_up", width, 2 * hidden), ("down", hidden, width)):
        # one at a time: together they would not fit an 8 GB card
        x, w = (jnp.ones(shape, jnp.bfloat16) for shape in ((num, rows, k), (num, k, n)))
        run = jax.jit(product)
        found |= spread(times_of(lambda run=run, x=x, w=w: run(x, w), repeats=7), f"{name}_ms")  # type: ignore[misc]
    seconds = (found["gate_up_ms"] + found["down_ms"]) / 1e3
    return found | {"experts_s": seconds, "bf16_tflops": 6 * num * rows * width * hidden / seconds / 1e12}


def launch_roof() -> dict[str, Any]:
    """What one more small kernel costs in a program that runs one after the other: XLA's, and Pallas' by Triton."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 1.0001

    scaled = pl.pallas_call(
        kernel, grid=(1,), out_shape=jax.ShapeDtypeStruct((4096,), np.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1), interpret=jax.default_backend() == "cpu",
    )  # fmt: skip

    def chain(x: jax.Array, one: Callable[[jax.Array], jax.Array]) -> jax.Array:
        for _ in range(LAUNCHES):
            x = jax.lax.optimization_barrier(one(x))
        return x

    found: dict[str, Any] = {"launches": LAUNCHES}
    ones: dict[str, Callable[[jax.Array], jax.Array]] = {"": lambda x: jnp.roll(x, 1) * 1.0001, "triton_": scaled}
    for name, one in ones.items():
        step, x = jax.jit(lambda x, one=one: chain(x, one)), jnp.ones(4096)
        seconds = times_of(lambda step=step, x=x: step(x))  # type: ignore[misc]
        found[f"{name}launch_us"] = 1e6 * statistics.median(seconds) / LAUNCHES
        found |= spread(seconds, f"{name}ms")
    return found


def copy_rate(engine: Any, *, pieces: str) -> float:
    """GB/s of the copy engine: experts of a block that fill a buffer, as neighbours or every second one."""
    import jax.numpy as jnp

    from strata_jax.engine.host_copies import address
    from strata_jax.engine.staging import LINE_WORDS, copy_runs
    from strata_jax.memory.staging import LINE_BYTES, buffer_lines, expert_lines

    blobs = engine.banks[0].blobs
    num_bytes, lines = blobs.shape[1] * 4, buffer_lines(engine.plan.stage_bytes)
    buffer = jnp.zeros((lines, LINE_WORDS), jnp.uint32).block_until_ready()
    most = min(blobs.shape[0] // 2, lines * LINE_BYTES // (expert_lines(num_bytes) * LINE_BYTES))
    experts = np.arange(most) * (2 if pieces == "pieces" else 1)
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        engine.staging.copies.start(0, copy_runs(experts, address(buffer), address(blobs), num_bytes))
        engine.staging.copies.wait(0)
        seconds.append(time.perf_counter() - started)
    np.testing.assert_array_equal(np.asarray(buffer[: num_bytes // LINE_BYTES]).reshape(-1),
                                  np.asarray(blobs)[0][: num_bytes // LINE_BYTES * LINE_WORDS])  # fmt: skip
    return most * num_bytes / statistics.median(seconds) / 1e9


def zero_copy_roof(bank: Any, num_experts: int) -> dict[str, Any]:
    """Some experts of a block, other ones each time, copied from host memory by one kernel, many times in one program;
    nothing is decoded."""
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    run, count = 4096, bank.shape[1] // 4096

    def kernel(ids: Any, words: Any, out: Any) -> None:
        i, j = pl.program_id(0), pl.program_id(1)
        out[j, pl.ds(i * run, run)] = words[ids[j], pl.ds(i * run, run)]

    copy = pl.pallas_call(
        kernel, grid=(count, num_experts), in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((num_experts, run * count), np.uint32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )  # fmt: skip

    def copies(ids: jax.Array, words: jax.Array) -> jax.Array:
        found, total = ids[0], jax.numpy.uint32(0)
        for i in range(IN_A_ROW):
            # one after the other, as the blocks of a round are, and none of them left out
            found, out = jax.lax.optimization_barrier((ids[(i + 1) % IN_A_ROW], copy(found, words)))
            total += out[0, 0]
        return total

    fn = jax.jit(copies, in_shardings=(None, bank.sharding))
    order = np.random.default_rng(0).permutation(bank.shape[0]).astype(np.int32)
    ids = jax.numpy.asarray(np.stack([np.roll(order, -num_experts * i)[:num_experts] for i in range(IN_A_ROW)]))
    amount = IN_A_ROW * num_experts * run * count * 4 / 1e9
    return _rate(times_of(lambda: fn(ids, bank)), amount, "zero_copy_gb_s") | {"experts": num_experts}


class Bounds:
    """What the hardware needs at least, from the roofs of the same process.

    zero_copy_gb_s: what one kernel reads from host memory, by the number of experts; none: the link's rate for any.
    experts_s: what XLA needs for the products of a block's experts in bf16, by the tokens of a chunk.
    """

    def __init__(
        self, engine: Engine, model: SyntheticModel, hbm_gb_s: float, link_gb_s: float, bf16_tflops: float,
        zero_copy_gb_s: dict[int, float] | None = None, experts_s: dict[int, float] | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.odds, self.experts_s = engine, model.odds, experts_s or {}
        self.zero_copy = zero_copy_gb_s or {1: link_gb_s}
        self.hbm, self.link, self.flops = 1e9 * hbm_gb_s, 1e9 * link_gb_s, 1e12 * bf16_tflops
        self.blobs = np.array(model_sizes(engine.geometry).blobs[: len(engine.banks)])
        sizes = model_sizes(engine.geometry)
        self.dense, self.drafter, self.head = sizes.dense_bytes, sizes.drafter_bytes, sizes.head_bytes

    def resident(self) -> np.ndarray:
        """bool[L', X]."""
        return self.engine.residency.slot_of >= 0

    def chunk_s(self, num_tokens: int) -> dict[str, float]:
        """The expected bytes of missing experts that a chunk uses, and its products with experts and dense weights.

        `shapes_s` takes as long for those of experts as XLA does with decoded weights of the same shapes.
        """
        g = self.engine.geometry
        used = 1 - (1 - self.odds) ** num_tokens  # of each expert, the same in every block
        missing = float(np.sum((~self.resident()) * used[None, :] * self.blobs[:, None]))
        expert = sum(3 * g.embed_width * width for width in g.expert_width[: len(self.engine.banks)])
        dense = sum(
            t.num_parameters for t in g.tensor_types.values()
            if t.component not in ("token_embd", "output", "PLE table", "routed experts", "MTP experts")
        )  # fmt: skip
        of_dense, of_experts = 2 * num_tokens * dense, 2 * num_tokens * g.num_experts_used * expert
        found = {"stream_s": missing / self.link, "compute_s": (of_dense + of_experts) / self.flops}
        if num_tokens in self.experts_s:
            found["shapes_s"] = of_dense / self.flops + len(self.engine.banks) * self.experts_s[num_tokens]
        return found

    def round_s(self, uses: np.ndarray, num_drafts: int, context: int) -> dict[str, float]:
        """Bytes of a round: each expert that it uses once, from where it is; dense weights, and the head again for
        every draft; recurrent states read and written; the index keys and the cells that attention chooses."""
        used = uses > 0
        hits = float(np.sum((used & self.resident()) * self.blobs[:, None]))
        misses = float(np.sum((used & ~self.resident()) * self.blobs[:, None]))
        dense = self.dense + (self.drafter if num_drafts else 0) + (1 + num_drafts) * self.head
        state = self.state_bytes(context)
        from_hbm, a_block = (hits + dense + state) / self.hbm, misses / float(np.mean(self.blobs)) / len(uses)
        zero_copy = 1e9 * float(np.interp(a_block, *zip(*sorted(self.zero_copy.items()), strict=True)))
        return {
            "hit_bytes": hits, "miss_bytes": misses, "dense_bytes": dense, "state_bytes": state,
            "bound_s": from_hbm + misses / self.link, "zero_copy_bound_s": from_hbm + misses / zero_copy,
        }  # fmt: skip

    def state_bytes(self, context: int) -> float:
        """Recurrent states once each way, and what one token's attention reads at a context, of the trunk's blocks."""
        g, plan = self.engine.geometry, self.engine.plan
        k_bytes, v_bytes = cell_bytes(plan.kv_type, g.num_kv_heads, g.head_dim)
        recurrent = sum(g.recurrent[: g.num_layers]) * g.gdn_value_heads * g.gdn_head_dim**2 * 4
        attention = 0.0
        for ratio in (g.compress_ratio[layer] for layer in g.attention_layers):
            cells = min(context, g.index_top_k + ratio) if ratio else context
            attention += cells * (k_bytes + v_bytes) + (context // ratio * g.index_dim * 4 if ratio else 0)
        return 2 * recurrent + attention


def prompt_row(engine: Engine, bounds: Bounds, tokens: list[int], repeats: int, trace: Path | None = None
               ) -> dict[str, Any]:  # fmt: skip
    """Read a prompt several times; the first reading compiles and does not count. A last one may be traced."""
    from strata_jax.engine.session import fresh_session

    compiled, chunk, totals = engine.programs.compile_s, engine.plan.chunk_tokens, []
    lookups = hits = 0
    for i in range(repeats + 1):
        records: list[Any] = []
        fresh_session(engine, on_chunk=records.append).prefill(tokens)
        if i:
            totals.append(sum(r.seconds for r in records))
            lookups, hits = sum(r.lookups for r in records), sum(r.hits for r in records)
    limits, median = bounds.chunk_s(chunk), statistics.median(totals)
    at_shapes = limits.pop("shapes_s", None)
    floor = max(limits.values()) * len(tokens) / chunk
    return {
        **spread(totals), "tokens": len(tokens), "tok_s": len(tokens) / median, "hit_rate": hits / lookups,
        "bound_tok_s": len(tokens) / floor, "share_of_bound": floor / median,
        "bound_by": max(limits, key=lambda name: limits[name]), **{f"chunk_{k}": v for k, v in limits.items()},
        **({} if at_shapes is None else {
            "share_at_shapes": max(limits["stream_s"], at_shapes) * len(tokens) / chunk / median,
            "chunk_shapes_s": at_shapes,
        }),
        "compile_s": engine.programs.compile_s - compiled,
        **({} if trace is None else trace_numbers(traced(lambda: fresh_session(engine).prefill(tokens), trace), 1)),
    }  # fmt: skip


def decode_row(engine: Engine, bounds: Bounds, session: Session, num_tokens: int, slots: int, rounds: int,
               trace: Path | None = None) -> dict[str, Any]:  # fmt: skip
    """Rounds that keep every row (the tokens are forced), with only the first slots filled.

    Which experts a round used is read back in rounds of their own after the timed ones, for their bytes: another array
    for the host takes its time. The session goes on from where it is. Windows of more than one token are followed by
    the drafts of the next one, as in a run; after one of a single token they are worth nothing, but take as long.
    """
    from strata_jax.engine.rounds import withdraw
    from strata_jax.engine.sampler import sampling_arrays
    from strata_jax.sampling import Sampling

    whole, made, compiled = engine.residency, engine.plan, engine.programs.compile_s
    engine.publish(whole.evicted(range(slots, whole.num_slots)))
    engine.plan = replace(made, spec_window=num_tokens)  # a shorter window in a plan of longer ones would be padded
    try:
        drafts = num_tokens - 1
        following = engine.file.next_tokens()
        how, text = sampling_arrays(Sampling()), [session.tokens[-1]]
        for _ in range((rounds + COUNTED + 6) * num_tokens + 1):
            text.append(int(following[text[-1]]))
        records, floors = [], []

        def run(i: int, *, more: bool = False) -> Any:
            first = 1 + i * num_tokens
            window, forced = text[first : first + num_tokens], text[first + 1 : first + num_tokens + 1]
            record = session._round(window, forced, how, 0.0, drafts, following=num_tokens if more else 0)[0]
            if len(record.emitted) != num_tokens:
                raise RuntimeError(f"a round kept {len(record.emitted)} of {num_tokens} rows")
            return record

        if drafts:
            session._first_window(text[1], drafts, 0.0)
        for i in range(rounds + COUNTED + 3):
            session.count_uses = i >= rounds + 3
            record = run(i, more=i < rounds + 2)
            if session.count_uses:
                floors.append(bounds.round_s(record.uses, drafts, len(session.tokens)))
            elif i >= 3:
                records.append(record)
        more, session.count_uses = {}, False
        if trace is not None:
            later = range(rounds + COUNTED + 3, rounds + COUNTED + 6)
            rows = [(i, i < later[-1]) for i in later]
            more = trace_numbers(traced(lambda: [run(i, more=m) for i, m in rows] and None, trace), len(later))
        session._forget_chosen()
    finally:
        engine.plan = made
        withdraw(engine)
        engine.publish(whole)
        engine.programs.places.clear()
    ms, floor = spread([r.seconds for r in records]), {k: statistics.mean(f[k] for f in floors) for k in floors[0]}
    lookups = sum(r.lookups for r in records)
    return {
        **ms, "hit_rate": sum(r.hits for r in records) / lookups, "tok_s": 1000 * num_tokens / ms["ms"],
        "bound_ms": 1000 * floor["bound_s"], "share_of_bound": 1000 * floor["bound_s"] / ms["ms"],
        "bound_link_gb_s": bounds.link / 1e9, "share_of_zero_copy_bound": 1000 * floor["zero_copy_bound_s"] / ms["ms"],
        "context": len(session.tokens), "drafts": drafts, **{k: v for k, v in floor.items() if k.endswith("bytes")},
        "compile_s": engine.programs.compile_s - compiled, **more,
    }  # fmt: skip


def compared(engine: Engine, model: SyntheticModel, forced: int, mine: Path, other: Path | None) -> dict[str, Any]:
    """Logits after a chunk and after forced tokens, written to a file and compared with those of another one."""
    from strata_jax.engine.session import fresh_session

    compiled, started = engine.programs.compile_s, time.perf_counter()
    tokens = model.topic_tokens(0, engine.plan.chunk_tokens, seed=7)
    session = fresh_session(engine)
    rows = [session.prefill(tokens)[0]]
    following, token = model.next_tokens(), tokens[-1]
    text = []
    for _ in range(forced):
        token = int(following[token])
        text.append(token)
    records = list(session.force(text))
    logits = np.stack([*rows, *(scores for _, scores in records)])
    np.savez(mine, logits=logits)
    row: dict[str, Any] = {
        "finite": bool(np.isfinite(logits).all()), "std": float(logits.std()), "rows": len(logits),
        "hit_rate": sum(r.hits for r, _ in records) / sum(r.lookups for r, _ in records),
        "compile_s": engine.programs.compile_s - compiled,
        "run_s": time.perf_counter() - started - (engine.programs.compile_s - compiled),
    }  # fmt: skip
    if other is not None and other.exists():
        with np.load(other) as file:
            theirs = file["logits"]
        apart = np.abs(logits - theirs).max(axis=1)
        row |= {
            "max_difference": float(apart.max()), "after_chunk": float(apart[0]),
            "largest_logit": float(np.abs(logits).max()),
            "same_best": float(np.mean(logits.argmax(1) == theirs.argmax(1))),
        }  # fmt: skip
    return row


def summary(row: dict[str, Any]) -> str:
    """One line of the table."""
    head = f"{row['vram_mib']:>6} MiB {row['kernels']:>9} {row['what']:<28}"
    if "error" in row:
        return f"{head} FAILED {row['error'][:160]}"
    names = (
        "s", "bank_gb", "hbm_gb_s", "link_gb_s", "bf16_tflops", "launch_us", "triton_launch_us", "zero_copy_gb_s",
        "slots", "hit_rate", "ms", "ms_min", "ms_max", "runs", "tok_s", "bound_tok_s", "bound_ms", "share_of_bound",
        "share_at_shapes",
        "bound_by", "finite", "max_difference", "after_chunk", "std", "same_best", "launches", "busy_ms", "span_ms",
        "planned_bytes", "found_bytes", "peak_bytes", "planned_peak_bytes", "compile_s",
    )  # fmt: skip
    shown = (f"{n}={row[n]:.4g}" if isinstance(row[n], float) else f"{n}={row[n]}" for n in names if n in row)
    return f"{head} {' '.join(shown)}"
