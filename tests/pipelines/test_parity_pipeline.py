"""pipeline=parity: the engine agrees with itself, and the table says so when it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strata_jax.engine.session import Session
from strata_jax.errors import StrataError
from tests.oracle.models import sample_tokens
from tests.pipelines.conftest import Finished

TOKENS = sample_tokens(4, 90, 512, 480)
SETTINGS = (
    "pipeline=parity",
    "prefill.chunk=64",
    "kv.type=f32",
    "model.max_context=256",
    "workload.max_output_tokens=30",
    f"workload.token_ids=[{','.join(map(str, TOKENS))}]",
)
ROWS = [
    ("token_ids: chunks of 64 and of 8", 90),
    ("token_ids: chunks of 64 and single steps", 90),
    ("token_ids: drafted and plain text", 30),
]


def table(run: Finished) -> list[dict[str, object]]:
    return json.loads((run.directory / "parity.json").read_text(encoding="utf-8"))


def test_chunks_steps_and_drafts_agree(run_here: Callable[..., Finished], small_model: Path) -> None:
    run = run_here(*SETTINGS, f"model.path={small_model}")
    assert run.summary["extra"] == {"agrees": True, "logit_tolerance": 2e-5}
    rows = table(run)
    assert [(row["comparison"], row["positions"]) for row in rows] == ROWS
    assert all(row["within"] is True and row["same arg-max"] == 1 for row in rows)
    assert all(0 < row["max difference"] <= 2e-5 for row in rows[:2])  # type: ignore[operator]
    for name, _ in ROWS:
        assert name.removeprefix("token_ids: ") in (run.directory / "parity.txt").read_text(encoding="utf-8")


def test_a_difference_is_found(
    run_here: Callable[..., Finished], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single step that is off by 1e-3 at one position, and drafted text with another last token."""
    force, decode = Session.force, Session.decode

    def off(self: Session, tokens: list[int]):  # type: ignore[no-untyped-def]
        for i, (record, logits) in enumerate(force(self, tokens)):
            yield record, logits + (1e-3 if i == 17 else 0.0)

    def other(self: Session, *args: object, **options: object):  # type: ignore[no-untyped-def]
        for record in decode(self, *args, **options):  # type: ignore[arg-type]
            changed = options.get("draft") and record.position > 100
            yield replace(record, emitted=(*record.emitted[:-1], 0)) if changed else record

    monkeypatch.setattr(Session, "force", off)
    monkeypatch.setattr(Session, "decode", other)
    with pytest.raises(StrataError, match=r"2 of 3 comparisons disagree: .*single steps; .*drafted and plain text"):
        run_here(*SETTINGS, f"model.path={small_model}")
    run = Finished(tmp_path / "run", "")
    assert (run.summary["status"], run.summary["extra"]["agrees"]) == ("failed", False)
    assert [row["within"] for row in table(run)] == [True, False, False]
