"""Drafts: how many rows a decode round verifies and how many tokens it gives, in expectation.

A draft has a confidence p, spread over texts with density alpha p^(alpha - 1), and is accepted with probability p. The
drafter stops at the first draft below `min_p` (planning notes 4.2). Both chances follow from the one parameter:
P(p >= m) = 1 - m^alpha, and E[p | p >= m] = alpha / (alpha + 1) (1 - m^(alpha + 1)) / (1 - m^alpha).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata_jax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Window:
    """A kind of round: rows verified, how probable it is, tokens it gives on average."""

    rows: int
    probability: float
    tokens: float


@dataclass(frozen=True, slots=True)
class RoundMix:
    """The rounds of steady decoding and their averages."""

    windows: tuple[Window, ...]

    @property
    def tokens(self) -> float:
        """Tokens a round."""
        return sum(w.probability * w.tokens for w in self.windows)

    @property
    def rows(self) -> float:
        """Rows verified a round."""
        return sum(w.probability * w.rows for w in self.windows)

    @property
    def max_rows(self) -> int:
        return max(w.rows for w in self.windows)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Confidence of drafts.

    Fitted on 17 published shares of offered drafts that were accepted (windows of 2, 4 and 8 rows, `min_p` 0.5 and
    0.7; rows h3090-*.hits, h5070-ada-*, hepyc-*.plan), no speeds: median error 8.2 % of a share (largest 27 %, windows
    of 8 rows). It predicts 11 figures of tokens a round that follow from published round times and rates (rows
    grow-sp-*, grow-sp16-*, grow-t-*) within 5.9 % in the median (largest 9 %). Texts differ by more than that, and the
    model has no prompt look-up drafts of its own: what they add is in the shares it was fitted on.

    Attributes:
        accepted: chance that an offered draft is accepted, where a text's own is known; None: as the confidences say.
    """

    alpha: float = 3.1544
    accepted: float | None = None

    def chances(self, min_p: float) -> tuple[float, float]:
        """Return (a draft reaches `min_p`, a draft that did is accepted)."""
        below = min_p**self.alpha
        if below >= 1:
            return 0.0, 1.0
        accepted = self.alpha / (self.alpha + 1) * (1 - below * min_p) / (1 - below)
        return 1 - below, accepted if self.accepted is None else self.accepted

    def rounds(self, spec_window: int, min_p: float) -> RoundMix:
        """Return the rounds of windows of up to `spec_window` rows: the last accepted token and its drafts."""
        offered, accepted = self.chances(min_p)
        windows = []
        for rows in range(1, spec_window + 1):
            stops = 1 - offered if rows < spec_window else 1.0
            tokens = sum(accepted**depth for depth in range(rows))
            windows.append(Window(rows, offered ** (rows - 1) * stops, tokens))
        return RoundMix(tuple(w for w in windows if w.probability > 0))


NO_DRAFTS = RoundMix((Window(1, 1.0, 1.0),))


def accepted_share(mix: RoundMix) -> float:
    """Return accepted drafts over offered ones; 0 without drafts."""
    offered = mix.rows - 1
    return (mix.tokens - 1) / offered if offered > 0 else 0.0


def fit_drafts(
    shares: Sequence[tuple[int, float, float]], tokens: Sequence[tuple[int, float, float]], share_weight: float = 3.0
) -> DraftModel:
    """Return the model nearest to published figures, by least squares.

    shares: (window rows, min_p, accepted share of offered drafts); tokens: (window rows, min_p, tokens a round).
    share_weight: weight of an error of a share against one of tokens a round, whose spread is about three times as
        wide. Raises ConfigError without any figure.
    """
    from scipy.optimize import least_squares

    if not shares and not tokens:
        raise ConfigError("drafts: there is no figure to fit on; give accepted shares or tokens a round.")

    def errors(p: np.ndarray) -> list[float]:
        model = DraftModel(float(p[0]))
        return [share_weight * (accepted_share(model.rounds(rows, m)) - value) for rows, m, value in shares] + [
            model.rounds(rows, m).tokens - value for rows, m, value in tokens
        ]

    return DraftModel(float(least_squares(errors, [DraftModel().alpha], bounds=(0.05, 200.0)).x[0]))


def drafts_of_text(share: float, spec_window: int, min_p: float) -> DraftModel:
    """Return the mean text's drafts, accepted as often as a text's own `share` of accepted over offered drafts says.

    How many drafts are offered stays the mean text's; the chance of each is found by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if accepted_share(DraftModel(accepted=middle).rounds(spec_window, min_p)) < share:
            low = middle
        else:
            high = middle
    return DraftModel(accepted=(low + high) / 2)
