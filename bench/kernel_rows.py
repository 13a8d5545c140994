"""Rows of the scripts that time kernels section by section, in a file as they come and as a table at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from h200_measure import hbm_roof


class Rows:
    """The rows of one script, also in $OUT/NAME.jsonl (the working directory where OUT is not set)."""

    def __init__(self, name: str) -> None:
        self.path, self.started = Path(os.environ.get("OUT", ".")) / f"{name}.jsonl", time.time()
        self.rows: list[dict[str, Any]] = []

    def record(self, **row: Any) -> None:
        """Keep, write and print a row."""
        self.rows.append(row | {"at_s": round(time.time() - self.started, 1)})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(self.rows[-1], flush=True)

    def run(self, sections: Mapping[str, Callable[[float], None]]) -> None:
        """Run the sections that the command line names, or all, each with the rate of a device copy in GB/s."""
        import jax

        roof = hbm_roof()
        self.record(op="device copy", device=jax.devices()[0].device_kind, jax=jax.__version__, **roof)
        for name in sys.argv[1:] or sections:
            sections[name](roof["hbm_gb_s"])
        for row in self.rows:
            print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
