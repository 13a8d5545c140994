"""Does a policy, or any set of them, change a bit of what the model computes?

Every configuration serves the same requests in a process of its own: five prompts of 24, 44, 2,048, 8,192 and 16,384
tokens, and three of their conversations once more, 64 greedy tokens each. What each computed is replayed, chunk by
chunk and window by window, in one more process that holds every expert and moves nothing.

- ``--chunk fixed``: all configurations read chunks of 128. First logits (SHA-256), tokens and the hash of the whole
  state must be equal: 10 of 10 checks per configuration for the five prompts, and as much for what returns.
- ``--chunk chosen``: on a card too small for that without borrowing the planner chooses. Against whole prompts in
  chunks of 128: no first logit differs by more than 2e-5, and tokens are equal as long as each won by more than 1e-4.
- ``--chunk kernels``: as ``fixed``, but packed weights, int8 K/V, all by the kernels of a GPU, and missing experts
  copied ahead of chunks. A part that the reference would compute fails the process. ``kernels_short``: the same with so
  little to do that a CPU can interpret it.
- Some rows have a seeded fault in a move, and must differ.

A configuration fails, too, if a move that its policies stand for did not happen. Processes share compiled programs
through JAX's cache on disk. Rows are kept in ``--folder`` as they finish; those of the same settings and source are not
made again. With ``--only`` a configuration's faulty rows are made, too. Exits 1 if a row is not as expected.

    python bench/policy_matrix.py --save bench/results/policy_matrix_cpu.json [--jobs 2] [--only all borrow+kv_grow]
    python bench/policy_matrix.py --chunk kernels --jobs 6 --save bench/results/policy_matrix_h200.json [--only ...]
    python bench/policy_matrix.py --one all --fault refill:copied:2     # one row, printed
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import numpy as np

from bench.policy_matrix_cases import (
    CASES,
    FAULTY,
    POLICIES,
    Case,
    as_json,
    configurations,
    digest,
    geometry_of,
    planned,
    resident_request,
    settings_of,
)
from strata_jax.config.schema import Platform, RunConfig
from strata_jax.errors import ConfigError
from strata_jax.files import replaced_on_success
from strata_jax.hardware import cpu_model
from strata_jax.memory.ledger import Memory, Phase
from strata_jax.memory.plan import plan
from strata_jax.runtime import describe_target, start_jax

JAX_VERSION = importlib.metadata.version("jax")
RESIDENT = "resident"
BOTH = ("fixed", "chosen")
MOST_LOGIT_DIFFERENCE, LEAST_MARGIN = 2e-5, 1e-4
CARD_MIB = 4_096  # of a GPU, for each process: more than any case's budget, and several fit on one card
MOST_INTERPRETED_TOKENS = 1_000
SOURCES = ("strata_jax/**/*.py", "bench/policy_matrix_*.py")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", choices=[*CASES, "both"], default="both")
    parser.add_argument("--only", nargs="+", choices=configurations(), metavar="NAME", help="a part of the matrix")
    parser.add_argument("--one", choices=[*configurations(), RESIDENT], metavar="NAME", help="one process's work")
    parser.add_argument("--fault", default="", metavar="KIND:STAGE:N", help="with --one: bytes of a move go wrong")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "policy_matrix")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    source_digest()
    cases = [CASES[name] for name in (BOTH if options.chunk == "both" else (options.chunk,))]
    try:
        for case in cases:
            check_machine(case)
    except ConfigError as error:
        parser.error(str(error))
    if options.one:
        print(json.dumps(one(cases[0], options.one, options.fault, options.folder)))
        return
    results = {case.name: matrix(case, options) for case in cases}
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(record(results), indent=1) + "\n")
    sys.exit(0 if all(row["as_expected"] for rows in results.values() for row in rows) else 1)


def matrix(case: Case, options: argparse.Namespace) -> list[Row]:
    """Run what is missing, each in a process of its own, and judge every row."""
    names = options.only or list(configurations())
    wanted = [(name, "") for name in names]
    wanted += [pair for pair in FAULTY if pair[0] in names and case.chunk_tokens is not None]
    geometry_of(case, options.folder)  # writes the model

    def run(pair: tuple[str, str]) -> None:
        if not row_path(case, *pair, options.folder).exists():
            in_new_process(case, *pair, options.folder)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, wanted))
    in_new_process(case, RESIDENT, "", options.folder)
    rows = []
    for name, fault in wanted:
        path = row_path(case, name, fault, options.folder)
        row = json.loads(path.read_text()) if path.exists() else unfinished(case)
        rows.append(judged(case, {"configuration": name, "fault": fault, **row}, options.folder))
        print(line(rows[-1]), flush=True)
    return rows


def in_new_process(case: Case, name: str, fault: str, folder: Path) -> None:
    """Start this script for one row; a process that fails leaves none, and what it said stands on the screen."""
    command = [sys.executable, __file__, "--one", name, "--chunk", case.name, "--folder", str(folder)]
    done = subprocess.run([*command, "--fault", fault], stdout=subprocess.PIPE, text=True)
    said = f"{json.loads(done.stdout.splitlines()[-1])['seconds']} s" if done.returncode == 0 else "FAILED"
    print(f"{case.name} {name} {fault}: {said}", flush=True)


def config_of(case: Case) -> RunConfig:
    """Settings of the machine for one process: the reference is compared on a CPU, kernels are for a GPU."""
    config = RunConfig()
    config.engine.platform = Platform.cpu if case.quant is None else Platform.auto
    config.hardware.vram_mib = CARD_MIB
    return config


def check_machine(case: Case) -> None:
    """Raise ConfigError for more tokens than a CPU can interpret the kernels for."""
    if case.quant is None or case.num_tokens <= MOST_INTERPRETED_TOKENS:
        return
    if describe_target(config_of(case)).gpu is None:
        raise ConfigError(
            f"--chunk {case.name}: there is no GPU that JAX can use, and a CPU would interpret the kernels for"
            f" {case.num_tokens:,} tokens, which takes days. Use --chunk kernels_short"
        )


def start(case: Case, name: str, folder: Path) -> None:
    """Start JAX for a configuration. Most differ in what moves, not in what is compiled: programs are shared."""
    geometry, config = geometry_of(case, folder), config_of(case)
    config.engine.compilation_cache_dir = str(folder / "programs")
    if name == RESIDENT:
        made = plan(geometry, resident_request(case, geometry))
    else:
        made = planned(case, geometry, configurations()[name])
    start_jax(config, describe_target(config), host_pool_bytes=made.ledger.total_bytes(Phase.START, Memory.HOST))


def one(case: Case, name: str, fault: str, folder: Path) -> Row:
    """Do one process's work and keep it; returns the row without what only the comparison needs."""
    start(case, name, folder)
    if name == RESIDENT:
        return replay_all(case, folder)
    from bench.policy_matrix_faults import arm
    from bench.policy_matrix_runs import run_policies

    row = run_policies(case, folder, configurations()[name], *([arm(fault)] if fault else []))
    keep(row_path(case, name, fault, folder), {**row, "source": source_digest()})
    return {key: value for key, value in row.items() if key != "requests"}


