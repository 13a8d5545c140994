"""The policy matrix in small: its script's functions on prompts up to 2,048 tokens, in this process."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from bench.policy_matrix import check_machine, compare_chosen, compare_fixed
from bench.policy_matrix_cases import (
    CASES,
    POLICIES,
    Ask,
    Case,
    configurations,
    geometry_of,
    missing_moves,
    open_model,
    planned,
    resident_request,
)
from bench.policy_matrix_faults import arm
from bench.policy_matrix_runs import Resident, Run, begin, load, without_kernels
from strata_jax.engine.engine import Engine
from strata_jax.errors import ConfigError
from strata_jax.memory import staging
from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import plan

# prompts, returns to two of them, and one more return for the fault
CASE = Case(
    name="small",
    asks=(
        Ask("24", 24), Ask("2048", 2_048), Ask("24", 9, returns=True), Ask("44", 44), Ask("2048", 20, returns=True),
    ),
    model={"num_layers": 2, "full_attention_interval": 2, "ple_layer": 0, "num_kv_heads": 1, "num_experts": 32},
    context_cells=2_304, chunk_tokens=64, slots=56, page_bytes=8_192, init_cells=256, every=512, root=512,
    budget_bytes=6 * MIB, segment_bytes=MIB, floor_slots=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All policies at work on a model of its own, but the one for which every program is compiled once more."""
    return begin(
        CASE, tmp_path_factory.mktemp("matrix"), [name for name in configurations()["all"] if name != "vram_elastic"]
    )


def test_all_policies_at_once_change_no_bit_and_a_seeded_fault_does(run: Run) -> None:
    resident = Resident.load(CASE, run.runtime.engine.file.paths[0].parent)
    rows = [run.serve(ask) for ask in CASE.asks[:-1]]
    found = compare_fixed([(row, resident.replay(row["ops"])) for row in rows])
    assert found["differences"] == []
    assert (found["checks"], found["returns"], found["states"]) == ("6/6", "2/2", "4/4")
    assert [row["reused_tokens"] for row in rows] == [0, 0, 24 + 63, 0]
    assert missing_moves(run.policies, run.counts.moves) == []
    assert {"lend", "return"} <= set(run.counts.moves)

    arm("restore:prepared:1")(run.runtime)
    spoilt = run.serve(CASE.asks[-1])
    found = compare_fixed([(spoilt, resident.replay(spoilt["ops"]))])
    assert found["checks"] == "0/0"
    assert "first logits of 2048* (2,132 tokens)" in found["differences"]


def test_every_pair_that_can_be_on_together_is_a_configuration() -> None:
    found = {frozenset(names) for names in configurations().values()}
    wanted = {frozenset(pair) for pair in combinations(POLICIES, 2)} - {frozenset(("kv_grow", "kv_residence"))}
    assert wanted <= found
    assert {frozenset((name,)) for name in POLICIES} <= found
    assert frozenset(POLICIES) - {"kv_residence"} in found
    assert frozenset(POLICIES) - {"own", "kv_grow"} in found


@pytest.mark.parametrize("name", CASES)
def test_every_configuration_of_a_case_can_be_planned(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    geometry = geometry_of(case, tmp_path)
    made = [planned(case, geometry, policies) for policies in configurations().values()]
    resident = plan(geometry, resident_request(case, geometry))
    assert {one.staged_buckets for one in made} == {resident.staged_buckets}
    assert (case.chunk_tokens in resident.staged_buckets) == (case.quant is not None)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.chunk_tokens is not None])
def test_the_plans_of_a_case_leave_its_policies_something_to_move(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    geometry = geometry_of(case, tmp_path)
    made = {name: planned(case, geometry, configurations()[name]) for name in ("borrow", "all", "all_but_own")}
    assert min(made["borrow"].lent_slots, made["all_but_own"].lent_slots) > 0
    for one in (made["all"], made["all_but_own"]):
        assert one.mapped_cells == case.init_cells
        assert any("MiB of the expert cache can be given back" in note for note in one.notes)


def test_a_case_of_kernels_of_which_the_reference_computes_a_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "IN_PLACE_BYTES", staging.IN_PLACE_BYTES)  # set by `load`
    short = CASES["kernels_short"]

    def loaded(case: Case) -> Engine:
        file, geometry = open_model(case, tmp_path)
        return load(case, file, geometry, planned(case, geometry, ()), tmp_path)

    assert without_kernels(loaded(short)) == []
    with pytest.raises(RuntimeError, match=r"attention of block 1: heads of 64 .*; staged experts: chunks take none"):
        loaded(replace(short, kv_type="q4_0", stage_bytes=0))


def test_a_cpu_is_not_asked_to_interpret_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("fixed", "chosen", "kernels_short"):
        check_machine(CASES[name])
    with pytest.raises(ConfigError, match="would interpret the kernels for 27,553 tokens"):
        check_machine(CASES["kernels"])


def test_a_policy_that_moved_nothing_is_named() -> None:
    assert missing_moves(("borrow",), {"lend": 1, "return": 1}) == ["refill"]
    assert missing_moves(("borrow", "own"), {"alloc_buffers": 1}) == []
    assert missing_moves(("short_reads",), {"lend": 1}) == ["read_windows"]


def test_chosen_chunks_are_compared_by_bound_and_margin() -> None:
    expected = {"first_logits": [1.0, 2.0], "tokens": [5, 6, 7], "margins": [0.5, 1e-4, 0.5]}
    close = {"name": "24", "first_logits": [1.0, 2.0 + 1e-5], "tokens": [5, 9, 9]}
    found = compare_chosen([(close, expected)])
    assert found["differences"] == []
    assert found["tokens_compared"] == "1/3"
    assert found["largest_logit_difference"] == pytest.approx(1e-5)
    assert compare_chosen([(close | {"first_logits": [1.0, 2.0 + 3e-5]}, expected)])["differences"]
    assert compare_chosen([(close | {"first_logits": [1.0, float("nan")]}, expected)])["differences"]
    assert compare_chosen([(close | {"tokens": [4, 6, 7]}, expected)])["differences"] == ["tokens of 24"]


@pytest.mark.parametrize("text", ["refill", "refill:prepared:1", "refill:copied:0", "refill:copied:x", "lend:copied:1"])
def test_a_fault_that_cannot_be_seeded_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"no fault '{text}'; use one of refill:copied"):
        arm(text)
