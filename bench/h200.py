"""How near does the engine come to what one NVIDIA GPU can do, on the full-size synthetic model?

Held fixed: `synthetic_full` (random weights of the published shape and types) in one quantisation, int8 K/V, experts by
Triton kernels. One process for each device memory cap: it measures the roofs, loads, reads prompts and decodes. Varied:
chunk, prompt length, resident experts, tokens of a window, context. Bounds, two of each:

- A prompt takes as long as the larger of its products at XLA's own bf16 rate and the bytes of missing experts at the
  link's rate (the larger of XLA's own copies and the driver's). At shapes: products of experts take as long as XLA does
  with decoded weights, some rows for each of many experts.
- A round takes as long as the bytes of hits, dense weights, states and chosen cells at the memory's rate plus those of
  misses at the link's. Zero-copy: misses at what one kernel reads from host memory for as many experts as a block of
  the round misses.

Logits are compared with `engine.kernels=reference` on the same GPU.

    python bench/h200.py --layers 12 --caps 8151 --prompts 2048 --chunks 512 2048 --tokens 1 2 --rates 0.2 0.8
    python bench/h200.py --layers 4 --caps 8151 --prompts 512 --chunks 512 --tokens 1 --rates 0.5 --compare
    python bench/h200.py --caps 8151 32607 --prompts 17944 29854

Rows go to FOLDER/h200.jsonl ($OUT, or the working directory) as they come; a second call goes on where one ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from h200_measure import (
    COUNTED,
    Bounds,
    compared,
    copy_rate,
    decode_row,
    experts_roof,
    hbm_roof,
    launch_roof,
    link_roof,
    product_roof,
    prompt_row,
    summary,
    zero_copy_roof,
)

from strata_jax.config.schema import RunConfig
from strata_jax.memory.ledger import MIB, Memory, Phase
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.memory.request import PlanRequest
from strata_jax.presets import model_shape, preset_geometry
from strata_jax.runtime import describe_target, start_jax
from strata_jax.synthetic.full import NOTE, SyntheticModel
from strata_jax.synthetic.routing import RoutingSkew, slots_for

RESERVE_MIB = 700
FORCED = 8  # tokens after the compared prompt


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child is not None:
        Child(options, options.child, reference=options.reference).run()
        return
    print(NOTE, flush=True)
    started = time.time()
    for cap in options.caps:
        for mode in ([], ["--reference"]) if options.compare else ([],):
            left = options.seconds - (time.time() - started)
            if left < 10:
                print(f"cap {cap} {mode}: no time left", flush=True)
                continue
            try:
                subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], "--child", str(cap), *mode], timeout=left, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"cap {cap} {mode}: stopped after {left:.0f} s", flush=True)
    print_table(options.out / "h200.jsonl")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic_full")
    parser.add_argument("--quant", default="iq2_xs")
    parser.add_argument("--layers", type=int, help="fewer layers of the full width")
    parser.add_argument("--caps", type=int, nargs="+", default=[8151, 32607], help="device memory in MiB")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048], help="tokens; cut to whole chunks")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4], help="of a window; the largest is spec.window")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.5, 0.8, 0.97], help="hit rates of decode")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048], help="of decode, in tokens")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2, help="readings of a prompt after the first")
    parser.add_argument("--stage-mib", type=int, help="buffers of a prompt's missing experts; default: as auto plans")
    parser.add_argument("--compare", action="store_true", help="also run engine.kernels=reference, in a second process")
    parser.add_argument("--trace", action="store_true", help="also count launches and busy time, under the profiler")
    parser.add_argument("--plain-launches", action="store_true", help="no command buffers")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all")
    parser.add_argument("--cache", help="folder of compiled programs; none: every process compiles")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Child:
    """One process: one cap, one kind of kernels."""

    def __init__(self, options: argparse.Namespace, cap_mib: int, *, reference: bool) -> None:
        self.o, self.cap_mib, self.reference = options, cap_mib, reference
        self.path = options.out / "h200.jsonl"
        self.done = (
            {json.loads(line)["key"] for line in self.path.read_text().splitlines()} if self.path.exists() else set()
        )
        self.geometry = preset_geometry(options.model, options.quant, num_layers=options.layers)
        self.model = SyntheticModel(model_shape(options.model, num_layers=options.layers), self.geometry, RoutingSkew())
        self.about: dict[str, Any] = {
            "weights": "synthetic", "routing": self.model.skew.text(), "model": self.geometry.name,
            "layers": self.geometry.num_layers, "vram_mib": cap_mib, "vram_reserve_mib": RESERVE_MIB,
            "kernels": "reference" if reference else "triton", "kv": "int8", "plain_launches": options.plain_launches,
        }  # fmt: skip
        self.started = time.time()

    def run(self) -> None:
        """Measure everything that is not in the file yet; a row that fails says why."""
        chunks = [self.o.chunks[0]] if self.reference else self.o.chunks
        config = RunConfig()
        config.hardware.vram_mib, config.hardware.vram_reserve_mib = self.cap_mib, RESERVE_MIB
        config.engine.compilation_cache_dir = self.o.cache
        hardware = describe_target(config)
        if hardware.gpu is None:  # a CPU stands in: only to see that the script works
            config.hardware.vram_mib = "auto"
        plans = {chunk: self.plan_for(chunk) for chunk in chunks}
        host = max(p.ledger.total_bytes(Phase.START, Memory.HOST) for p in plans.values())
        if self.o.plain_launches:
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
        env = start_jax(config, hardware, host_pool_bytes=host)
        import jax

        self.about |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "python": sys.version.split()[0]}
        roofs = {} if self.reference else self.roofs()
        experts_s: dict[int, float] = {}
        if hardware.gpu is not None and not self.reference:
            for tokens in {made.chunk_tokens for made in plans.values()}:
                found = experts_roof(self.geometry, tokens)
                self.row(f"roof experts chunk {tokens}", partial(dict, found))
                experts_s[tokens] = found["experts_s"]
        from strata_jax.engine.engine import Engine
        from strata_jax.engine.program_store import open_store

        store = open_store(env.compilation_cache_dir)
        engine: Any = None
        bounds: Any = None
        zero_copy: dict[int, float] = {}
        for idx, made in enumerate(plans.values()):
            if idx == 0:
                before = time.perf_counter()
                engine = Engine.load(self.model, self.geometry, made, compile_watch, loans=(), program_store=store)
                jax.block_until_ready((engine.weights, engine.banks, engine.arena))
                loaded = {
                    "s": time.perf_counter() - before - engine.programs.compile_s,
                    "compile_s": engine.programs.compile_s, "bank_gb": sum(b.blobs.nbytes for b in engine.banks) / 1e9
                }  # fmt: skip
                self.row("load", partial(dict, loaded))
                for num in self.batches() if hardware.gpu is not None and not self.reference else ():
                    found = zero_copy_roof(engine.banks[0].blobs, num)
                    self.row(f"zero-copy of {num}", partial(dict, found))
                    zero_copy[num] = found["zero_copy_gb_s"]
                self.logits(engine)
            else:
                weights, banks = engine.weights, engine.banks
                engine = bounds = None
                gc.collect()  # sessions and their engine hold each other: the arena goes before the next one comes
                engine = Engine.lay_out(
                    self.model, self.geometry, made, weights, banks, compile_watch, loans=(), program_store=store
                )
            if self.reference:
                break
            if engine.staging is not None:
                rate = copy_rate(engine, pieces="whole")
                self.row(f"copy engine chunk {made.chunk_tokens}", partial(dict, {"link_gb_s": rate}))
                roofs["link_gb_s"] = max(roofs["link_gb_s"], rate)
            rates = {k: roofs[k] for k in ("hbm_gb_s", "link_gb_s", "bf16_tflops")}
            bounds = Bounds(engine, self.model, **rates, zero_copy_gb_s=zero_copy, experts_s=experts_s)
            self.measure(engine, bounds, made, last=idx == len(plans) - 1)

    def batches(self) -> tuple[int, ...]:
        """Experts that a block may miss in a round."""
        used = self.geometry.num_experts_used
        return 1, used // 2, used, used * max(self.o.tokens)

    def plan_for(self, chunk: int) -> MemoryPlan:
        window = max(self.o.tokens)
        rows = len(self.o.contexts) * len(self.o.rates) * sum(self.o.tokens)
        cells = (
            max(*self.o.prompts, *self.o.chunks, *self.o.contexts) + (self.o.rounds + COUNTED + 6) * rows + 4 * window
        )
        request = PlanRequest(
            context_cells=cells, chunk_tokens=chunk, spec_window=max(2, window), expert_kernels=not self.reference,
            device_budget_bytes=self.cap_mib * MIB, reserve_bytes=RESERVE_MIB * MIB,
            stage_bytes=None if self.o.stage_mib is None else self.o.stage_mib * MIB,
        )  # fmt: skip
        made = plan(self.geometry, request)
        last = made.prefill_buckets[-1]  # prompts are whole chunks; what is read up to a context may be padded to one
        return replace(made, prefill_buckets=(last,), staged_buckets=tuple(b for b in made.staged_buckets if b == last))

    def roofs(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, measure in (
            ("hbm", hbm_roof), ("link", link_roof), ("product", product_roof), ("launch", launch_roof),
        ):  # fmt: skip
            row = measure()
            found |= row
            self.row(f"roof {name}", partial(dict, row))
        return found

    def measure(self, engine: Any, bounds: Bounds, made: MemoryPlan, *, last: bool) -> None:
        settings = {
            "chunk": made.chunk_tokens, "slots": made.expert_slots, "cells": made.context_cells,
            "page_bytes": made.page_bytes,
        }  # fmt: skip
        for length in self.o.prompts:
            num = length // made.chunk_tokens * made.chunk_tokens
            if num:
                tokens = self.model.topic_tokens(0, num)
                self.row(f"prompt {num} chunk {made.chunk_tokens}",
                         partial(prompt_row, engine, bounds, tokens, self.o.repeats,
                                 self.trace(f"prompt_{made.chunk_tokens}")), **settings)  # fmt: skip
        from strata_jax.engine.session import fresh_session

        if last:
            self.decode(fresh_session(engine), bounds, settings)

        def check() -> dict[str, Any]:
            found = engine.check_memory(fresh_session(engine).state)
            phase, planned = made.ledger.peak(Memory.DEVICE)
            return {
                **found, "peak_bytes": engine.peak_device_bytes(), "planned_peak_phase": str(phase),
                "planned_peak_bytes": planned - RESERVE_MIB * MIB, "compile_s": engine.programs.compile_s,
            }  # fmt: skip

        self.row(f"memory chunk {made.chunk_tokens}", check, **settings)

    def decode(self, session: Any, bounds: Bounds, settings: dict[str, Any]) -> None:
        """Windows of every length and hit rate at every context, each context read on from the one before."""
        from strata_jax.engine.chunk import compile_rounds, with_shapes

        engine = session.engine
        made = engine.plan
        with engine.programs.shapes_only():
            for num_tokens in self.o.tokens:
                compile_rounds(replace(with_shapes(engine), plan=replace(made, spec_window=num_tokens)))
        for context in sorted(self.o.contexts):
            more = context - len(session.tokens)
            if more > 0:
                session.prefill(self.model.topic_tokens(0, more, seed=len(session.tokens)))
            # drafts first: a window of one token leaves none that are worth anything
            for num_tokens in sorted(self.o.tokens, reverse=True):
                for rate in self.o.rates:
                    slots = slots_for(self.model.odds, rate, made.num_blocks)
                    name = f"decode T={num_tokens} wanted {rate:.0%} context {context}"
                    if slots > made.expert_slots:
                        print(f"{name}: {slots:,} slots do not fit under {self.cap_mib:,} MiB", flush=True)
                        continue
                    trace = self.trace(f"decode_{num_tokens}_{rate:.0%}_{context}".replace("%", ""))
                    self.row(name, partial(decode_row, engine, bounds, session, num_tokens, slots, self.o.rounds,
                                           trace), **(settings | {"slots": slots}))  # fmt: skip

    def trace(self, name: str) -> Path | None:
        return self.o.out / f"trace_{self.cap_mib}_{name}.pb" if self.o.trace else None

    def logits(self, engine: Any) -> None:
        """Keep the logits of a chunk and of forced tokens; the second process compares."""
        if not self.o.compare:
            return
        mine = self.o.out / f"logits_{self.cap_mib}_{'reference' if self.reference else 'triton'}.npz"
        other = self.o.out / f"logits_{self.cap_mib}_triton.npz"
        self.row("logits", lambda: compared(engine, self.model, FORCED, mine, other if self.reference else None))

    def row(self, name: str, measure: Callable[[], dict[str, Any]], **settings: Any) -> None:
        about = {k: self.about[k] for k in ("model", "layers", "vram_mib", "kernels", "plain_launches")}
        key = json.dumps([name, about, settings], sort_keys=True)
        if key in self.done:
            return
        before = time.perf_counter()
        try:
            row = measure()
        except Exception as error:
            where = traceback.format_exc()[-400:].replace("\n", " ")
            row = {"error": f"{type(error).__name__}: {error}"[:400].replace("\n", " "), "where": where}
            key += " failed"  # a second call tries again
        row = {"what": name, **settings, **row, **self.about, "took_s": round(time.perf_counter() - before, 2),
               "at_s": round(time.time() - self.started, 1), "key": key}  # fmt: skip
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(summary(row), flush=True)


@contextmanager
def compile_watch(program: str) -> Iterator[None]:
    """Say how long each program takes to compile."""
    before = time.perf_counter()
    yield
    print(f"compiled {program}: {time.perf_counter() - before:.1f} s", flush=True)


def print_table(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    print(f"\n{NOTE}\n" + "\n".join(summary(row) for row in rows))


if __name__ == "__main__":
    main()