def replay_all(case: Case, folder: Path) -> Row:
    """Replay whatever rows need and nobody has replayed yet."""
    from bench.policy_matrix_runs import Resident

    engine: Resident | None = None
    count, seconds = 0, 0.0
    for file in sorted((folder / "rows").glob(f"{case.name}-*.json")):
        row = json.loads(file.read_text())
        for request in row["requests"] if row["source"] == source_digest() else ():
            target = reference_path(case, request, folder)
            if target.exists():
                continue
            engine = engine or Resident.load(case, folder)
            started = engine.engine.programs.clock_s()
            prompt, ops = request["prompt"], [(kind, tuple(ids)) for kind, ids in request["ops"]]
            keep(target, engine.with_margins(prompt) if case.chunk_tokens is None else engine.replay(ops))
            seconds += engine.engine.programs.clock_s() - started
            count += 1
    return {"replayed": count, "seconds": round(seconds, 1)}


def judged(case: Case, row: Row, folder: Path) -> Row:
    """Compare a row with its replays."""
    row.pop("source", None)
    pairs = [(r, json.loads(reference_path(case, r, folder).read_text())) for r in row.pop("requests")]
    found = compare_chosen(pairs) if case.chunk_tokens is None else compare_fixed(pairs)
    passes = not found["differences"] and not row["missing_moves"] and bool(pairs)
    as_expected = bool(found["differences"]) if row["fault"] else passes
    return {**row, **found, "expected": "differs" if row["fault"] else "passes", "as_expected": as_expected}


def unfinished(case: Case) -> Row:
    """The row of a process that failed."""
    return {"requests": [], "chunk_tokens": case.chunk_tokens or 0, "moves": {}, "missing_moves": ["row"]}


