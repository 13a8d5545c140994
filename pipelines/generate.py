"""The main job: read each prompt in chunks, decode with the draft block, stream the text, keep the numbers."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipelines.assemble import Prompt, load_engine, make_plan, open_model, read_prompts
from strata_jax.config.schema import RunConfig
from strata_jax.engine.text_stream import TextStream
from strata_jax.gguf.tokenizer import Tokenizer
from strata_jax.report.progress import SlowProgress
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, result_table
from strata_jax.workloads import Request

if TYPE_CHECKING:
    import numpy as np

    from strata_jax.engine.engine import Engine
    from strata_jax.engine.session import ChunkRecord, RoundRecord, Session


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Run the workload's requests in order, as often as asked, and return the summary."""
    file, geometry = open_model(config)
    prompts, tokenizer = read_prompts(config, file, geometry)
    plan, hardware = make_plan(config, geometry, prompts, record)
    engine = load_engine(config, hardware, file, geometry, plan, record)
    finished: list[list[dict[str, Any]]] = []
    run_s: list[float] = []
    try:
        for run_idx in range(config.workload.requests):
            started_s = engine.programs.clock_s()
            finished.append([])
            for prompt in prompts:
                finished[-1].append(_serve(prompt, engine, tokenizer, config, record, run_idx))
            run_s.append(engine.programs.clock_s() - started_s)
    finally:  # also what an interrupted run has done
        record.update(**_summary(finished, run_s, engine))
    console().print(result_table(record.summary))
    return {}


def _serve(
    prompt: Prompt, engine: Engine, tokenizer: Tokenizer, config: RunConfig, record: RunRecord, run_idx: int
) -> dict[str, Any]:
    """Answer one request on a fresh sequence and return its numbers."""
    from strata_jax.engine.session import Session

    name = f"{prompt.request.name}.{run_idx}"
    out = console()
    out.rule(f"{name}: {len(prompt.token_ids):,} prompt tokens", align="left")
    chunks: list[ChunkRecord] = []

    def on_chunk(chunk: ChunkRecord) -> None:
        chunks.append(chunk)
        record.metric("chunk", request=name, **asdict(chunk))
        progress.at(f"{name}: {chunk.start + chunk.num_tokens:,} of {len(prompt.token_ids):,} prompt tokens read")

    progress = SlowProgress()
    session = Session(engine, on_chunk=on_chunk)
    stream = TextStream(tokenizer.token_bytes, prompt.request.stop)
    stop_ids = frozenset() if prompt.request.ignore_eos else tokenizer.eos_ids
    clock_s, started_s = engine.programs.clock_s, engine.programs.clock_s()
    logits = session.prefill(prompt.token_ids)
    prefill_s, first_s, num_output, finish_reason = clock_s() - started_s, 0.0, 0, "length"
    rounds: list[RoundRecord] = []
    for tokens, step in _steps(session, logits, prompt.request, stop_ids, config):
        record.metric("round", request=name, **asdict(step))
        rounds.append(step)
        first_s = first_s or clock_s() - started_s
        for token in tokens:
            num_output += 1
            if token in stop_ids:
                finish_reason = "stop"
                break
            _show(stream.push(token), name, record)
            if stream.stopped:
                finish_reason = "stop"
                break
        if finish_reason == "stop":
            break
    _show(stream.finish(), name, record)
    if stream.stopped:  # a stop text that the last token completed
        finish_reason = "stop"
    out.print()
    decode_s = clock_s() - started_s - first_s
    if config.engine.check:
        record.event("check", **engine.check_memory(session.state))
    numbers = {
        "request": name,
        "prompt_tokens": len(prompt.token_ids),
        "fresh_tokens": len(prompt.token_ids),
        "reused_tokens": 0,
        "output_tokens": num_output,
        "finish_reason": finish_reason,
        "ttft_ms": 1000 * first_s,
        "prompt_ms": 1000 * prefill_s,
        "decode_ms": 1000 * decode_s,
        "rounds": len(rounds),
        "draft_tokens": sum(r.num_drafted for r in rounds),
        "draft_accepted_tokens": sum(r.num_accepted for r in rounds),
        "lookups": sum(r.lookups for r in rounds),
        "hits": sum(r.hits for r in rounds),
        "prompt_lookups": sum(c.lookups for c in chunks),
        "prompt_hits": sum(c.hits for c in chunks),
    }
    record.metric("request", **numbers)
    return numbers


def _steps(
    session: Session, logits: np.ndarray, request: Request, stop_ids: frozenset[int], config: RunConfig
) -> Iterator[tuple[tuple[int, ...], RoundRecord]]:
    """Yield the tokens of the output, with the step that gave them: chosen by the model, or forced one by one."""
    if request.forced_token_ids is not None:
        for token, (step, _) in zip(request.forced_token_ids, session.force(request.forced_token_ids), strict=True):
            yield (token,), step
        return
    steps = session.decode(
        logits,
        max_tokens=request.max_output_tokens,
        sampling=request.sampling,
        stop_ids=stop_ids,
        min_p=config.spec.min_p,
    )
    for step in steps:
        yield step.emitted, step


def _show(piece: str, name: str, record: RunRecord) -> None:
    if piece:
        sys.stdout.write(piece)
        sys.stdout.flush()
        record.append_text(name, piece)


def _summary(finished: list[list[dict[str, Any]]], run_s: list[float], engine: Engine) -> dict[str, Any]:
    """Fields of summary.json from the requests that are done. Rates leave the first run out where there are more."""
    every = [request for run in finished for request in run]
    timed = [request for run in finished[1:] for request in run] or every

    def total(key: str) -> int:
        return sum(request[key] for request in every)

    def rate(tokens: str, ms: str, less: int = 0) -> float | None:
        rates = [1000 * (r[tokens] - less) / r[ms] for r in timed if r[tokens] > less and r[ms] > 0]
        return statistics.median(rates) if rates else None

    def share(hits: str, lookups: str) -> float | None:
        return total(hits) / total(lookups) if total(lookups) else None

    counted = (
        "prompt_tokens", "fresh_tokens", "reused_tokens", "output_tokens", "draft_tokens", "draft_accepted_tokens",
    )  # fmt: skip
    return {
        "num_requests": len(every),
        **{key: total(key) for key in counted},
        "ttft_ms": statistics.median(r["ttft_ms"] for r in timed) if timed else None,
        "prompt_tok_s": rate("fresh_tokens", "prompt_ms"),
        "decode_tok_s": rate("output_tokens", "decode_ms", less=1),
        "hit_rate": share("hits", "lookups"),
        "prompt_hit_rate": share("prompt_hits", "prompt_lookups"),
        "num_runs": len(run_s),
        "first_run_s": run_s[0] if run_s else None,
        "median_run_s": statistics.median(run_s[1:]) if len(run_s) > 1 else None,
        "compile_s": engine.programs.compile_s,
        "num_compilations": len(engine.programs.compiled),
        "peak_device_bytes": engine.peak_device_bytes(),
    }
