"""Calibration: from times of a machine to a profile that predicts its other times (M01)."""

from __future__ import annotations

import random

import pytest

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.memory.strata.sizes import PackSizes, pack_sizes
from strata_jax.presets import preset_geometry
from strata_jax.sim.calibrate import MachineRates, TimedChunk, TimedRound, calibrate, prompt_ms
from strata_jax.sim.decode_cost import RoundFacts, round_cost
from strata_jax.sim.prefill_cost import ChunkFacts, chunk_cost
from strata_jax.sim.profile import Profile, load_profile

REQUEST = StrataRequest()
RATES = MachineRates(
    title="a card of nobody", os="linux", cpu="8 cores", vram_mib=24_000, ram_mib=64_000, cpu_cores=8, ram_gb_s=40,
    hbm_gb_s=800, pcie_gb_s=20, tensor_tops=100, scalar_tflops=20, cpu_core_gweights_s=5, gpu="RTX 9999",
)  # fmt: skip
PROMPT_TOKENS = 55_000


@pytest.fixture(scope="module")
def sizes() -> PackSizes:
    return pack_sizes(preset_geometry("qwen38_flash", "iq2_xs"))


def chunk(tokens: int, position: int = 0) -> ChunkFacts:
    return ChunkFacts(tokens, position, 30e9, 0.1, streamed_all=True, ring_slots=384)


def whole_prompt() -> list[ChunkFacts]:
    full, rest = divmod(PROMPT_TOKENS, 4096)
    return [chunk(4096, 4096 * i) for i in range(full)] + [chunk(rest, 4096 * full)]


def hidden_machine() -> Profile:
    """A machine 2.2 times as slow at products as the card whose profile was borrowed."""
    like = load_profile("rtx3090")
    values = {
        name: getattr(RATES, name) for name in ("pcie_gb_s", "hbm_gb_s", "ram_gb_s", "tensor_tops", "scalar_tflops")
    }
    return like.with_values(
        **values, copy_share=1.0, prompt_share=0.03, chunk_ms=40.0, launch_ms=9.0, row_ms=2.5, draft_ms=0.0,
        cpu_cores=8, cpu_core_gweights_s=5, pull_share=1.0, hbm_share=1.0, ram_share=1.0,
    )  # fmt: skip


def timed(sizes: PackSizes, noise: float) -> tuple[list[TimedChunk], list[TimedRound]]:
    truth, rng = hidden_machine(), random.Random(3)
    chunks = [
        TimedChunk(chunk(t), chunk_cost(truth, sizes, REQUEST, chunk(t)).total_ms * (1 + rng.gauss(0, noise)))
        for t in (1024, 2048, 4096, 8192)
    ]
    facts = [RoundFacts(rows, 2048, 0.9, 10.0 * rows, rows, 0.5) for rows in (1, 2, 3, 4)]
    rounds = [TimedRound(each, round_cost(truth, sizes, each).total_ms * (1 + rng.gauss(0, noise))) for each in facts]
    return chunks, rounds


def test_its_own_profile_is_within_5_percent_where_a_borrowed_one_is_far_off(sizes: PackSizes) -> None:
    """M01: 55,000 tokens; borrowed 2.2 times too fast, own within 5 %."""
    chunks, rounds = timed(sizes, noise=0.02)
    own = calibrate(RATES, chunks, rounds, sizes, REQUEST)
    measured = prompt_ms(hidden_machine(), sizes, REQUEST, whole_prompt())
    borrowed = prompt_ms(load_profile("rtx4090"), sizes, REQUEST, whole_prompt())
    assert not load_profile("rtx4090").calibrated
    assert own.calibrated
    assert measured / borrowed > 2
    assert prompt_ms(own, sizes, REQUEST, whole_prompt()) == pytest.approx(measured, rel=0.05)


def test_exact_times_give_the_numbers_back(sizes: PackSizes) -> None:
    own = calibrate(RATES, *timed(sizes, noise=0.0), sizes, REQUEST)
    truth = hidden_machine()
    for name in ("prompt_share", "chunk_ms", "launch_ms", "row_ms"):
        assert own[name] == pytest.approx(truth[name], rel=1e-3), name
        assert own.numbers[name].mark == "measured"
        assert own.numbers[name].error_pct == pytest.approx(0, abs=1e-3)
    assert own["pcie_gb_s"] == 20
    assert own.gpus == ("RTX 9999",)


def test_one_size_of_chunk_is_not_enough(sizes: PackSizes) -> None:
    chunks, rounds = timed(sizes, noise=0.0)
    with pytest.raises(ConfigError, match="prompt chunks of the same size"):
        calibrate(RATES, chunks[:1] * 3, rounds, sizes, REQUEST)