def compare_fixed(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Count the equal ones among first logits and tokens, of prompts and of what returns, and all that differs."""
    keys, differences, checks, returns, states = ("first_logits_sha256", "tokens"), [], [0, 0], [0, 0], 0
    for found, expected in pairs:
        for key in (*keys, "state_sha256", "steps"):
            equal = as_json(found[key]) == as_json(expected[key])
            if key in keys:
                tally = checks if found["is_prompt"] else returns
                tally[0] += equal
                tally[1] += 1
            states += key == "state_sha256" and equal
            if not equal:
                what = "the chunks or windows" if key == "steps" else key.removesuffix("_sha256").replace("_", " ")
                differences.append(f"{what} of {found['name']} ({found['prompt_tokens']:,} tokens)")
    return {
        "checks": f"{checks[0]}/{checks[1]}", "returns": f"{returns[0]}/{returns[1]}",
        "states": f"{states}/{len(pairs)}", "reused_tokens": [found["reused_tokens"] for found, _ in pairs],
        "first_logits_sha256": {f["name"]: f["first_logits_sha256"] for f, _ in pairs}, "differences": differences,
    }  # fmt: skip


def compare_chosen(pairs: Sequence[tuple[Row, Row]]) -> Row:
    """Say how far first logits are apart, and whether tokens are the same before the first that won narrowly."""
    differences, largest, compared, least = [], 0.0, 0, float("inf")
    for found, expected in pairs:
        apart = float(np.abs(np.subtract(found["first_logits"], expected["first_logits"])).max())
        largest = max(largest, apart)
        if not apart <= MOST_LOGIT_DIFFERENCE:
            differences.append(f"first logits of {found['name']} by {apart:.1e}")
        margins = expected["margins"]
        clear = next((i for i, margin in enumerate(margins) if margin <= LEAST_MARGIN), len(margins))
        compared, least = compared + clear, min([least, *margins[:clear]])
        if found["tokens"][:clear] != expected["tokens"][:clear]:
            differences.append(f"tokens of {found['name']}")
    total = sum(len(found["tokens"]) for found, _ in pairs)
    return {
        "largest_logit_difference": largest, "tokens_compared": f"{compared}/{total}", "least_margin": least,
        "differences": differences,
    }  # fmt: skip


def line(row: Row) -> str:
    """A row of the table."""
    if "checks" in row:
        text = f"{row['checks']:>6} {row['returns']:>5} {row['states']:>5}"
    else:
        text = f"{row['largest_logit_difference']:8.1e} {row['tokens_compared']:>8}"
    name = row["configuration"] + (f" with {row['fault']}" if row["fault"] else "")
    moved = " ".join(f"{kind}={count}" for kind, count in row["moves"].items())
    trouble = "; ".join([*row["differences"], *(f"no {kind}" for kind in row["missing_moves"])])
    verdict = "as expected" if row["as_expected"] else "NOT AS EXPECTED"
    return f"{name:44} chunk {row['chunk_tokens']:4} {text}  {verdict}  {moved}  {trouble}"


def record(results: Mapping[str, list[Row]]) -> Row:
    """What is kept of a finished matrix."""
    return {
        "what": "first logits, 64 greedy tokens and state of each configuration against all experts resident",
        "cpu": cpu_model(), "python": platform.python_version(), "jax": JAX_VERSION,
        "source_sha256": source_digest(),
        "cases": {name: asdict(CASES[name]) for name in results},
        "summary": {name: f"{sum(r['as_expected'] for r in rows)} of {len(rows)} rows as expected"
                    for name, rows in results.items()},
        "rows": results,
    }  # fmt: skip


# --- files


def row_path(case: Case, name: str, fault: str, folder: Path) -> Path:
    """Where a row is kept; the name holds a digest of settings and source."""
    policies = configurations()[name]
    request = planned(case, geometry_of(case, folder), policies).request.to_json()
    wanted = [POLICIES[policy].wanted_segments for policy in policies]
    settings = [asdict(case), request, asdict(settings_of(case, policies)), wanted, fault]
    return folder / "rows" / f"{case.name}-{name}-{digest([settings, source_digest(), JAX_VERSION])}.json"


def reference_path(case: Case, request: Row, folder: Path) -> Path:
    what = request["prompt"] if case.chunk_tokens is None else request["ops"]
    return folder / "replays" / f"{digest([asdict(case), what, source_digest(), JAX_VERSION])}.json"


@cache
def source_digest() -> str:
    """SHA-256 of everything that a row depends on but its settings, as it is when the process starts."""
    files = sorted(path for pattern in SOURCES for path in REPOSITORY.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def keep(path: Path, value: Row) -> None:
    """Write a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_on_success(path) as scratch:
        scratch.write_text(json.dumps(value))


if __name__ == "__main__":
    main()
