"""Measure this machine and write its hardware profile: rates of its parts, then real prompts and rounds of a model."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.assemble import check_peak, load_engine, make_plan, open_model, read_prompts
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.geometry import Geometry
from strata_jax.hardware import Hardware
from strata_jax.memory.plan import MemoryPlan
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.report.progress import slow_step
from strata_jax.report.record import RunRecord
from strata_jax.sim.calibrate import MachineRates, TimedChunk, TimedRound, calibrate, prompt_ms
from strata_jax.sim.decode_cost import RoundFacts
from strata_jax.sim.prefill_cost import ChunkFacts
from strata_jax.sim.profile import Profile
from strata_jax.sim.profile_file import UNITS, profile_yaml

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine

MIB = 2**20
PROFILE_FILE = "profile.yaml"
REPEATS = 5
COPY_BYTES = 256 * MIB
PRODUCT_WIDTH = 1024
DECODE_TOKENS = 24
EXPERT_SHAPE = (1280, 2560)  # gate and up of one expert of the real model, without its down matrix
WANTED_ERROR = 0.05  # of the prompt that the fit has not seen


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Measure, fit, check against a prompt that was held out, and write profile.yaml into the run directory."""
    file, geometry = open_model(config)
    prompts, _ = read_prompts(config, file, geometry)
    plan, hardware = make_plan(config, geometry, prompts, record)
    engine = load_engine(config, hardware, file, geometry, plan, record)
    sizes, request = pack_sizes(geometry), StrataRequest(kv_type=plan.kv_type)
    with slow_step("measuring memory, link and products"):
        rates = machine_rates(hardware, geometry)
    ids = max((prompt.token_ids for prompt in prompts), key=len)
    chunks, whole, whole_ms = timed_prompts(engine, ids, plan, sizes)
    rounds = timed_rounds(engine, ids, plan)
    profile = calibrate(rates, chunks, rounds, sizes, request)
    error = prompt_ms(profile, sizes, request, whole) / whole_ms - 1
    path = record.write_text(PROFILE_FILE, text_of(profile, error))
    check_peak(config, engine)
    for row in profile.describe():
        record.metric("number", **row)
    print(text_of(profile, error))
    print(f"A prompt of {len(ids):,} tokens that the fit has not seen: {error:+.1%}. hardware.profile_file={path}")
    return {
        "extra": {"held_out_prompt_error": error, "within_5_pct": abs(error) <= WANTED_ERROR, "rates": asdict(rates)}
    }


def text_of(profile: Profile, error: float) -> str:
    """Return the profile's file: only what was measured; the rest stays with the common numbers."""
    texts: dict[str, Any] = {"name": profile.name, "title": profile.title, "gpus": list(profile.gpus), "os": profile.os}
    texts |= {"cpu": profile.cpu, "isa": profile.isa, "calibrated": True}
    own = {name: profile.numbers[name] for name in UNITS if profile.numbers[name].mark == "measured"}
    return profile_yaml(texts, own, f"Written by pipeline=calibrate. A prompt left out of the fit: {error:+.1%}.")


def machine_rates(hardware: Hardware, geometry: Geometry) -> MachineRates:
    """Measure the parts of this machine. JAX has been started."""
    import jax
    import jax.numpy as jnp

    device, on_gpu = jax.devices()[0], jax.devices()[0].platform == "gpu"
    ram_gb_s = _ram_gb_s(hardware.cores)
    cpu_name = hardware.cpu or platform.processor() or "unknown"
    product = jnp.bfloat16 if on_gpu else jnp.float32
    gpu = hardware.gpu.name if hardware.gpu else ""
    return MachineRates(
        title=gpu or cpu_name,
        os="windows" if os.name == "nt" else "linux",
        cpu=cpu_name,
        vram_mib=(hardware.vram_bytes or hardware.ram_bytes) / MIB,
        ram_mib=hardware.ram_bytes / MIB,
        cpu_cores=hardware.cores,
        ram_gb_s=ram_gb_s,
        hbm_gb_s=_device_gb_s() if on_gpu else ram_gb_s,
        pcie_gb_s=_link_gb_s(device) if on_gpu else ram_gb_s,
        tensor_tops=_product_tflops(product),
        scalar_tflops=_product_tflops(jnp.float32),
        cpu_core_gweights_s=_expert_gweights_s(geometry) / hardware.cores,
        gpu=gpu,
    )


def timed_prompts(
    engine: Engine, ids: Sequence[int], plan: MemoryPlan, sizes: PackSizes
) -> tuple[list[TimedChunk], list[ChunkFacts], float]:
    """Time one chunk of each compiled size, then the whole prompt, which is held out.

    Returns the chunks, the chunks of the whole prompt, and its ms.
    """
    lengths = [size for size in plan.prefill_buckets if size <= len(ids)]
    chunks = []
    for size in lengths:
        ms = median(sum(record.seconds for record in _read(engine, ids[:size])) for _ in range(REPEATS)) * 1000
        chunks.append(TimedChunk(_chunk_facts(size, 0, plan, sizes), ms))
    reads = [_read(engine, ids) for _ in range(REPEATS)]
    whole_ms = median(sum(record.seconds for record in records) for records in reads) * 1000
    whole = [_chunk_facts(record.padded_tokens, record.start, plan, sizes) for record in reads[0]]
    return chunks, whole, whole_ms


