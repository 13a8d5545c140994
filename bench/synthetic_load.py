"""How long does it take to make the full-size synthetic model, and is its bank in pinned memory?

Held fixed: `synthetic_full` in one quantisation, all 49 blocks. Questions: seconds to draw the dense weights; seconds
and GB/s to fill the bank by copies made on the device (what the engine does), against copies made by NumPy and handed
over, on the first blocks; whether sampled experts in the bank have the source's bytes. Bound: two minutes in all, and
the link's rate for the bank. Weights are synthetic: random blocks.

    python bench/synthetic_load.py [--quant iq2_xs] [--blocks 49] [--compared 2] [--save FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "80")

from strata_jax.gguf.layout import EXPERT_STACKS, PLE_TABLE
from strata_jax.presets import model_shape, preset_geometry
from strata_jax.synthetic.full import NOTE, SyntheticModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic_full")
    parser.add_argument("--quant", default="iq2_xs")
    parser.add_argument("--blocks", type=int, default=49)
    parser.add_argument("--compared", type=int, default=2, help="blocks whose bank NumPy copies too; 0: none")
    parser.add_argument("--no-dense", action="store_true")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    print(NOTE, flush=True)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append({"model": options.model, "quant": options.quant, "weights": "synthetic", **row})
        print(json.dumps(rows[-1]), flush=True)
        if options.save:
            options.save.parent.mkdir(parents=True, exist_ok=True)
            options.save.write_text(json.dumps(rows, indent=2) + "\n")

    model = SyntheticModel(model_shape(options.model), preset_geometry(options.model, options.quant))
    if not options.no_dense:
        add(dense(model))
    blocks = min(options.blocks, model.geometry.num_blocks)
    add(bank(model, blocks))
    if options.compared:
        add(compared(model, min(options.compared, blocks)))


def dense(model: SyntheticModel) -> dict[str, Any]:
    """Draw every tensor but the experts, one after the other."""
    started, num_bytes, slowest = time.perf_counter(), 0, ("", 0.0)
    for name in model.tensors:
        if name.endswith(EXPERT_STACKS):
            continue
        before = time.perf_counter()
        num_bytes += model.data(name).nbytes
        slowest = max(slowest, (name, time.perf_counter() - before), key=lambda pair: pair[1])
    seconds = time.perf_counter() - started
    table = model.tensors[PLE_TABLE].num_bytes
    return {"what": "dense", "gb": num_bytes / 1e9, "table_gb": table / 1e9, "s": seconds, "slowest": slowest}


def bank(model: SyntheticModel, num_blocks: int) -> dict[str, Any]:
    """Fill the bank as the engine does, and compare sampled experts with the source."""
    import jax

    from strata_jax.engine.engine import bank_sharding
    from strata_jax.engine.load import load_banks

    started = time.perf_counter()
    banks = load_banks(model, model.geometry, num_blocks, 4096, bank_sharding())
    for layer in banks:
        layer.blobs.block_until_ready()
    seconds = time.perf_counter() - started
    rng, wrong = np.random.default_rng(0), 0
    for layer in {0, num_blocks // 2, num_blocks - 1}:
        ids = model.expert_ids(layer)
        for expert in rng.integers(0, len(ids), 3):
            parts = [model.expert_pool(f"blk.{layer}.ffn_{p}_exps.weight")[ids[expert]] for p in ("gate", "up", "down")]
            expected = np.concatenate([part.reshape(-1) for part in parts])
            found = np.asarray(banks[layer].fetch(int(expert))).view(np.uint8)
            wrong += not np.array_equal(found, expected)
    num_bytes = sum(b.blobs.nbytes for b in banks)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "what": "bank", "blocks": num_blocks, "gb": num_bytes / 1e9, "s": seconds, "gb_s": num_bytes / 1e9 / seconds,
        "wrong_experts": wrong,
        "memory": str(banks[0].blobs.sharding.memory_kind), "peak_device_bytes": stats.get("peak_bytes_in_use"),
    }  # fmt: skip


def compared(model: SyntheticModel, num_blocks: int) -> dict[str, Any]:
    """Fill the bank from NumPy's copies."""
    import jax

    from strata_jax.engine.engine import bank_sharding

    started, num_bytes = time.perf_counter(), 0
    for layer in range(num_blocks):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        blobs = np.concatenate([model.data(n).reshape(model.shape.num_experts, -1) for n in names], axis=1)
        array = jax.device_put(blobs.view(np.uint32), bank_sharding())
        array.block_until_ready()
        num_bytes += array.nbytes
    seconds = time.perf_counter() - started
    return {"what": "bank from NumPy", "blocks": num_blocks, "gb": num_bytes / 1e9, "s": seconds,
            "gb_s": num_bytes / 1e9 / seconds}  # fmt: skip


if __name__ == "__main__":
    main()
