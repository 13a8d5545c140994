"""Routing skew: the odds asked for, the biases that give them, and what slots then hit."""

from __future__ import annotations

import numpy as np
import pytest

from strata_jax.errors import ConfigError
from strata_jax.synthetic.routing import (
    ODDS_CAP,
    RoutingSkew,
    chosen_odds,
    hit_rate,
    look_up_odds,
    places,
    router_biases,
    slots_for,
)

LAYERS, EXPERTS, USED = 48, 512, 10


def odds_of(zipf: float | None, num_experts: int = EXPERTS, num_used: int = USED) -> np.ndarray:
    return look_up_odds(RoutingSkew(zipf), num_experts, num_used)


def test_the_curve_gives_the_published_hit_rates() -> None:
    odds = odds_of(None)
    for slots, published in ((508, 0.21), (749, 0.254), (2870, 0.593), (11_055, 0.968), (12_693, 0.97)):
        assert hit_rate(odds, slots, LAYERS) == pytest.approx(published, abs=0.016)


def test_no_one_exponent_gives_both_named_hit_rates() -> None:
    for zipf in np.arange(0, 4.01, 0.05):
        odds = odds_of(float(zipf))
        cold, hot = hit_rate(odds, 508, LAYERS), hit_rate(odds, 12_693, LAYERS)
        assert abs(cold - 0.21) > 0.08 or abs(hot - 0.97) > 0.08
    assert hit_rate(odds_of(0.69), 508, LAYERS) == pytest.approx(0.21, abs=0.002)
    assert hit_rate(odds_of(0.69), 12_693, LAYERS) == pytest.approx(0.79, abs=0.002)
    assert hit_rate(odds_of(1.439), 12_693, LAYERS) == pytest.approx(0.97, abs=0.002)
    assert hit_rate(odds_of(1.439), 508, LAYERS) == pytest.approx(0.61, abs=0.002)


@pytest.mark.parametrize(
    ("zipf", "num_experts", "num_used"),
    [(None, 512, 10), (0.7, 512, 10), (1.4, 512, 10), (0.0, 64, 4), (None, 64, 4), (1.0, 16, 4), (None, 16, 2)],
)
def test_biases_give_the_odds_when_tokens_are_drawn(zipf: float | None, num_experts: int, num_used: int) -> None:
    odds = odds_of(zipf, num_experts, num_used)
    assert odds.sum() == pytest.approx(num_used)
    assert 0 < odds.min() <= odds.max() <= ODDS_CAP
    assert (np.diff(odds) <= 1e-12).all()
    biases = router_biases(odds, 1.5, num_used)
    np.testing.assert_allclose(chosen_odds(biases, 1.5, num_used), odds, atol=2e-3)
    rng, tokens = np.random.default_rng(7), 4000
    logits = biases + 1.5 * rng.standard_normal((tokens, num_experts))
    chosen = np.argpartition(-logits, num_used - 1, axis=1)[:, :num_used]
    drawn = np.bincount(chosen.ravel(), minlength=num_experts) / tokens
    spread = np.sqrt(odds * (1 - odds) / tokens)
    assert (np.abs(drawn - odds) < 5 * spread + 2e-3).all()
    hot = num_experts // 4
    assert drawn[:hot].sum() / num_used == pytest.approx(odds[:hot].sum() / num_used, abs=0.01)


def test_slots_for_is_the_inverse_of_the_hit_rate() -> None:
    odds = odds_of(None)
    for wanted in (0.0, 0.2, 0.5, 0.8, 0.97):
        slots = slots_for(odds, wanted, 49)
        assert hit_rate(odds, slots, 49) >= wanted - 1e-9
        assert slots == 0 or hit_rate(odds, slots - 1, 49) < wanted
    with pytest.raises(ConfigError, match=r"hit rate 1.2: must be from 0 to 1"):
        slots_for(odds, 1.2, 49)


def test_drift_moves_its_share_of_the_experts_and_only_that() -> None:
    skew = RoutingSkew(drift=0.5)
    np.testing.assert_array_equal(places(skew, 0, 3, EXPERTS, 0), np.arange(EXPERTS))
    orders = [places(skew, topic, block, EXPERTS, 0) for topic in range(1, 8) for block in range(4)]
    for order in orders:
        assert sorted(order) == list(range(EXPERTS))
        assert 0.48 < np.mean(order != np.arange(EXPERTS)) <= 0.5
    assert len({tuple(order) for order in orders}) == len(orders)
    # a memory that holds the usual favourites hits (1 - drift) h + drift f of another topic's look-ups
    odds, held = odds_of(None), EXPERTS // 4
    found = np.mean([odds[order][:held].sum() / USED for order in orders])
    assert found == pytest.approx(0.5 * odds[:held].sum() / USED + 0.5 * 0.25, abs=0.04)
    assert odds[np.sort(orders[0])].sum() == pytest.approx(USED)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.routing.zipf=-1: must be from 0 to 4, or auto"):
        RoutingSkew(-1.0)
    with pytest.raises(ConfigError, match=r"model.routing.drift=1.5: must be from 0 to 1"):
        RoutingSkew(drift=1.5)
    with pytest.raises(ConfigError, match="4 of 4 experts are used by every token"):
        odds_of(None, 4, 4)
