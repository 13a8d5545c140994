"""pipeline=logits: the file holds every position's logits, the same read in chunks or token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata_jax.engine.session import Session
from strata_jax.errors import ConfigError
from tests.engine.conftest import load
from tests.oracle.models import oracle_logits, sample_tokens
from tests.pipelines.conftest import Finished

TOKENS = sample_tokens(4, 90, 512, 480)
SETTINGS = (
    "pipeline=logits",
    "prefill.chunk=64",
    "kv.type=f32",
    "model.max_context=90",  # nothing is generated
    f"workload.token_ids=[{','.join(map(str, TOKENS))}]",
)
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def expected(small_model: Path) -> np.ndarray:
    """The engine's logits."""
    engine = load(small_model, context_cells=90, chunk_tokens=64, expert_slots=6)
    return Session(engine).prefill(TOKENS, want="all")


def test_chunks_from_the_command_line_give_the_engines_logits(
    command_line: Callable[..., Finished], small_model: Path, expected: np.ndarray
) -> None:
    run = command_line(*SETTINGS, f"model.path={small_model}")
    assert run.code == 0, run.err
    assert (run.logits.shape, run.logits.dtype) == ((90, 512), np.float32)
    np.testing.assert_array_equal(run.logits, expected)
    summary = run.summary
    assert (summary["status"], summary["pipeline"], summary["prompt_tokens"], summary["output_tokens"]) == (
        "ok", "logits", 90, 0,
    )  # fmt: skip
    assert summary["prompt_tok_s"] > 0
    assert (run.directory / "plan.json").exists()
    assert "logits.npy: float32 90 x 512" in run.out.replace("\n", "")


def test_steps_equal_chunks_and_llama_cpp(
    run_here: Callable[..., Finished], small_model: Path, expected: np.ndarray, llama_oracle: None
) -> None:
    run = run_here(*SETTINGS, f"model.path={small_model}", "workload.batching=step")
    assert (run.logits.shape, run.logits.dtype) == ((90, 512), np.float32)
    difference = np.abs(run.logits - expected).max()
    assert difference <= TOLERANCE
    assert difference > 0, "the steps were not run"
    assert np.abs(run.logits - oracle_logits(small_model, TOKENS)).max() <= 5e-5


def test_several_prompts_are_refused(run_here: Callable[..., Finished], small_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload=doc_18k_small: .* one input\. Add workload\.token_ids"):
        run_here("pipeline=logits", f"model.path={small_model}")
