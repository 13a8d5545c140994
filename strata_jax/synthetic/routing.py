"""Routing skew of a synthetic model: how often each expert is asked for, and the router biases that bring it about.

The router has no bias of its own (logits are its rows times the sublayer's input), so a constant direction of the input
carries one; `full.py` makes that direction. Here: the odds that an expert is among the chosen of a token, as a Zipf law
or as the curve fitted on published hit rates, and the biases that give these odds when every logit also has normal
noise. Expert numbers are ranks: expert 0 of every block is its hottest, as slots are filled at the start.

Conversations drift by topics: a token belongs to one, and in each topic a share of every block's experts (`drift`) has
changed places. All topics have the same odds, on other experts, so memory that follows a conversation keeps its hit
rate h and memory that does not falls to (1 - drift) h + drift f, with f the share of experts that are resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from strata_jax.errors import ConfigError
from strata_jax.sim.popularity import PopularityCurve

MAX_ZIPF = 4.0
NUM_TOPICS = 8  # of a model that drifts
LOGIT_NOISE = 1.5  # standard deviation of a router's logits from one token to another
ODDS_CAP = 0.98  # of one expert: no bias gives certainty
_ODDS_FLOOR = 1e-12
_GRID = 240
_TOLERANCE = 1e-3  # of the odds, in standard deviations of the noise
_MAX_STEPS = 60


@dataclass(frozen=True, slots=True)
class RoutingSkew:
    """How a synthetic model's look-ups are spread.

    Attributes:
        zipf: exponent of the odds by rank, 0 for even ones; None: the curve fitted on published hit rates.
        drift: share of the experts of a block that have other places in each topic.
    """

    zipf: float | None = None
    drift: float = 0.0

    def __post_init__(self) -> None:
        if self.zipf is not None and not 0 <= self.zipf <= MAX_ZIPF:
            raise ConfigError(f"model.routing.zipf={self.zipf:g}: must be from 0 to {MAX_ZIPF:g}, or auto")
        if not 0 <= self.drift <= 1:
            raise ConfigError(f"model.routing.drift={self.drift:g}: must be from 0 to 1")

    @property
    def num_topics(self) -> int:
        return NUM_TOPICS if self.drift else 1

    def text(self) -> str:
        """Return the skew in words, for results."""
        law = "the curve of published hit rates" if self.zipf is None else f"Zipf {self.zipf:g}"
        return f"{law}, drift {self.drift:g}"


def look_up_odds(skew: RoutingSkew, num_experts: int, num_used: int) -> NDArray[np.float64]:
    """Return f64[X], the odds that each expert is among the `num_used` of a token, hottest first; their sum is that.

    An expert is chosen at most once a token: where a share asks for more, the expert gets `ODDS_CAP` and the others
    the rest.
    """
    if num_used > ODDS_CAP * num_experts:
        raise ConfigError(
            f"{num_used} of {num_experts} experts are used by every token: there is no routing to skew. Use at most"
            f" {int(ODDS_CAP * num_experts)}, or no model.routing"
        )
    if skew.zipf is None:
        shares = PopularityCurve().look_up_shares(num_experts)
    else:
        shares = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew.zipf
    shares = np.maximum(shares / shares.sum(), _ODDS_FLOOR)
    capped = 0
    while True:  # the hottest `capped` experts are at the cap
        free = shares[capped:]
        rest = free * ((num_used - capped * ODDS_CAP) / free.sum())
        if rest[0] <= ODDS_CAP:
            return np.concatenate([np.full(capped, ODDS_CAP), rest])
        capped += 1


def hit_rate(odds: NDArray[np.float64], num_slots: int, num_blocks: int) -> float:
    """Return the share of look-ups that hit when `num_slots` slots hold the hottest experts of `num_blocks` blocks.

    Blocks have the same odds; slots go round the blocks, as the planner fills them.
    """
    rounds, rest = divmod(num_slots, num_blocks)
    below = np.concatenate([[0.0], np.cumsum(odds)]) / odds.sum()
    last = len(odds)
    return float((below[min(rounds, last)] * (num_blocks - rest) + below[min(rounds + 1, last)] * rest) / num_blocks)


def slots_for(odds: NDArray[np.float64], wanted: float, num_blocks: int) -> int:
    """Return the fewest slots that reach a hit rate: the inverse of `hit_rate`.

    Raises ConfigError for a rate outside 0 to 1.
    """
    if not 0 <= wanted <= 1:
        raise ConfigError(f"hit rate {wanted:g}: must be from 0 to 1")
    low, high = 0, len(odds) * num_blocks
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if hit_rate(odds, middle, num_blocks) >= wanted - 1e-12 else (middle + 1, high)
    return low


def chosen_odds(biases: NDArray[np.float64], noise: float, num_used: int) -> NDArray[np.float64]:
    """Return f64[X], the odds that each expert is among the `num_used` largest of biases + independent normal noise.

    An expert at logit t is chosen if fewer than `num_used` others lie above t; how many do is a sum of independent
    events, counted exactly, and t is integrated over its density.
    """
    num_experts = len(biases)
    t = np.linspace(np.sort(biases)[-num_used] - 6 * noise, biases.max() + 6 * noise, _GRID)
    above = ndtr((biases[:, None] - t) / noise)  # [X, t]

    def counts(order: NDArray[np.float64]) -> NDArray[np.float64]:
        """Odds that exactly c of the experts before each one lie above t: [X, num_used, t]."""
        made = np.zeros((num_experts, num_used, _GRID))
        made[0, 0] = 1
        for i in range(1, num_experts):
            p = order[i - 1]
            made[i] = made[i - 1] * (1 - p)
            made[i, 1:] += made[i - 1, :-1] * p
        return made

    before, after = counts(above), counts(above[::-1])[::-1]
    few = np.einsum("xct,xct->xt", before, np.cumsum(after, axis=1)[:, ::-1])
    edges = ndtr((np.concatenate([[-np.inf], (t[1:] + t[:-1]) / 2, [np.inf]]) - biases[:, None]) / noise)
    return np.asarray((few * np.diff(edges, axis=1)).sum(axis=1))


def router_biases(odds: NDArray[np.float64], noise: float, num_used: int) -> NDArray[np.float64]:
    """Return f64[X], the biases under which `chosen_odds` gives these odds; their mean is 0."""
    return _biases(tuple(odds.tolist()), num_used) * noise


@lru_cache(maxsize=8)
def _biases(odds: tuple[float, ...], num_used: int) -> NDArray[np.float64]:
    """The biases in standard deviations of the noise, by fixed-point steps."""
    wanted = ndtri(np.asarray(odds))
    biases = wanted.copy()
    for _ in range(_MAX_STEPS):
        found = ndtri(np.clip(chosen_odds(biases, 1.0, num_used), 1e-300, 1 - 1e-15))
        step = wanted - found
        biases += step
        if np.abs(step).max() < _TOLERANCE:
            return np.asarray(biases - biases.mean())
    raise ConfigError(f"no router biases give these odds within {_MAX_STEPS} steps; use a smaller model.routing.zipf")


def places(skew: RoutingSkew, topic: int, block: int, num_experts: int, seed: int) -> NDArray[np.int64]:
    """Return i64[X], whose odds each expert of a block has in a topic. In topic 0 all have their own."""
    order = np.arange(num_experts)
    if topic:
        rng = np.random.default_rng([seed, block, topic])
        moved = rng.permutation(num_experts)[: round(skew.drift * num_experts)]
        order[moved] = order[rng.permutation(moved)]
    return order
