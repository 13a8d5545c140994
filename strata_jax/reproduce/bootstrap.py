"""How an agent loop changes between two arms: medians inside bands of context, with bootstrap intervals.

As the source does it: a request belongs to the band of its prompt's length; prompt rates count for reads of at least
5 s, decode rates for answers of at least 32 tokens; the change is that of the medians within each band, averaged over
the bands by their requests; requests are drawn anew within their band and arm. The draws are seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BAND_TOKENS = 16_384
MIN_PROMPT_MS = 5_000.0
MIN_OUTPUT_TOKENS = 32
MIN_IN_BAND = 3  # requests of each arm that a band needs to have a median worth comparing


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: the context it ended with and a rate."""

    context_tokens: int
    tok_s: float


@dataclass(frozen=True, slots=True)
class Band:
    """Medians of the two arms within one band of context, in tok/s; `change` is after over before minus one."""

    low_tokens: int
    num_before: int
    num_after: int
    before_tok_s: float
    after_tok_s: float
    change: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class BandedChange:
    """The change over all bands and its 95 % interval, and the bands."""

    change: float
    low: float
    high: float
    bands: tuple[Band, ...]


def banded_change(before: Sequence[Sample], after: Sequence[Sample], *, draws: int = 2000, seed: int = 0,
                  band_tokens: int = BAND_TOKENS) -> BandedChange | None:  # fmt: skip
    """Return the change of the medians within bands, or None if no band has enough requests of both arms."""
    rng = np.random.default_rng(seed)
    bands: list[Band] = []
    drawn: list[NDArray[np.float64]] = []
    weights: list[int] = []
    grouped_before, grouped_after = _by_band(before, band_tokens), _by_band(after, band_tokens)
    for index in sorted(set(grouped_before) & set(grouped_after)):
        one, other = grouped_before[index], grouped_after[index]
        if min(len(one), len(other)) < MIN_IN_BAND:
            continue
        ratios = _medians(one, draws, rng)
        ratios = _medians(other, draws, rng) / ratios - 1.0
        first, second = float(np.median(one)), float(np.median(other))
        low, high = np.percentile(ratios, [2.5, 97.5])
        change = second / first - 1.0
        bands.append(Band(index * band_tokens, len(one), len(other), first, second, change, float(low), float(high)))
        drawn.append(ratios)
        weights.append(len(one) + len(other))
    if not bands:
        return None
    share = np.array(weights) / sum(weights)
    change = float(share @ np.array([band.change for band in bands]))
    low, high = np.percentile(share @ np.stack(drawn), [2.5, 97.5])
    return BandedChange(change, float(low), float(high), tuple(bands))


def _by_band(samples: Sequence[Sample], band_tokens: int) -> dict[int, NDArray[np.float64]]:
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.context_tokens // band_tokens, []).append(sample.tok_s)
    return {index: np.array(rates, dtype=np.float64) for index, rates in groups.items()}


def _medians(rates: NDArray[np.float64], draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the medians of `draws` samples with replacement."""
    picked = rng.integers(0, len(rates), size=(draws, len(rates)))
    return np.median(rates[picked], axis=1)
