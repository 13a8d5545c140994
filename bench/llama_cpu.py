"""How fast is the engine on a CPU beside llama.cpp, on the same file, in the same run?

Held fixed: the file, 512 prompt tokens in one chunk, single decode steps without drafts, float32 K/V, two threads. Both
engines take turns, so a drift of the machine's speed meets both. The number that counts is the ratio ours / llama.cpp
(above 1: ours is faster). Compilation is apart; each engine has one warm-up.

    python bench/llama_cpu.py [--preset tiny] [--recipes none iq3_s ...] [--rounds 5] [--save bench/results/NAME.json]

Needs the test extra (llama.cpp's wheel). The files are synthetic: random weights of the real structure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from strata_jax.runtime import with_free_early

os.environ["XLA_FLAGS"] = with_free_early(os.environ.get("XLA_FLAGS", ""))  # as a run has it; before JAX starts

import jax
import numpy as np

from strata_jax.engine.engine import Engine
from strata_jax.engine.session import Session
from strata_jax.geometry import Geometry
from strata_jax.gguf.reader import open_gguf
from strata_jax.hardware import cpu_model
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from strata_jax.synthetic import write_synthetic_gguf
from tests.oracle import ggml, llama

NUM_PROMPT_TOKENS = 512
NUM_STEPS = 48
NUM_THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--recipes", nargs="*", default=["none"], help="none = F32, or recipes of tests/oracle/ggml.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = write_synthetic_gguf(Path(folder) / "f32.gguf", preset=options.preset)
        for recipe in options.recipes:
            path = source
            if recipe != "none":
                path = Path(folder) / f"{recipe}.gguf"
                ggml.quantize_gguf(source, path, recipe, repeat_experts=True)
            rows.append({"preset": options.preset, "types": recipe, **compare(path, options.rounds)})
            print(json.dumps(rows[-1]), flush=True)
    report = {"machine": machine(), "rows": rows}
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(report, indent=2) + "\n")
    print(table(rows))


def compare(path: Path, rounds: int) -> dict[str, Any]:
    """Median tokens a second of both engines, taking turns, and their ratios."""
    ours, theirs = Ours(path), Theirs(path)
    ours.measure(), theirs.measure()
    pairs = [(ours.measure(), theirs.measure()) for _ in range(rounds)]
    row: dict[str, Any] = {"rounds": rounds, "compile_s": round(ours.engine.programs.compile_s, 1)}
    for i, name in enumerate(("prefill", "decode")):
        a, b = [p[0][i] for p in pairs], [p[1][i] for p in pairs]
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        row |= {
            f"{name}_tok_s": round(statistics.median(a), 1),
            f"{name}_llama_cpp_tok_s": round(statistics.median(b), 1),
            f"{name}_ratio": round(statistics.median(ratios), 2),
            f"{name}_ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    return row


class Ours:
    def __init__(self, path: Path) -> None:
        file = open_gguf(path)
        geometry = Geometry.from_gguf(file)
        request = PlanRequest(
            context_cells=1024,
            chunk_tokens=NUM_PROMPT_TOKENS,
            kv_type="f32",
            spec_window=1,
            expert_slots=geometry.num_layers * geometry.num_experts,
        )
        self.engine = Engine.load(file, geometry, plan(geometry, request))
        self.tokens = prompt(geometry.vocab_size)

    def measure(self) -> tuple[float, float]:
        session = Session(self.engine)
        started = self.engine.programs.clock_s()
        session.prefill(self.tokens)
        prefill_s = self.engine.programs.clock_s() - started
        steps = [record.seconds for record, _ in session.force(self.tokens[:NUM_STEPS])]
        return NUM_PROMPT_TOKENS / prefill_s, 1 / statistics.median(steps)


class Theirs:
    def __init__(self, path: Path) -> None:
        self.model = llama.Model(path)
        self.context = llama.Context(self.model, num_cells=1024, num_threads=NUM_THREADS)
        self.tokens = prompt(len(self.model_logits()))

    def model_logits(self) -> np.ndarray:
        return self.context.run([1], 0)[0]

    def measure(self) -> tuple[float, float]:
        self.context.clear()
        started = time.perf_counter()
        self.context.prefill(self.tokens, rows="last")
        prefill_s = time.perf_counter() - started
        steps = []
        for i, token in enumerate(self.tokens[:NUM_STEPS]):
            started = time.perf_counter()
            self.context.run([token], NUM_PROMPT_TOKENS + i)
            steps.append(time.perf_counter() - started)
        return NUM_PROMPT_TOKENS / prefill_s, 1 / statistics.median(steps)


def prompt(vocab_size: int) -> list[int]:
    return np.random.default_rng(0).integers(0, vocab_size - 16, NUM_PROMPT_TOKENS).tolist()


def machine() -> dict[str, Any]:
    names = ("jax", "jaxlib", "numpy", "llama-cpp-py-sync")
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        **{name: metadata.version(name) for name in names},
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| types | prefill tok/s | llama.cpp | ratio | decode tok/s | llama.cpp | ratio |", "|---|" + "---:|" * 6]
    for r in rows:
        lines.append(
            f"| {r['types']} | {r['prefill_tok_s']:,} | {r['prefill_llama_cpp_tok_s']:,} | {r['prefill_ratio']} "
            f"| {r['decode_tok_s']:,} | {r['decode_llama_cpp_tok_s']:,} | {r['decode_ratio']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
