"""Routing without a model: traces with the odds, the drift and the neighbourhoods of a given skew.

Every expert of a layer has a logit, its bias plus normal noise, and a token asks for the largest; biases are those that
give a synthetic model its odds (`routing.py`). From token to token the noise decays and is renewed, so that neighbours
ask for the same experts more often than the odds say and every token still has these odds. A conversation stays with
one topic.
"""

from __future__ import annotations

import numpy as np

from strata_jax.sim.trace import RoutingTrace
from strata_jax.synthetic.routing import LOGIT_NOISE, RoutingSkew, look_up_odds, places, router_biases

# correlation of a logit's noise with that of the token before; with it 2, 3 and 4 rows ask for 1.76, 2.46 and 3.12
# times the missed experts of one where the hottest 10 of 512 are resident; published are 1.75, 2.4 and 3.05
PERSISTENCE = 0.5


def draw_trace(
    skew: RoutingSkew,
    *,
    num_layers: int,
    num_experts: int,
    num_used: int,
    num_tokens: int,
    conversation_tokens: int,
    seed: int,
    persistence: float = PERSISTENCE,
) -> RoutingTrace:
    """Return a trace of conversations one after the other, each on a topic of its own choice.

    Args:
        conversation_tokens: of each; the last one may be shorter.
        persistence: 0: neighbouring tokens have nothing in common beyond the odds; below 1.

    Raises:
        ValueError: `persistence` or a count is out of range.
    """
    if not 0 <= persistence < 1:
        raise ValueError(f"persistence={persistence:g}: must be from 0 to below 1")
    if min(num_layers, num_tokens, conversation_tokens) < 1:
        raise ValueError(f"{num_layers} layers, {num_tokens} tokens, {conversation_tokens} a conversation: at least 1")
    biases = router_biases(look_up_odds(skew, num_experts, num_used), LOGIT_NOISE, num_used).astype(np.float32)
    rng = np.random.default_rng([seed, num_tokens])
    noise = rng.standard_normal((num_layers, num_experts), np.float32)
    fresh = np.float32(np.sqrt(1 - persistence**2))
    experts = np.empty((num_tokens, num_layers, num_used), np.int32)
    logits = np.empty((num_layers, num_experts), np.float32)
    for token in range(num_tokens):
        if token % conversation_tokens == 0:
            topic = int(rng.integers(skew.num_topics))
            here = np.stack([biases[places(skew, topic, layer, num_experts, 0)] for layer in range(num_layers)])
        noise = np.float32(persistence) * noise + fresh * rng.standard_normal(noise.shape, np.float32)
        logits = here + np.float32(LOGIT_NOISE) * noise
        experts[token] = np.sort(np.argpartition(-logits, num_used - 1, axis=1)[:, :num_used], axis=1)
    return RoutingTrace(experts)
