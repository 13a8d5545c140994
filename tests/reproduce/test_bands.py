"""Medians within bands of context, and their bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from strata_jax.reproduce.bootstrap import BAND_TOKENS, Sample, banded_change


def arm(factor: float, count: int = 40, bands: int = 3, seed: int = 1) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            band * BAND_TOKENS + int(rng.integers(BAND_TOKENS)), factor * (100 - 20 * band) * float(rng.normal(1, 0.02))
        )
        for band in range(bands)
        for _ in range(count)
    ]


def test_a_change_is_found_within_its_interval() -> None:
    found = banded_change(arm(1.0), arm(1.25, seed=2))
    assert found is not None
    assert found.low < 0.25 < found.high
    assert found.change == pytest.approx(0.25, abs=0.02)
    assert [band.low_tokens for band in found.bands] == [0, BAND_TOKENS, 2 * BAND_TOKENS]


def test_a_shift_towards_longer_contexts_is_no_change() -> None:
    """Plain medians would mix bands: here one arm has few and the other many requests of the slow band."""
    before = arm(1.0, 60, 1) + [
        Sample(s.context_tokens, s.tok_s) for s in arm(1.0, 10, 3) if s.context_tokens >= 2 * BAND_TOKENS
    ]
    after = arm(1.0, 10, 1, seed=3) + [s for s in arm(1.0, 60, 3, seed=4) if s.context_tokens >= 2 * BAND_TOKENS]
    plain = np.median([s.tok_s for s in after]) / np.median([s.tok_s for s in before]) - 1
    found = banded_change(before, after)
    assert found is not None
    assert plain < -0.3
    assert abs(found.change) < 0.02


def test_draws_are_seeded() -> None:
    assert banded_change(arm(1.0), arm(1.1), seed=5) == banded_change(arm(1.0), arm(1.1), seed=5)
    assert banded_change(arm(1.0), arm(1.1), seed=5) != banded_change(arm(1.0), arm(1.1), seed=6)


def test_bands_need_requests_of_both_arms() -> None:
    assert banded_change(arm(1.0, 2), arm(1.0, 40)) is None
    assert banded_change([], arm(1.0)) is None
