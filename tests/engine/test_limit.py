"""A run on a larger card than it is planned for says when it took more than the plan leaves it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from strata_jax.engine import engine as engine_module
from strata_jax.engine.engine import Engine
from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from strata_jax.presets import preset_geometry

BUDGET, RESERVE = 200 * MIB, 10 * MIB


def problem(monkeypatch: pytest.MonkeyPatch, counts: dict[str, int] | None, budget: int | None = BUDGET) -> str | None:
    made = plan(preset_geometry("synthetic_small", "iq2_xs"), PlanRequest(context_cells=512, chunk_tokens=64))
    request = replace(made.request, device_budget_bytes=budget, reserve_bytes=RESERVE)
    monkeypatch.setattr(engine_module, "_device_counts", lambda: counts)
    return Engine.past_limit(SimpleNamespace(plan=replace(made, request=request)))  # type: ignore[arg-type]


def test_a_peak_past_the_limit_is_told_with_what_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    text = problem(monkeypatch, {"bytes_in_use": 0, "peak_bytes_in_use": BUDGET - RESERVE + 3 * MIB + 1})
    assert text is not None
    assert "202,375,169 bytes were in use at once, 199,229,440 are planned" in text
    assert "a card of 200 MiB" in text
    assert text.endswith("Raise hardware.vram_reserve_mib by 4")


def test_nothing_is_said_at_the_limit_or_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at_limit = {"bytes_in_use": 0, "peak_bytes_in_use": BUDGET - RESERVE}
    assert problem(monkeypatch, at_limit) is None
    assert problem(monkeypatch, None) is None
    assert problem(monkeypatch, {"peak_bytes_in_use": 10 * BUDGET}, budget=None) is None
