"""How much memory do opening and running a model cost?

Held fixed: the synthetic `mid` preset (1.4 B parameters, 64 experts in each of 12 blocks). Two questions, each answered
in a fresh process by the kernel's count of anonymous pages (pages of the mapped file do not count):

- header: opening the 2.8 GB F16 file, reading its geometry and planning. Bound: 300 MB.
- run: loading a quantised file and reading 64 tokens, against the bytes of the file that the engine holds. A float copy
  of the experts would be 7 times their packed size at 4.5 bits a weight.

    python bench/memory.py [--recipe q4_0] [--folder /tmp] [--save bench/results/NAME.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from strata_jax.runtime import with_free_early


def main() -> None:
    from strata_jax.synthetic import write_synthetic_gguf
    from tests.oracle import ggml

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="q4_0")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        wide, packed = Path(folder) / "f16.gguf", Path(folder) / "packed.gguf"
        write_synthetic_gguf(wide, preset="mid", dtype="f16")
        ggml.quantize_gguf(wide, packed, options.recipe, repeat_experts=True)
        rows = [in_new_process("header", wide), in_new_process("run", packed) | {"recipe": options.recipe}]
    for row in rows:
        print(json.dumps(row))
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(rows, indent=2) + "\n")


def in_new_process(what: str, path: Path) -> dict[str, Any]:
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from bench.memory import {what}; {what}({str(path)!r})"
    )
    environ = {**os.environ, "XLA_FLAGS": with_free_early(os.environ.get("XLA_FLAGS", ""))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    return {"what": what, "file_mb": round(path.stat().st_size / 1e6), **json.loads(done.stdout.splitlines()[-1])}


def header(path: str) -> None:
    from strata_jax.geometry import Geometry
    from strata_jax.gguf.reader import open_gguf
    from strata_jax.memory.plan import plan
    from strata_jax.memory.request import PlanRequest

    before = anonymous_mb()
    plan(Geometry.from_gguf(open_gguf(path)), PlanRequest(context_cells=4096))
    print(json.dumps({"anonymous_mb": anonymous_mb(), "of_which_added_mb": round(anonymous_mb() - before, 1)}))


def run(path: str) -> None:
    from strata_jax.engine.engine import Engine
    from strata_jax.engine.session import Session
    from strata_jax.geometry import Geometry
    from strata_jax.gguf.reader import open_gguf
    from strata_jax.memory.plan import plan
    from strata_jax.memory.request import PlanRequest

    file = open_gguf(path)
    geometry = Geometry.from_gguf(file)
    before = anonymous_mb()
    made = plan(geometry, PlanRequest(context_cells=512, chunk_tokens=64, host_budget_bytes=2**36))
    session = Session(Engine.load(file, geometry, made))
    loaded = anonymous_mb()
    session.prefill(list(range(64)))
    list(session.force(range(4)))
    experts_mb = sum(geometry.expert_bytes(i) for i in range(made.num_blocks)) * geometry.num_experts / 1e6
    row = {
        "packed_experts_mb": round(experts_mb),
        "slots_mb": round(made.slot_pages * made.page_bytes / 1e6),
        "planned_mb": round(sum(e.phase_bytes[0] for e in made.ledger.entries) / 1e6),
        "added_by_loading_mb": round(loaded - before),
        "added_after_running_mb": round(anonymous_mb() - before),
        "peak_resident_mb": round(status_mb("VmHWM")),
    }
    print(json.dumps(row))


def anonymous_mb() -> float:
    return round(status_mb("RssAnon"), 1)


def status_mb(key: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
