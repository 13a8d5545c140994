"""How fast are packed experts repacked into planes, and back, on one core?

Held fixed: matrices of gate or up (640 x 2560) and of down (2560 x 640) of random bytes, 128 MiB of them in turn, so
that none is in the cache; words go to memory that has been written before. Varied: the type. Rates are bytes of packed
matrices per second of the thread's own time, the best of some rounds.

    python bench/planes_speed.py [--rounds 3] [--save bench/results/NAME.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from strata_jax.gguf.blocks import block_type
from strata_jax.kernels.planes import PLANE_TYPES, from_planes, plane_layout, to_planes

SHAPES = ((640, 2560), (2560, 640))
TOTAL_BYTES = 2**27


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    rows = [
        measure(type_name, *shape, options.rounds)
        for type_name in PLANE_TYPES
        for shape in SHAPES
        if shape[1] % block_type(type_name).block_len == 0
    ]
    print("| type | matrix | to planes GB/s | back GB/s |\n| --- | --- | ---: | ---: |")
    for row in rows:
        print("| {type} | {rows} x {cols} | {to_planes_gb_s} | {from_planes_gb_s} |".format(**row))
    if options.save:
        options.save.write_text(json.dumps(rows, indent=2) + "\n")


def measure(type_name: str, num_rows: int, num_cols: int, rounds: int) -> dict[str, str | int | float]:
    layout = plane_layout(type_name, num_rows, num_cols)
    size = num_rows * layout.row_bytes
    packed = np.random.default_rng(0).integers(0, 256, (-(-TOTAL_BYTES // size), num_rows, layout.row_bytes), np.uint8)
    bank = np.ones((len(packed), layout.num_words), np.uint32)
    to_s, from_s = [], []
    for _ in range(rounds):
        started = time.thread_time()
        for matrix, words in zip(packed, bank):
            to_planes(matrix, layout, words)
        to_s.append(time.thread_time() - started)
        started = time.thread_time()
        for words in bank:
            from_planes(words, layout)
        from_s.append(time.thread_time() - started)
    return {
        "type": type_name,
        "rows": num_rows,
        "cols": num_cols,
        "to_planes_gb_s": round(packed.nbytes / 1e9 / min(to_s), 2),
        "from_planes_gb_s": round(packed.nbytes / 1e9 / min(from_s), 2),
    }


if __name__ == "__main__":
    main()
