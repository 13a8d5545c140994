"""What do experts copied ahead of a prompt's blocks (`prefill.stage_mib`) gain on one NVIDIA GPU?

Held fixed: `synthetic_full` in one quantisation, int8 K/V, experts by Triton kernels, one device memory cap, one
prompt. Varied: the chunk, and where missing experts come from, with the same compiled programs but for the second:

- ahead: as planned; the first reading learns which experts prompts use and does not count.
- in place: nothing is staged, the kernels read all missing experts over the link; blocks are one program then.
- nothing copied: as ahead, but no byte is; results are wrong, the time is that of everything but copying.

The copy engine's rate is measured first, on experts of one block as a chunk copies them. `share_of_bound` is the time
that the bytes of missing experts that a chunk uses need at that rate, or its products at XLA's own bf16 rate if that
is more, over the time measured.

    python bench/prompt_staging.py --layers 12 --cap 8151 --chunks 512 2048 8192
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from h200_measure import Bounds, copy_rate, hbm_roof, product_roof, prompt_row

from strata_jax.config.schema import RunConfig
from strata_jax.memory.ledger import MIB, Memory, Phase
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.memory.request import PlanRequest
from strata_jax.presets import model_shape, preset_geometry
from strata_jax.runtime import describe_target, start_jax
from strata_jax.synthetic.full import NOTE, SyntheticModel
from strata_jax.synthetic.routing import RoutingSkew

RESERVE_MIB = 700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", default="iq2_xs")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, help="fewer experts, to try the script")
    parser.add_argument("--model", default="synthetic_full")
    parser.add_argument("--cap", type=int, default=8151, help="device memory in MiB")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--prompt", type=int, default=16384, help="tokens; cut to whole chunks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stage-mib", type=int, help="default: as auto plans")
    parser.add_argument("--cache", help="folder of compiled programs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    o = parser.parse_args()
    print(NOTE, flush=True)
    counts = {"num_layers": o.layers, "num_experts": o.experts}
    geometry = preset_geometry(o.model, o.quant, **counts)
    model = SyntheticModel(model_shape(o.model, **counts), geometry, RoutingSkew())
    config = RunConfig()
    config.hardware.vram_mib, config.hardware.vram_reserve_mib = o.cap, RESERVE_MIB
    config.engine.compilation_cache_dir = o.cache
    hardware = describe_target(config)
    on_gpu = hardware.gpu is not None
    if not on_gpu:
        config.hardware.vram_mib = "auto"
    plans = [plan(geometry, request(o, chunk, on_gpu=on_gpu)) for chunk in o.chunks]
    start_jax(config, hardware, host_pool_bytes=max(p.ledger.total_bytes(Phase.START, Memory.HOST) for p in plans))
    out = o.out / "prompt_staging.jsonl"

    def row(name: str, **found: Any) -> None:
        about = {"layers": geometry.num_layers, "vram_mib": o.cap, "quant": o.quant, "weights": "synthetic"}
        with out.open("a") as file:
            file.write(json.dumps({"what": name, **found, **about}) + "\n")
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in found.items())
        print(f"{name:<28} {shown}", flush=True)

    measure(model, plans, o, row)


def request(o: argparse.Namespace, chunk: int, *, on_gpu: bool) -> PlanRequest:
    return PlanRequest(
        context_cells=max(o.prompt, chunk) + 256, chunk_tokens=chunk, spec_window=1, expert_kernels=True,
        device_budget_bytes=o.cap * MIB, reserve_bytes=RESERVE_MIB * MIB,
        stage_bytes=None if o.stage_mib is None else o.stage_mib * MIB, shared_memory=not on_gpu,
    )  # fmt: skip


def measure(model: SyntheticModel, plans: list[MemoryPlan], o: argparse.Namespace, row: Callable[..., None]) -> None:
    from strata_jax.engine.engine import Engine

    roofs = {name: roof()[name] for name, roof in (("hbm_gb_s", hbm_roof), ("bf16_tflops", product_roof))}
    engine: Any = None
    for made in plans:
        if engine is None:
            engine = Engine.load(model, model.geometry, made)
        else:
            weights, banks, engine, bounds = engine.weights, engine.banks, None, None
            gc.collect()
            engine = Engine.lay_out(model, model.geometry, made, weights, banks)
        chunk, num = made.chunk_tokens, max(1, o.prompt // made.chunk_tokens) * made.chunk_tokens
        about = {"chunk": chunk, "slots": made.expert_slots, "stage_mib": made.stage_bytes / MIB}
        if engine.staging is None:
            row(f"chunk {chunk}: nothing staged", **about)
            continue
        rates = {runs: copy_rate(engine, pieces=runs) for runs in ("whole", "pieces")}
        row("copy engine", **{f"{name}_gb_s": rate for name, rate in rates.items()}, **about)
        bounds = Bounds(engine, model, link_gb_s=rates["whole"], **roofs)
        tokens = model.topic_tokens(0, num)
        for name in ("ahead", "in place", "nothing copied"):
            with variant(engine, name) as staged:
                found = prompt_row(engine, bounds, tokens, o.repeats)
                each = {f"{key}_a_reading": value / (o.repeats + 1) for key, value in staged.items()}
                row(f"{name}, chunk {chunk}", **found, **each, **about)


@contextmanager
def variant(engine: Any, name: str) -> Iterator[dict[str, float]]:
    """Change where missing experts come from; gives what was staged, summed over the readings of the context."""
    from strata_jax.engine import staging
    from strata_jax.engine.programs import Programs

    found = {"experts": 0.0, "bytes": 0.0, "waited_s": 0.0}
    made, programs, copies, stager = engine.plan, engine.programs, engine.staging.copies, staging.Stager

    class Watched(stager):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            found["bytes"] += self.copied[0]
            found["experts"] += self.copied[1]
            super().close()

    class Copies:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(copies, attribute)

        def start(self, number: int, runs: Any) -> None:
            copies.start(number, () if name == "nothing copied" else runs)

        def wait(self, number: int) -> None:
            started = time.perf_counter()
            copies.wait(number)
            found["waited_s"] += time.perf_counter() - started

    staging.Stager, engine.staging.copies = Watched, Copies()  # type: ignore[misc]
    if name == "in place":
        engine.plan, engine.programs = replace(made, staged_buckets=()), Programs(programs.spec)
    try:
        yield found
    finally:
        engine.plan, engine.programs = made, programs
        staging.Stager, engine.staging.copies = stager, copies  # type: ignore[misc]


if __name__ == "__main__":
    main()
