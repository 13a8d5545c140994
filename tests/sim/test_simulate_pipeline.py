"""pipeline=generate on a card that is not here: the record is that of a real run, marked as simulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import simulate
from strata_jax.config import RunConfig
from strata_jax.errors import DoesNotFit
from strata_jax.report.record import RunRecord

Compose = Callable[..., RunConfig]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_simulated_run_leaves_the_files_of_a_real_one(tmp_path: Path, compose_config: Compose) -> None:
    settings = compose_config(
        ["hardware=rtx5090", "policy=kv_grow", "workload=grow_served", "conversation.budget_mib=8192"]
    )
    with RunRecord.open(tmp_path, settings) as record:
        record.update(**simulate.run(settings, record))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["num_requests"], summary["device"]) == ("ok", 6, "simulated rtx5090")
    assert summary["extra"]["executor"] == plan["executor"] == "sim"
    assert summary["extra"]["calibrated"] is plan["calibrated"] is True
    assert 300 < summary["prompt_tok_s"] < 20_000
    metrics, events = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "events.jsonl")
    assert {line["kind"] for line in metrics} == {"request", "chunk", "round"}
    assert {"load", "memory", "lend", "return", "refill", "map_cells", "trim_cells", "park", "restore"} <= {
        line["kind"] for line in events
    }
    assert all(line["executor"] == "sim" for line in (*metrics, *events))
    requests = [line for line in metrics if line["kind"] == "request"]
    assert [r["reuse"] for r in requests] == ["none"] * 5 + ["parked"]
    for name in ("cpu_experts_per_layer", "copy_wait_ms", "hit_rate", "pcie_share", "refill_ms", "restore_ms"):
        assert all(request[name] is not None for request in requests)


def test_a_card_without_a_fit_is_marked_everywhere(tmp_path: Path, compose_config: Compose) -> None:
    settings = compose_config(["hardware=h200", "workload=chat"])
    with RunRecord.open(tmp_path, settings) as record:
        record.update(**simulate.run(settings, record))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["device"] == "simulated h200 (uncalibrated)"
    assert summary["extra"]["calibrated"] is False
    assert not any(line["calibrated"] for line in lines(tmp_path / "metrics.jsonl"))
    assert "not calibrated" in (tmp_path / "plan.txt").read_text(encoding="utf-8")


def test_a_plan_that_does_not_fit_is_written_down_with_its_shortfall(tmp_path: Path, compose_config: Compose) -> None:
    settings = compose_config(["hardware=rtx_pro_2000_8gb", "quant=iq3_xxs", "kv.type=f16"])
    with pytest.raises(DoesNotFit), RunRecord.open(tmp_path, settings) as record:
        simulate.run(settings, record)
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert plan["fits"] is False
    assert plan["shortfall_mib"] > 0
    assert plan["executor"] == "sim"
