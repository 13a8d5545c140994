"""The policy matrix in small: its script's functions on prompts up to 2,048 tokens, in this process."""

from __future__ import annotations

from itertools import combinations

import pytest

from bench.policy_matrix import compare_chosen, compare_fixed
from bench.policy_matrix_cases import POLICIES, Ask, Case, configurations, missing_moves, write_model
from bench.policy_matrix_faults import arm
from bench.policy_matrix_runs import Resident, Run, begin
from strata_jax.errors import ConfigError
from strata_jax.memory.ledger import MIB

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
    path = write_model(CASE, tmp_path_factory.mktemp("matrix") / "small.gguf")
    return begin(CASE, path, [name for name in configurations()["all"] if name != "vram_elastic"])


def test_all_policies_at_once_change_no_bit_and_a_seeded_fault_does(run: Run) -> None:
    resident = Resident.load(CASE, run.runtime.engine.file.paths[0])
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
