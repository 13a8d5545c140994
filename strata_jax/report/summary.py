"""The fields of `summary.json`. Every run writes all of them; what a run does not have is null.

Times never mix: `compile_s` is apart from the run times, the first run is apart from the median of the others, and
rates are medians over the requests of the later runs where there are any. Tokens that were computed (`fresh_tokens`)
are apart from tokens whose state was still there (`reused_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA_VERSION = 1

# name -> what it means; the order is the order in the file and in the result table
FIELDS: Mapping[str, str] = {
    "status": "ok, failed or interrupted",
    "error": "null, or {type, message, expected}; expected errors are outcomes, others are bugs",
    "pipeline": "which pipeline ran",
    "model": "name of the model",
    "weights": "file, or synthetic: random blocks of the model's types and sizes, so that the text means nothing",
    "device": "what computed",
    "num_requests": "requests finished",
    "prompt_tokens": "tokens of the prompts",
    "fresh_tokens": "prompt tokens computed",
    "reused_tokens": "prompt tokens whose state was reused",
    "output_tokens": "tokens generated",
    "draft_tokens": "tokens drafted and verified",
    "draft_accepted_tokens": "drafted tokens that were accepted",
    "ttft_ms": "from the request to its first token, median over requests, without compilation",
    "prompt_tok_s": "fresh prompt tokens a second, median over requests, without compilation",
    "decode_tok_s": "generated tokens a second after the first, median over requests, without compilation",
    "hit_rate": "decoding: share of routed (token, expert) pairs whose expert was in the arena",
    "prompt_hit_rate": "the same for the prompts",
    "num_runs": "times the list of requests was run",
    "first_run_s": "the first run, without compilation",
    "median_run_s": "median of the runs after the first; null if there was one run",
    "compile_s": "tracing, compiling and reading compiled programs",
    "num_compilations": "programs compiled or read from the cache",
    "load_s": "opening the file and filling bank and arena",
    "wall_s": "the whole run",
    "peak_device_bytes": "the device's own count; on the CPU the bytes of live arrays",
    "peak_ram_bytes": "largest resident size of the process",
    "extra": "what only this pipeline has",
    "settings": "all settings, resolved",
}


def check_fields(names: Iterable[str]) -> None:
    """Raise TypeError if a name is not a field of the summary."""
    unknown = [name for name in names if name not in FIELDS]
    if unknown:
        raise TypeError(f"summary.json has no field {', '.join(unknown)}; add it to FIELDS or put it under extra")


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields in their order, null where a run has no value."""
    check_fields(values)
    return {"schema_version": SCHEMA_VERSION, **{name: values.get(name) for name in FIELDS}}
