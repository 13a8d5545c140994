"""Write the logits of given tokens: `logits.npy`, float32 (positions x vocabulary), row i predicts token i + 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.assemble import check_peak, load_engine, make_plan, open_model, read_prompts
from strata_jax.config.schema import Batching, RunConfig
from strata_jax.errors import ConfigError
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Read the one prompt in chunks or token by token and save the logits of every position."""
    file, geometry = open_model(config)
    prompts, _ = read_prompts(config, file, geometry)
    if len(prompts) != 1:
        raise ConfigError(
            f"pipeline=logits takes one prompt, workload={config.workload.name} has {len(prompts)}; "
            "give workload.token_ids or workload.prompt"
        )
    ids = prompts[0].token_ids
    plan, hardware = make_plan(config, geometry, prompts, record, all_logits=True, with_output=False)
    engine = load_engine(config, hardware, file, geometry, plan, record)
    from strata_jax.engine.session import Session

    session, started_s = Session(engine), engine.programs.clock_s()
    path = record.directory / "logits.npy"
    # straight into the file: all positions of a long prompt need more memory than the model
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(len(ids), geometry.vocab_size))
    if config.workload.batching is Batching.step:
        for i, (_, logits) in enumerate(session.force(ids)):
            rows[i] = logits
    else:
        for first in range(0, len(ids), plan.chunk_tokens):
            part = ids[first : first + plan.chunk_tokens]
            rows[first : first + len(part)] = session.prefill(part, want="all")
    rows.flush()
    seconds = engine.programs.clock_s() - started_s
    check_peak(config, engine)
    console().print(f"{path}: float32 {rows.shape[0]:,} x {rows.shape[1]:,}, std {rows.std():.3f}")
    return {
        "num_requests": 1,
        "prompt_tokens": len(ids),
        "fresh_tokens": len(ids),
        "reused_tokens": 0,
        "output_tokens": 0,
        "prompt_tok_s": len(ids) / seconds,
        "compile_s": engine.programs.compile_s,
        "num_compilations": len(engine.programs.compiled),
        "peak_device_bytes": engine.peak_device_bytes(),
    }
