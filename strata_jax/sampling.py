"""How output tokens are chosen: the settings, checked. The arithmetic is in `engine/sampler.py`."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Filters apply in the order top-k, top-p, min-p, then temperature.

    Attributes:
        temperature: 0 = greedy.
        top_k: keep this many best tokens, 0 = all.
        top_p: keep the smallest set of best tokens with at least this probability, 1 = all.
        min_p: drop tokens less probable than this share of the best one, 0 = none.
        seed: 0 .. 2^32 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0 (0 = off)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "seed": (0 <= self.seed < 2**32, "from 0 to 4294967295"),
        }
        wrong = [f"{key}={getattr(self, key)} must be {rule}" for key, (fits, rule) in limits.items() if not fits]
        if wrong:
            raise ConfigError("sampling: " + "; ".join(wrong))