def timed_rounds(engine: Engine, ids: Sequence[int], plan: MemoryPlan) -> list[TimedRound]:
    """Time decode rounds after the prompt; the first one of a request is left out."""
    from strata_jax.engine.session import Session

    space = plan.context_cells - DECODE_TOKENS - 1
    prompt = list(ids[: min(len(ids), max(1, space))])
    by_rows: dict[int, list[Any]] = {}
    for _ in range(2):  # the first pass also compiles
        session = Session(engine)
        logits = session.prefill(prompt)
        found = list(session.decode(logits, max_tokens=DECODE_TOKENS))[2:]
        by_rows = {}
        for each in found:
            by_rows.setdefault(each.window_tokens, []).append(each)
    rounds = []
    for rows, records in sorted(by_rows.items()):
        look_ups = sum(each.lookups for each in records)
        hit_rate = sum(each.hits for each in records) / look_ups if look_ups else 1.0
        distinct = float(min(engine.geometry.num_experts, rows * engine.geometry.num_experts_used))
        facts = RoundFacts(
            rows=rows, context=len(prompt), hit_rate=hit_rate, distinct_experts=distinct,
            distinct_misses=distinct * (1 - hit_rate), pcie_frac=1.0, kv_type=plan.kv_type,
        )  # fmt: skip
        rounds.append(TimedRound(facts, 1000 * median(each.seconds for each in records)))
    return rounds


def _read(engine: Engine, ids: Sequence[int]) -> list[Any]:
    """Read a prompt on a fresh sequence and return the records of its chunks."""
    from strata_jax.engine.session import Session

    records: list[Any] = []
    Session(engine, on_chunk=records.append).prefill(ids)
    return records


def _chunk_facts(tokens: int, start: int, plan: MemoryPlan, sizes: PackSizes) -> ChunkFacts:
    resident = plan.expert_slots / sizes.num_ranks
    missing = max(0.0, 1 - resident) * sizes.total_expert_bytes
    return ChunkFacts(tokens, start, missing, min(1.0, resident), streamed_all=True, ring_slots=sizes.num_experts)


def _best_s(action: Callable[[], Any]) -> float:
    """Return the fastest of a few timed calls, after one that warms up."""
    action()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def _ram_gb_s(cores: int) -> float:
    """Bytes read by all cores from host memory."""
    data = np.ones(COPY_BYTES // 8, dtype=np.float64)
    parts = np.array_split(data, max(1, cores))
    with ThreadPoolExecutor(max(1, cores)) as pool:
        return COPY_BYTES / _best_s(lambda: list(pool.map(np.sum, parts))) / 1e9


def _device_gb_s() -> float:
    import jax
    import jax.numpy as jnp

    data = jnp.ones(COPY_BYTES // 4, dtype=jnp.float32)
    step = jax.jit(lambda x: x + 1)
    return 2 * COPY_BYTES / _best_s(lambda: step(data).block_until_ready()) / 1e9


def _link_gb_s(device: Any) -> float:
    """Registered host memory to the device."""
    import jax

    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    there = jax.sharding.SingleDeviceSharding(device)
    data = jax.device_put(np.ones(COPY_BYTES // 4, dtype=np.float32), host)
    return COPY_BYTES / _best_s(lambda: jax.device_put(data, there).block_until_ready()) / 1e9


def _product_tflops(dtype: Any) -> float:
    import jax
    import jax.numpy as jnp

    width = PRODUCT_WIDTH * (8 if jax.devices()[0].platform == "gpu" else 1)
    data = jnp.ones((width, width), dtype=dtype)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * width**3 / _best_s(lambda: product(data, data).block_until_ready()) / 1e12


def _expert_gweights_s(geometry: Geometry) -> float:
    """Packed expert weights that all cores decode and multiply in a second, with the engine's own kernels."""
    import jax
    import jax.numpy as jnp

    from strata_jax.engine.matrix import from_bytes, linear
    from strata_jax.gguf.blocks import BLOCK_TYPES

    names = [name for name in geometry.tensor_types if "ffn_gate_exps" in name or "ffn_gate_up_exps" in name]
    if not names:
        raise ConfigError("calibrate: the model has no routed experts to measure the CPU with")
    block = next(bt for bt in BLOCK_TYPES.values() if bt.name == geometry.tensor_types[names[0]].type_name)
    rows, cols = EXPERT_SHAPE
    with jax.default_device(jax.devices("cpu")[0]):
        raw = np.zeros((rows, cols // block.block_len * block.block_bytes), dtype=np.uint8)
        weights, token = from_bytes(raw, block.name, cols), jnp.ones((1, cols), dtype=jnp.float32)
        step = jax.jit(linear)
        return rows * cols / _best_s(lambda: step(token, weights).block_until_ready()) / 1e9
