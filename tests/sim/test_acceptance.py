"""Drafts: closed forms against drawing, and against the published shares and tokens a round."""

from __future__ import annotations

import random
import statistics

import pytest

from strata_jax.errors import ConfigError
from strata_jax.sim.acceptance import NO_DRAFTS, DraftModel, accepted_share, fit_drafts

SHARES = [
    *((4, 0.5, share) for share in (0.70, 0.68, 0.758, 0.745, 0.769, 0.698, 0.698, 0.703, 0.677, 0.666)),
    *((4, 0.5, share) for share in (0.547, 0.622, 0.582)),
    (2, 0.5, 0.805), (2, 0.5, 0.7325), (8, 0.5, 0.403), (4, 0.7, 0.87),
]  # fmt: skip
TOKENS = [(4, 0.5, t) for t in (2.455, 2.48, 2.43, 2.67, 2.76, 2.45, 2.84, 2.69, 2.77, 2.55, 2.81)]


def test_the_parameter_is_what_a_fit_on_the_published_figures_gives() -> None:
    assert fit_drafts(SHARES, []).alpha == pytest.approx(DraftModel().alpha, abs=2e-3)
    with pytest.raises(ConfigError, match="no figure to fit on"):
        fit_drafts([], [])


def test_the_stated_errors_hold() -> None:
    model = DraftModel()
    shares = [abs(accepted_share(model.rounds(rows, m)) / share - 1) for rows, m, share in SHARES]
    tokens = [abs(model.rounds(rows, m).tokens / value - 1) for rows, m, value in TOKENS]
    assert (statistics.median(shares), max(shares)) < (0.09, 0.28)
    assert statistics.median(tokens) < 0.06
    assert max(tokens) < 0.10


@pytest.mark.parametrize(("window", "min_p"), [(4, 0.5), (8, 0.5), (4, 0.7), (2, 0.0), (6, 0.3)])
def test_closed_forms_agree_with_drawing_drafts(window: int, min_p: float) -> None:
    model, rng, trials = DraftModel(), random.Random(11), 60_000
    rows = tokens = 0
    for _ in range(trials):
        drafts: list[float] = []
        while len(drafts) < window - 1:
            confidence = rng.random() ** (1 / model.alpha)
            if confidence < min_p:
                break
            drafts.append(confidence)
        accepted = 0
        while accepted < len(drafts) and rng.random() < drafts[accepted]:
            accepted += 1
        rows += len(drafts) + 1
        tokens += accepted + 1
    mix = model.rounds(window, min_p)
    assert mix.rows == pytest.approx(rows / trials, rel=0.01)
    assert mix.tokens == pytest.approx(tokens / trials, rel=0.01)
    assert sum(w.probability for w in mix.windows) == pytest.approx(1)
    assert mix.max_rows == window


def test_a_higher_threshold_drafts_less_and_hits_more() -> None:
    loose, strict = DraftModel().rounds(4, 0.3), DraftModel().rounds(4, 0.8)
    assert loose.rows > strict.rows
    assert accepted_share(loose) < accepted_share(strict)
    never = DraftModel().rounds(4, 1.0)
    assert (never.rows, never.tokens, accepted_share(never)) == (1.0, 1.0, 0.0)
    assert (NO_DRAFTS.rows, NO_DRAFTS.tokens) == (1.0, 1.0)
