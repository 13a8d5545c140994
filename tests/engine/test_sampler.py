"""The sampler against plain numpy, written from llama.cpp's documented chain, and the statistics of its draws."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.sampler import filtered, sample, sampling_arrays
from strata_jax.errors import ConfigError
from strata_jax.sampling import Sampling

VOCAB = 64
SETTINGS = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product((0.4, 1.0, 1.7), (0, 1, 7, 500), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.1, 1.0))
]
SAMPLE = jax.jit(sample)


def reference(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Probabilities after llama.cpp's chain (top-k, top-p, min-p, temperature), each step on the survivors of the last.

    top-p keeps the smallest set of best tokens that reaches p, always one; min-p keeps what has at least this share of
    the best one's probability.
    """
    order = list(np.argsort(-logits.astype(np.float64), kind="stable"))
    if how.top_k > 0:
        order = order[: how.top_k]
    prob = _softmax(logits[order].astype(np.float64))
    if how.top_p < 1:
        reached = np.flatnonzero(np.cumsum(prob) >= how.top_p)
        order = order[: reached[0] + 1] if len(reached) else order
    prob = _softmax(logits[order].astype(np.float64))
    order = [token for token, p in zip(order, prob, strict=True) if p >= how.min_p * prob[0]]
    kept = np.zeros(len(logits))
    kept[order] = _softmax(logits[order].astype(np.float64) / how.temperature)
    return kept


FILTERED = jax.jit(filtered)


def probabilities(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """What the sampler draws from, by token."""
    weights, tokens = FILTERED(jnp.asarray(logits[None]), sampling_arrays(how))
    found = np.zeros(len(logits))
    found[np.asarray(tokens[0])] = np.asarray(jax.nn.softmax(weights[0]), np.float64)
    return found


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_filters_keep_what_the_reference_chain_keeps_and_weigh_it_alike(scale: float) -> None:
    logits = (scale * np.random.default_rng(3).standard_normal(VOCAB)).astype(np.float32)
    kept = set()
    for how in SETTINGS:
        found, expected = probabilities(logits, how), reference(logits, how)
        assert ((found > 0) == (expected > 0)).all(), how
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=str(how))
        kept.add(int((found > 0).sum()))
    assert {1, 7, VOCAB} <= kept
    assert len(kept) > 5


def test_filters_that_are_off_keep_tokens_of_next_to_no_weight() -> None:
    """A running sum of probabilities rounds to 1 long before them."""
    logits = jnp.asarray([[0.0, -18.0, -25.0, -60.0]])
    weights, _ = FILTERED(logits, sampling_arrays(Sampling(temperature=1.0)))
    np.testing.assert_array_equal(weights, logits)


def test_temperature_comes_last() -> None:
    """A high temperature would let more tokens through top-p and min-p if it came before them."""
    logits = np.array([4.0, 2.0, 1.0, 0.0], np.float32)
    for how in (Sampling(temperature=20.0, top_p=0.8), Sampling(temperature=20.0, min_p=0.5)):
        assert (probabilities(logits, how) > 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.6, top_k=12, seed=5),
        Sampling(temperature=1.3, top_p=0.7, min_p=0.05, seed=2**32 - 1),
    ],
    ids=["temperature", "top_k", "top_p and min_p"],
)
def test_draws_follow_the_filtered_distribution(how: Sampling) -> None:
    logits = (1.2 * np.random.default_rng(8).standard_normal(VOCAB)).astype(np.float32)
    count = 20_000
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, VOCAB))
    drawn = np.bincount(np.asarray(SAMPLE(rows, jnp.arange(count), sampling_arrays(how))), minlength=VOCAB)
    expected = count * reference(logits, how)
    assert not drawn[expected == 0].any()
    common = expected >= 5
    rest = expected[~common].sum()
    cells = [((drawn - expected)[common] ** 2 / expected[common]).sum()]
    if rest >= 5:
        cells.append((drawn[~common].sum() - rest) ** 2 / rest)
    freedom = common.sum() - 1 + len(cells) - 1
    assert freedom >= 5
    # mean n and deviation sqrt(2 n): five deviations above for a seed that is fixed anyway
    assert sum(cells) < freedom + 5 * (2 * freedom) ** 0.5


def test_draws_of_neighbouring_positions_are_independent() -> None:
    count = 20_000
    rows = jnp.zeros((count, 2), jnp.float32)
    drawn = np.asarray(SAMPLE(rows, jnp.arange(count), sampling_arrays(Sampling(temperature=1.0, seed=1))))
    pairs = np.bincount(2 * drawn[:-1] + drawn[1:], minlength=4) / (count - 1)
    np.testing.assert_allclose(pairs, 0.25, atol=0.02)


def test_a_token_depends_on_seed_and_position_and_not_on_the_window() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((9, VOCAB)), jnp.float32)
    how = sampling_arrays(Sampling(temperature=1.0, top_k=30, seed=7))
    positions = jnp.arange(100, 109)
    whole = np.asarray(SAMPLE(logits, positions, how))
    for first, last in ((0, 1), (1, 4), (4, 9)):
        part = np.asarray(SAMPLE(logits[first:last], positions[first:last], how))
        np.testing.assert_array_equal(part, whole[first:last])
    assert (np.asarray(SAMPLE(logits, positions + 1, how)) != whole).any()
    other = sampling_arrays(Sampling(temperature=1.0, top_k=30, seed=8))
    assert (np.asarray(SAMPLE(logits, positions, other)) != whole).any()


def test_temperature_0_takes_the_best_token_whatever_the_filters_and_the_first_of_equals() -> None:
    logits = np.random.default_rng(4).standard_normal((5, VOCAB)).astype(np.float32)
    logits[2, [9, 40]] = 5.0
    for seed, position in ((0, 0), (3, 77)):
        how = sampling_arrays(Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2, seed=seed))
        found = np.asarray(SAMPLE(jnp.asarray(logits), position + jnp.arange(5), how))
        np.testing.assert_array_equal(found, logits.argmax(-1))
        assert found[2] == 9


def test_a_low_temperature_draws_the_best_token() -> None:
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((50, VOCAB)), jnp.float32)
    how = sampling_arrays(Sampling(temperature=1e-3))
    found = np.asarray(SAMPLE(logits, jnp.arange(50), how))
    assert (found == np.asarray(logits).argmax(-1)).mean() > 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"sampling: temperature=-0\.1 must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be at least 0"),
        ({"top_k": -1}, r"top_k=-1 must be at least 0 \(0 = off\)"),
        ({"top_p": 0.0}, r"top_p=0\.0 must be above 0 and at most 1"),
        ({"top_p": 1.01}, r"top_p=1\.01 must be above 0"),
        ({"min_p": 2.0}, r"min_p=2\.0 must be from 0 to 1"),
        ({"seed": -1}, "seed=-1 must be from 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be from 0"),
        ({"top_p": 0.0, "seed": -1}, r"top_p=0\.0 must be .*; seed=-1 must be"),
    ],
)
def test_settings_out_of_range_are_refused_together(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]


def _softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max())
    return weight / weight.sum()
