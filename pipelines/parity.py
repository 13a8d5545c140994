"""Compare the engine with itself: chunked, one-shot and stepwise logits, drafted and plain text, of one model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.assemble import check_peak, load_engine, make_plan, open_model, read_prompts
from strata_jax.config.schema import RunConfig
from strata_jax.errors import StrataError
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, table, table_text
from strata_jax.workloads import Request

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine

# At a logit std of about 1.4. Float32 K/V: the order of sums. Rounded K/V: now and then a value falls to the other side
# of a rounding step, and what follows differs by that step.
F32_TOLERANCE, ROUNDED_TOLERANCE = 2e-5, 2e-2
COLUMNS = ("comparison", "positions", "max difference", "mean difference", "same arg-max", "within")


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Print and save the table of differences. Raises StrataError, after that, if a row is outside its tolerance."""
    file, geometry = open_model(config)
    prompts, _ = read_prompts(config, file, geometry)
    plan, hardware = make_plan(config, geometry, prompts, record, all_logits=True)
    engine = load_engine(config, hardware, file, geometry, plan, record)
    tolerance = F32_TOLERANCE if plan.kv_type == "f32" else ROUNDED_TOLERANCE
    rows = [
        (f"{prompt.request.name}: {row[0]}", *row[1:])
        for prompt in prompts
        for row in _compare(engine, prompt.token_ids, prompt.request, tolerance)
    ]
    built = table(f"Differences within {geometry.name}, K/V {plan.kv_type}", COLUMNS, rows)
    console().print(built)
    record.write_json("parity.json", [dict(zip(COLUMNS, row, strict=True)) for row in rows])
    (record.directory / "parity.txt").write_text(table_text(built), encoding="utf-8")
    check_peak(config, engine)
    outside = [row[0] for row in rows if not row[-1]]
    summary = {
        "num_requests": len(prompts),
        "prompt_tokens": sum(len(p.token_ids) for p in prompts),
        "compile_s": engine.programs.compile_s,
        "num_compilations": len(engine.programs.compiled),
        "extra": {"agrees": not outside, "logit_tolerance": tolerance},
    }
    if outside:
        record.update(**summary)
        raise StrataError(f"{len(outside)} of {len(rows)} comparisons disagree: {'; '.join(outside)}")
    return summary


def _compare(engine: Engine, ids: tuple[int, ...], request: Request, tolerance: float) -> Iterator[tuple[Any, ...]]:
    from strata_jax.engine.session import Session

    chunked = Session(engine).prefill(ids, want="all")
    for chunk in (c for c in engine.plan.prefill_buckets if c < engine.plan.chunk_tokens):
        session = Session(engine)
        parts = [session.prefill(ids[i : i + chunk], want="all") for i in range(0, len(ids), chunk)]
        yield _logits_row(
            f"chunks of {engine.plan.chunk_tokens} and of {chunk}", chunked, np.concatenate(parts), tolerance
        )
    stepped = np.stack([logits for _, logits in Session(engine).force(ids)])
    yield _logits_row(f"chunks of {engine.plan.chunk_tokens} and single steps", chunked, stepped, tolerance)
    if not engine.plan.with_draft:
        return
    texts = []
    for draft in (True, False):
        session = Session(engine)
        logits = session.prefill(ids)
        steps = session.decode(logits, max_tokens=request.max_output_tokens, sampling=request.sampling, draft=draft)
        texts.append([token for step in steps for token in step.emitted])
    same = sum(a == b for a, b in zip(*texts, strict=True)) / len(texts[0])
    yield ("drafted and plain text", len(texts[0]), None, None, same, texts[0] == texts[1])


def _logits_row(name: str, a: np.ndarray, b: np.ndarray, tolerance: float) -> tuple[Any, ...]:
    difference = np.abs(a - b)
    same = float((a.argmax(-1) == b.argmax(-1)).mean())
    worst = float(difference.max())
    return (name, len(a), worst, float(difference.mean()), same, worst <= tolerance)
