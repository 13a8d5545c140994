"""How many experts have a slot when they are asked for, by the rule that decides who keeps one?

Held fixed: the experts that every token asks for, a trace; at the start the slots hold the hottest of a profile,
counted on other conversations of the same kind; every layer has as many slots as the planner gives a block of
`synthetic_full` under a card's memory. Varied: the rule (static; adaptive: swaps between rounds, with its default
settings; lru and lfu_decay: inside the round; bound: Belady's choice, which knows the future), the card, the routing:
drawn with a Zipf exponent or the curve of published hit rates, and drift between conversations; recorded by the engine
on a small synthetic model; or a file. Hits are shares of look-ups. "Link" is what decides the time of a round: experts
that cross the link for each layer and window, read for it or copied between rounds.

    python bench/replacement.py [--quant iq2_xs] [--rows 1 4] [--trace FILE] [--save bench/results/replacement.json]

Half of a file's tokens make the profile, the other half is replayed. Nothing needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from strata_jax.policies.policy import AdaptSettings
from strata_jax.policies.replacement import first_values, ranks_in_layer
from strata_jax.policies.replay import (
    Replay,
    hottest,
    replay_adaptive,
    replay_farthest,
    replay_replacing,
    replay_static,
    window_uses,
)
from strata_jax.presets import model_shape, preset_geometry
from strata_jax.sim.trace import read_routing_trace
from strata_jax.synthetic.routing import RoutingSkew
from strata_jax.synthetic.routing_trace import draw_trace

CARDS = {8: 8_151, 12: 12_282, 16: 16_303, 24: 24_564, 32: 32_607}
RESERVE_MIB, CONTEXT_CELLS, CHUNK_TOKENS = 700, 32_768, 2_048
SKEWS = (RoutingSkew(), RoutingSkew(drift=0.3), RoutingSkew(drift=0.7), RoutingSkew(1.0), RoutingSkew(1.0, 0.5))
DRAWN = {"num_layers": 4, "num_experts": 512, "num_used": 10}
CONVERSATION_TOKENS, TOKENS, PROFILE_TOKENS = 500, 4_000, 6_400
RECORDED = {"num_layers": 4, "num_experts": 512}
RECORDED_SKEW, RECORDED_TOKENS = RoutingSkew(drift=0.5), 300
RULES = ("static", "adaptive", "lru", "lfu_decay", "bound")


@dataclass(frozen=True, slots=True)
class Routing:
    """What is replayed, i32[n, L, K], and the conversations that the profile comes from."""

    name: str
    experts: Any
    profile: Any
    num_experts: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", default="iq2_xs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="tokens of a window")
    parser.add_argument("--decay", type=float, default=0.98, help="of lfu_decay, for each round")
    parser.add_argument("--trace", type=Path, help="a routing trace, in place of the others")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    slots = {gb: per_block_slots(options.quant, mib) for gb, mib in CARDS.items()}
    print(f"slots of a block, {options.quant}: " + ", ".join(f"{gb} GB {num}" for gb, num in slots.items()))
    rows = []
    print("| routing | rows | card | slots a layer | " + " | ".join(RULES) + " | link: static | lfu_decay | less |")
    print("| --- " + "| ---: " * (len(RULES) + 6) + "|")
    for routing in routings(options.trace):
        for num_rows in options.rows:
            for gb, num in slots.items():
                found = measure(routing, num, num_rows, options.decay)
                rows.append(row_of(routing, gb, num, num_rows, options.decay, found))
                print(line_of(rows[-1]), flush=True)
    if options.save:
        options.save.write_text(json.dumps(rows, indent=1) + "\n")


def per_block_slots(quant: str, cap_mib: int) -> int:
    """The planner's slots under a cap, for each block, all of one size."""
    geometry = preset_geometry("synthetic_full", quant)
    made = plan(
        geometry,
        PlanRequest(
            context_cells=CONTEXT_CELLS, chunk_tokens=CHUNK_TOKENS, spec_window=4, expert_kernels=True,
            device_budget_bytes=cap_mib * MIB, reserve_bytes=RESERVE_MIB * MIB,
        ),
    )  # fmt: skip
    return made.expert_slots // made.num_blocks


