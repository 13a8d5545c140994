"""kv.resident_cells=... from the command line: what is planned, moved, logged and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from strata_jax.errors import ConfigError
from tests.oracle.models import ModelStore
from tests.pipelines.conftest import SMALL, Finished

RUN = (
    "workload.max_output_tokens=24", "workload.ignore_eos=true", "prefill.chunk=16",
    "engine.page_kib=5", "kv.type=int8", "engine.check=true", "spec.window=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def path(models: ModelStore) -> Path:
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL)


def test_a_prompt_past_the_window_moves_cells_to_host_memory(run_here: Callable[..., Finished], path: Path) -> None:
    ids = ",".join(str(3 + i % 400) for i in range(150))
    done = run_here(
        f"model.path={path}", f"workload.token_ids=[{ids}]", *RUN, "kv.resident_cells=60", directory="window"
    )
    plan = json.loads((done.directory / "plan.json").read_text())
    assert plan["kv"]["mapped_cells"] < 150 + 24 <= plan["kv"]["max_cells"]
    assert plan["kv"]["mapped_mib"] < plan["kv"]["max_mib"]
    assert any(note.startswith("kv.resident_cells=60: the last ") for note in plan["notes"])
    moves = done.lines("events.jsonl", "spill_cells")
    assert len(moves) >= 3
    for move in moves:
        assert move["owner"] == "K/V"
        assert move["bytes"] == move["count"] // plan["layout"]["cells_per_page"] * 2 * 5120
        assert move["ms"] > 0
        assert move["gb_s"] > 0
        assert move["cause"].endswith("are written next")
    checks = done.lines("events.jsonl", "check")
    assert checks
    assert all(abs(c["found_bytes"] - c["planned_bytes"]) <= 0.01 * c["planned_bytes"] for c in checks)
    host = sum(line["bytes"] for line in done.lines("events.jsonl", "load") if line["owner"] == "K/V in host memory")
    assert host == plan["kv"]["max_mib"] * 2**20


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        (("kv.resident_cells=10",), ("kv.resident_cells=10 and prefill.chunk=16", "Set kv.resident_cells=")),
        (("kv.resident_cells=60", "policy.kv_grow.enabled=true"), ("kv.resident_cells=60", "policy.kv_grow.enabled")),
    ],
    ids=["too small", "growth"],
)
def test_what_cannot_be_is_refused(
    run_here: Callable[..., Finished], path: Path, settings: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_here(
            f"model.path={path}", "workload.token_ids=[5,6,7]", *RUN[2:4], "kv.type=f32", "model.max_context=512",
            "pipeline=plan", *settings, directory=settings[-1].partition("=")[0],
        )  # fmt: skip
    assert all(text in str(caught.value) for text in texts)
