"""Every pipeline that computes on the device says when it took more memory than planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import parity
from strata_jax.engine.engine import Engine
from tests.pipelines.conftest import Finished

SHORT = ("prefill.chunk=64", "model.max_context=32", "workload.token_ids=[5,6,7,8]")
RUNS = {
    "generate": ("workload.max_output_tokens=1", "spec.window=1"),
    "logits": (),
    "parity": ("workload.max_output_tokens=1", "spec.window=1"),
}


@pytest.mark.parametrize("pipeline", RUNS)
def test_a_run_past_its_plan_is_told_and_with_the_check_fails(
    pipeline: str, run_here: Callable[..., Finished], small_model: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(Engine, "past_limit", lambda engine: "3 bytes more than planned")
    monkeypatch.setattr(parity, "_compare", lambda *args: [])  # what it compares takes long to compile
    settings = (f"pipeline={pipeline}", f"model.path={small_model}", *SHORT, *RUNS[pipeline])
    run_here(*settings)
    assert "3 bytes more than planned" in caplog.text
    with pytest.raises(RuntimeError, match="3 bytes more than planned"):
        run_here(*settings, "engine.check=true", directory="checked")