def routings(trace: Path | None) -> Iterator[Routing]:
    if trace is not None:
        experts = read_routing_trace(trace).experts
        half = len(experts) // 2
        yield Routing(trace.name, experts[half:], experts[:half], int(experts.max()) + 1)
        return
    for skew in SKEWS:
        made = [
            draw_trace(skew, num_tokens=num, conversation_tokens=length, seed=seed, **DRAWN).experts
            for num, length, seed in ((TOKENS, CONVERSATION_TOKENS, 1), (PROFILE_TOKENS, 100, 2))
        ]
        yield Routing(f"drawn, {skew.text()}", *made, DRAWN["num_experts"])
    yield Routing(
        f"recorded, small model, {RECORDED_SKEW.text()}", recorded(range(8), 1), recorded(range(8), 2),
        RECORDED["num_experts"],
    )  # fmt: skip


def recorded(topics: range, seed: int) -> np.ndarray:
    """Experts that the engine's routers choose, token by token, in a conversation on each topic."""
    from strata_jax.engine.engine import Engine
    from strata_jax.engine.session import Session
    from strata_jax.synthetic.full import SyntheticModel

    geometry = preset_geometry("synthetic_small", "q2_0", **RECORDED)
    model = SyntheticModel(model_shape("synthetic_small", **RECORDED), geometry, RECORDED_SKEW)
    request = PlanRequest(context_cells=512, chunk_tokens=64, kv_type="f32", spec_window=1,
                          expert_slots=RECORDED["num_layers"] * RECORDED["num_experts"])  # fmt: skip
    engine = Engine.load(model, geometry, plan(geometry, request))
    found = []
    for topic in topics:
        session = Session(engine)
        session.count_uses = True
        tokens = model.topic_tokens(topic, RECORDED_TOKENS, seed)
        session.prefill(tokens[:1])
        for record, _ in session.force(tokens[1:]):
            assert record.uses is not None
            found.append(np.nonzero(record.uses)[1].reshape(geometry.num_layers, -1))
    return np.array(found, np.int32)


def measure(routing: Routing, slots: int, rows: int, decay: float) -> dict[str, Replay]:
    experts, num_experts = routing.experts, routing.num_experts
    layers = experts.shape[1]
    profile = np.sum(list(window_uses(routing.profile, num_experts)), axis=0, dtype=np.int64)
    held = hottest(profile, slots * layers)
    values = first_values(ranks_in_layer(np.argsort(-profile.ravel(), kind="stable"), layers, num_experts))
    settings = AdaptSettings(swaps=AdaptSettings().swaps * layers // 48)
    return {
        "static": replay_static(experts, held, rows),
        "adaptive": replay_adaptive(experts, held, settings, rows),
        "lru": replay_replacing(experts, held, values, 0.0, rows),
        "lfu_decay": replay_replacing(experts, held, values, decay, rows),
        "bound": replay_farthest(experts, held, rows),
    }


def row_of(routing: Routing, gb: int, slots: int, rows: int, decay: float, found: dict[str, Replay]) -> dict[str, Any]:
    layers = routing.experts.shape[1]
    return {
        "routing": routing.name, "rows": rows, "card_gb": gb, "slots_a_layer": slots, "decay": decay,
        "layers": layers, "tokens": len(routing.experts), "experts_a_layer": routing.num_experts,
        "hit_rate": {rule: round(found[rule].hit_rate, 4) for rule in RULES},
        "link_experts_a_layer": {rule: round(found[rule].link_experts / layers, 4) for rule in RULES},
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    hits, link = row["hit_rate"], row["link_experts_a_layer"]
    less = 1 - link["lfu_decay"] / link["static"] if link["static"] else 0.0
    cells = [row["routing"], row["rows"], f"{row['card_gb']} GB", row["slots_a_layer"]]
    cells += [f"{100 * hits[rule]:.1f}" for rule in RULES]
    return "| " + " | ".join(map(str, [*cells, link["static"], link["lfu_decay"], f"{100 * less:.0f} %"])) + " |"


if __name__ == "__main__":
    main()
