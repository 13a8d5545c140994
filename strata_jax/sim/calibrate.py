"""A hardware profile from measurements of one machine: what was timed becomes numbers, by the simulator's own formulas.

The pure half, without JAX: `pipelines/calibrate.py` takes the times. Prompt chunks give the share of the product rate
that prompts reach, decode rounds the launches; all found by least squares over `chunk_cost` and `round_cost`, so that
the simulator says for this machine what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.memory.strata.sizes import PackSizes
from strata_jax.sim.decode_cost import RoundFacts, round_cost
from strata_jax.sim.prefill_cost import ChunkFacts, chunk_cost
from strata_jax.sim.profile import Profile, common_numbers
from strata_jax.sim.profile_file import UNITS, Number

MIN_CHUNKS = 2
MIN_SHARE, MAX_SHARE = 1e-6, 4.0
MAX_MS = 1e5
SOURCE = "pipeline=calibrate on this machine"

# Shares of rates that are themselves measured here, so that nothing is to be taken off them.
OWN_RATES = {"copy_share": 1.0, "pull_share": 1.0, "hbm_share": 1.0, "ram_share": 1.0, "cpu_avx512_ratio": 1.0}


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What a machine is and how fast its parts are; rates as measured.

    Attributes:
        tensor_tops: products in the type that prompts use. scalar_tflops: products in float32.
        cpu_core_gweights_s: packed expert weights that one core decodes and multiplies.
        vram_mib: device memory, or host memory on a machine without a device.
    """

    title: str
    os: str
    cpu: str
    vram_mib: float
    ram_mib: float
    cpu_cores: int
    ram_gb_s: float
    hbm_gb_s: float
    pcie_gb_s: float
    tensor_tops: float
    scalar_tflops: float
    cpu_core_gweights_s: float
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """A prompt chunk and its time in ms."""

    facts: ChunkFacts
    ms: float


@dataclass(frozen=True, slots=True)
class TimedRound:
    """A decode round and its time in ms."""

    facts: RoundFacts
    ms: float


def calibrate(
    rates: MachineRates,
    chunks: Sequence[TimedChunk],
    rounds: Sequence[TimedRound],
    sizes: PackSizes,
    request: StrataRequest,
    name: str = "local",
) -> Profile:
    """Return the profile of a machine.

    Raises ConfigError with fewer than two chunks of different sizes, from which nothing can be told apart.
    """
    if len({chunk.facts.tokens for chunk in chunks}) < MIN_CHUNKS:
        raise ConfigError(
            f"calibrate: {len(chunks)} prompt chunks of the same size were timed; give a workload with a longer prompt."
        )
    numbers = {**common_numbers(), **_measured(rates)}
    profile = Profile(
        name=name,
        title=rates.title,
        gpus=(rates.gpu,) if rates.gpu else (),
        os=rates.os,
        cpu=rates.cpu,
        isa="measured",
        calibrated=True,
        notes=(),
        numbers={key: numbers[key] for key in UNITS},
        fit_name=name,
    )
    # a segment costs its chunks and a round its window here; drafts are part of the round
    profile = profile.with_values(SOURCE, "measured", segment_ms=0.0, launch_ms=0.0, row_ms=0.0, draft_ms=0.0)

    def chunk_ms(candidate: Profile) -> list[float]:
        return [chunk_cost(candidate, sizes, request, chunk.facts).total_ms for chunk in chunks]

    def round_ms(candidate: Profile) -> list[float]:
        return [round_cost(candidate, sizes, each.facts).total_ms for each in rounds]

    spans = {"prompt_share": (MIN_SHARE, MAX_SHARE), "chunk_ms": (0.0, MAX_MS)}
    profile = _solved(profile, spans, chunk_ms, [chunk.ms for chunk in chunks])
    if rounds:
        spans = {"launch_ms": (0.0, MAX_MS), "row_ms": (0.0, MAX_MS)}
        profile = _solved(profile, spans, round_ms, [each.ms for each in rounds])
    return profile


def prompt_ms(profile: Profile, sizes: PackSizes, request: StrataRequest, chunks: Sequence[ChunkFacts]) -> float:
    """Return the time of a prompt read in the given chunks."""
    return sum(chunk_cost(profile, sizes, request, facts).total_ms for facts in chunks)


def _measured(rates: MachineRates) -> dict[str, Number]:
    named = {key: float(getattr(rates, key)) for key in UNITS if hasattr(rates, key)}
    own = {**named, **OWN_RATES, "vram_taken_mib": 0.0, "vram_late_mib": 0.0}
    return {key: Number(value, UNITS[key], "measured", SOURCE) for key, value in own.items()}


def _solved(
    profile: Profile,
    spans: Mapping[str, tuple[float, float]],
    ours: Callable[[Profile], Sequence[float]],
    measured: Sequence[float],
) -> Profile:
    """Return the profile with the named numbers at the least squares of relative errors."""
    names = list(spans)
    low, high = (np.array([span[i] for span in spans.values()]) for i in (0, 1))
    theirs = np.array(measured, dtype=np.float64)
    scale = np.array([max(1e-6, profile[name]) for name in names])

    def errors(x: np.ndarray) -> np.ndarray:
        values = dict(zip(names, (x * scale).tolist(), strict=True))
        return np.array(ours(profile.with_values(SOURCE, "measured", **values))) / theirs - 1

    best = None
    for factor in (0.01, 0.1, 1.0, 10.0):  # the share of a rate that a small model reaches may be tiny
        start = np.clip(np.where(scale > 1e-6, factor, median(measured) / 2 / scale), low / scale, high / scale)
        found = least_squares(errors, start, bounds=(low / scale, high / scale), x_scale=np.maximum(start, 1e-9))
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    error_pct = 100 * float(np.median(np.abs(best.fun)))
    numbers = {
        name: Number(round(float(value), 9), UNITS[name], "measured", SOURCE, error_pct=error_pct)
        for name, value in zip(names, best.x * scale, strict=True)
    }
    return profile.with_numbers(numbers, calibrated=True)
