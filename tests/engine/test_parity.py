"""Logits against engines nobody here wrote: llama.cpp on the same file, transformers on the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from strata_jax.engine.session import Session
from tests.engine.conftest import LoadEngine
from tests.oracle.models import (
    MIN_MARGIN,
    PARITY_CASES,
    ModelStore,
    ParityCase,
    hf_golden,
    oracle_logits,
    oracle_mtp_logits,
)

TOLERANCE = 5e-5  # at a logit std of about 1.4; llama.cpp and transformers agree with each other to 1.2e-5
CASES = pytest.mark.parametrize("case", PARITY_CASES, ids=str)


@CASES
def test_trunk_logits_equal_llama_cpp(
    case: ParityCase, models: ModelStore, load_engine: LoadEngine, llama_oracle: None
) -> None:
    path = models.synthetic(case.preset, case.seed)
    logits = Session(load_engine(path)).prefill(case.token_ids, want="all")
    expected = oracle_logits(path, case.token_ids)
    assert min(case.router_margin, case.index_margin) > MIN_MARGIN
    assert expected.std() > 1
    assert np.abs(logits - expected).max() <= TOLERANCE


@CASES
def test_draft_logits_equal_llama_cpp(
    case: ParityCase, models: ModelStore, load_engine: LoadEngine, llama_oracle: None
) -> None:
    path = models.synthetic(case.preset, case.seed)
    logits = Session(load_engine(path)).prefill(case.token_ids, want="draft")
    assert np.abs(logits - oracle_mtp_logits(path, case.token_ids)).max() <= TOLERANCE


@CASES
def test_trunk_logits_equal_transformers(case: ParityCase, models: ModelStore, load_engine: LoadEngine) -> None:
    golden = hf_golden(case)
    logits = Session(load_engine(models.synthetic(case.preset, case.seed))).prefill(case.token_ids, want="all")
    assert golden.margins.router > MIN_MARGIN
    assert golden.margins.index > MIN_MARGIN
    assert np.abs(logits[golden.positions] - golden.logits).max() <= TOLERANCE


def test_fused_gate_up_experts_equal_llama_cpp(models: ModelStore, load_engine: LoadEngine, llama_oracle: None) -> None:
    path, tokens = models.synthetic("nano", 0, fused_experts=True), PARITY_CASES[0].token_ids[:100]
    logits = Session(load_engine(path)).prefill(tokens, want="all")
    assert np.abs(logits - oracle_logits(path, tokens)).max() <= TOLERANCE
