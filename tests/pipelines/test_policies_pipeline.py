"""policy=... on the device: agents that take turns on a card that is too small for everything at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_jax.errors import DoesNotFit
from strata_jax.report.timeline import draw_memory
from tests.oracle.models import ModelStore
from tests.pipelines.conftest import Finished

SMALL: dict[str, object] = {"num_layers": 2, "full_attention_interval": 2, "ple_layer": 0}
CARD = (
    "workload=conversations", "kv.type=int8", "hardware.vram_mib=4", "hardware.vram_reserve_mib=0", "prefill.chunk=32",
    "engine.page_kib=5", "kv.grow.floor_slots=6", "engine.check=true", "conversation.budget_mib=8",
    "workload.max_output_tokens=8", "workload.ignore_eos=true", "spec.window=2",
)  # fmt: skip
OUTPUTS = [f"{name}.0" for name in ("main.0", "subagent_1.1", "main.2", "subagent_2.3", "second.4", "main.5")]


@pytest.fixture(scope="module")
def path(models: ModelStore) -> Path:
    return models.synthetic("nano", 0, echo_mtp=0.1, overrides=SMALL)


def moves(done: Finished) -> dict[str, int]:
    """Moves of a run by kind."""
    lines = [json.loads(line) for line in (done.directory / "events.jsonl").read_text().splitlines()]
    found: dict[str, int] = {}
    for line in lines:
        if "cause" in line:
            found[line["kind"]] = found.get(line["kind"], 0) + 1
            assert {"owner", "bytes", "ms", "gb_s", "conversation"} <= set(line)
    return found


def test_all_policies_give_the_text_of_a_run_in_which_nothing_moves(
    run_here: Callable[..., Finished], path: Path
) -> None:
    model = f"model.path={path}"
    roomy = [text for text in CARD if not text.startswith("hardware.vram_mib")]
    still = run_here(model, "policy=baseline", *roomy, "hardware.vram_mib=64", directory="still")
    moved = run_here(model, "policy=all", *CARD, directory="moved")
    assert [moved.text(name) for name in OUTPUTS] == [still.text(name) for name in OUTPUTS]
    assert {"evict", "map_cells", "trim_cells", "lend", "return", "refill", "unload_head", "load_head", "park",
            "restore", "checkpoint"} <= set(moves(moved))  # fmt: skip
    assert {"park", "restore"} <= set(moves(still)) <= {"park", "restore", "checkpoint", "drop", "alloc_buffers"}
    for line in ("K/V grown to 1,", "K/V trimmed to ", "parked 1,5", "restored 1,5"):
        assert line in moved.out
    reused = [line["reused_tokens"] for line in moved.lines("metrics.jsonl", "request")]
    assert [tokens > 1000 for tokens in reused] == [False, False, True, False, False, True]
    check_plan(json.loads((moved.directory / "plan.json").read_text()))
    picture = draw_memory(moved.directory)
    assert picture is not None
    text = picture.read_text()
    assert "simulated" not in text
    assert "second" in text
    owners = [line["owners"] for line in moved.lines("events.jsonl", "memory")]
    totals = {sum(each.values()) for each in owners}
    assert len(totals) == 1, "the owners' bytes do not add up to the same card"


def check_plan(plan: dict[str, Any]) -> None:
    assert plan["prefill"]["layout"] == "hybrid"
    assert plan["expert_cache"]["lent_slots"] > 0
    assert plan["kv"]["mapped_cells"] < plan["kv"]["max_cells"]
    assert plan["kv"]["mapped_mib"] < plan["kv"]["max_mib"]
    assert plan["head"]["aliased"] is True
    assert plan["ram"]["conversation_budget_mib"] == 8


def test_a_card_that_is_large_enough_with_the_policies_only(run_here: Callable[..., Finished], path: Path) -> None:
    fixed = (f"model.path={path}", *CARD, "cache.slots=39", "pipeline=plan")
    run_here("policy=all", *fixed, directory="on")
    with pytest.raises(DoesNotFit, match="too few"):
        run_here("policy=baseline", *fixed, directory="off")
