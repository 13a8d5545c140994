"""The model of the published shape without its weights: what the engine reads, computes and hits, at a small width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.session import Session
from strata_jax.errors import ConfigError
from strata_jax.gguf.chat import ChatTemplate
from strata_jax.gguf.tokenizer import Tokenizer
from strata_jax.memory.ledger import Memory, Phase
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from strata_jax.presets import model_shape, preset_geometry
from strata_jax.quants import load_quant
from strata_jax.synthetic.full import DISTINCT_EXPERTS, DRAFT_AGREEMENT, SyntheticModel
from strata_jax.synthetic.routing import NUM_TOPICS, RoutingSkew, hit_rate

QUANTS = ("iq3_xxs", "iq3_s", "iq2_xs", "q2_0")
MIB = 2**20
LAYERS, EXPERTS = 4, 64
ALL_SLOTS = (LAYERS + 1) * EXPERTS
PROMPT_TOKENS = 512


def synthetic(
    quant: str = "q2_0", skew: RoutingSkew | None = None, num_layers: int = LAYERS, num_experts: int = EXPERTS
) -> SyntheticModel:
    counts = {"num_layers": num_layers, "num_experts": num_experts}
    geometry = preset_geometry("synthetic_small", quant, **counts)
    return SyntheticModel(model_shape("synthetic_small", **counts), geometry, skew)


def load(model: SyntheticModel, slots: int = ALL_SLOTS) -> Engine:
    request = PlanRequest(
        context_cells=PROMPT_TOKENS, chunk_tokens=256, kv_type="f32", all_logits=True, expert_slots=slots, spec_window=2
    )
    return Engine.load(model, model.geometry, plan(model.geometry, request))


# --- tensors


@pytest.mark.parametrize("quant", QUANTS)
def test_the_full_model_has_the_published_shape_and_mix(quant: str) -> None:
    geometry, published = preset_geometry("synthetic_full", quant), preset_geometry("qwen38_flash", quant)
    pairs = Counter(_types(geometry, layer) for layer in range(48))
    assert pairs == {(e.gate_up, e.down): e.count for e in load_quant(quant).experts}
    small = "per_layer_token_embd.weight"
    assert {n: (t.shape, t.type_name) for n, t in geometry.tensor_types.items() if n != small} == {
        n: (t.shape, t.type_name) for n, t in published.tensor_types.items() if n != small
    }
    table, real = geometry.tensor_types[small], published.tensor_types[small]
    assert (table.shape[1], table.type_name) == (real.shape[1], real.type_name)
    assert table.num_bytes < 32 * MIB
    assert "synthetic" in geometry.name


def test_the_full_model_is_planned_for_an_8_gb_card() -> None:
    geometry = preset_geometry("synthetic_full", "iq2_xs")
    made = plan(
        geometry,
        PlanRequest(context_cells=32_768, chunk_tokens=512, device_budget_bytes=8151 * MIB, reserve_bytes=700 * MIB),
    )
    assert 200 < made.expert_slots < 3000
    assert max(made.ledger.total_bytes(phase, Memory.DEVICE) for phase in Phase) <= 8151 * MIB


@pytest.mark.parametrize("quant", QUANTS)
def test_a_shallower_model_has_the_types_of_the_same_depths(quant: str) -> None:
    full = preset_geometry("synthetic_full", quant)
    small = synthetic(quant, num_layers=12).geometry
    assert [_types(small, i) for i in range(12)] == [_types(full, 4 * i + 2) for i in range(12)]


def _types(geometry, layer: int) -> tuple[str, str]:
    names = [geometry.tensor_types[f"blk.{layer}.ffn_{part}_exps.weight"].type_name for part in ("gate", "up", "down")]
    assert names[0] == names[1]
    return names[0], names[2]


def test_every_tensor_has_its_bytes_and_they_stay_the_same() -> None:
    model, again = synthetic("iq3_s"), synthetic("iq3_s")
    other = SyntheticModel(model.shape, model.geometry, seed=1)
    assert set(model.tensors) == set(model.geometry.tensor_types)
    for name, info in model.tensors.items():
        data = model.data(name)
        assert data.shape == (*info.shape[:-1], info.row_bytes), name
        np.testing.assert_array_equal(data, again.data(name), err_msg=name)
        assert not np.array_equal(data, other.data(name)), name
    assert model.data("per_layer_token_embd.weight") is model.data("per_layer_token_embd.weight")  # read every step


def test_experts_come_from_a_pool_and_neighbours_differ() -> None:
    model = synthetic(num_experts=128)
    name = "blk.1.ffn_up_exps.weight"
    pool, ids, stack = model.expert_pool(name), model.expert_ids(1), model.data(name)
    assert len(pool) == DISTINCT_EXPERTS == len(np.unique(pool.reshape(len(pool), -1), axis=0))
    np.testing.assert_array_equal(stack, pool[ids])
    assert Counter(ids).most_common(1)[0][1] == 3
    assert (ids != model.expert_ids(2)).all()


def test_what_cannot_be_made_is_refused() -> None:
    shape = model_shape("synthetic_small")
    with pytest.raises(ConfigError, match=r"embedding of IQ4_XS and a head of Q6_K: .* Leave quant.head at auto"):
        SyntheticModel(shape, preset_geometry("synthetic_small", "iq2_xs", head="Q6_K"))
    with pytest.raises(ConfigError, match=r"qwen38_flash has 48 layers of 512 experts; only synthetic_full"):
        preset_geometry("qwen38_flash", "iq2_xs", num_layers=8)
    with pytest.raises(ConfigError, match=r"model.layers=3: every 4th layer attends"):
        preset_geometry("synthetic_small", "iq2_xs", num_layers=3)
    with pytest.raises(ConfigError, match="num_experts_used 4 exceeds num_experts 2"):
        preset_geometry("synthetic_small", "iq2_xs", num_experts=2)


def test_the_tokenizer_and_its_template_work() -> None:
    model = synthetic()
    tokenizer = Tokenizer.from_gguf(model.metadata)
    ids = ChatTemplate.from_gguf(model.metadata, tokenizer).encode_messages([{"role": "user", "content": "Hello"}])
    assert max(ids) < model.shape.vocab_size
    assert model.geometry.eos_token_id == tokenizer.eos_id
    assert not set(model.next_tokens().tolist()) & tokenizer.eos_ids


def test_topics_share_the_vocabulary_and_each_is_one_round_trip() -> None:
    model = synthetic(skew=RoutingSkew(drift=0.5))
    following = model.next_tokens()
    assert sorted(following) == list(range(len(following)))
    for topic in range(NUM_TOPICS):
        tokens = model.topic_tokens(topic, 50)
        assert set(model.topic_of(np.array(tokens)).tolist()) == {topic}
        size, token, seen = int((model.topic_of(np.arange(len(following))) == topic).sum()), tokens[0], set()
        while token not in seen:
            seen.add(token)
            token = int(following[token])
        assert len(seen) == size
    with pytest.raises(ConfigError, match="topic 8: this model has topics 0 to 7"):
        model.topic_tokens(8, 1)


# --- what the engine makes of it


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(synthetic())


@pytest.fixture(scope="module")
def measured(engine: Engine) -> Callable[..., tuple[float, float]]:
    """Hit rates of a prompt, found and predicted; engines of other skews run the first one's programs."""

    def measure(skew: RoutingSkew, slots: int, topic: int = 0) -> tuple[float, float]:
        model = synthetic(skew=skew)
        other = load(model)
        other.programs = engine.programs
        other.publish(other.residency.evicted(range(slots, ALL_SLOTS)))
        records: list = []
        Session(other, on_chunk=records.append).prefill(model.topic_tokens(topic, PROMPT_TOKENS))
        found = sum(r.hits for r in records) / sum(r.lookups for r in records)
        return found, hit_rate(model.odds, slots, LAYERS + 1)

    return measure


def test_the_bank_holds_the_experts_of_the_source(engine: Engine) -> None:
    model = engine.file
    for layer, bank in enumerate(engine.banks):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        expected = np.concatenate([model.data(name).reshape(EXPERTS, -1) for name in names], axis=1)
        np.testing.assert_array_equal(np.asarray(bank.blobs).view(np.uint8), expected)


def test_logits_are_finite_and_the_text_goes_round_its_topic(engine: Engine) -> None:
    model = engine.file
    assert isinstance(model, SyntheticModel)
    tokens = np.array(model.topic_tokens(0, PROMPT_TOKENS))
    logits = Session(engine).prefill(tokens.tolist(), want="all")
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 3
    np.testing.assert_array_equal(logits.argmax(-1), model.next_tokens()[tokens])
    drafts = Session(engine).prefill(tokens.tolist(), want="draft")
    # the draft of a row is for the token after next: the trunk's choice once it has seen that row's token
    assert np.mean(drafts.argmax(-1) == model.next_tokens()[tokens]) == pytest.approx(DRAFT_AGREEMENT, abs=0.15)


@pytest.mark.parametrize("slots", [5, 20, 100, 250])
def test_slots_of_the_hottest_hit_as_often_as_predicted(slots: int, measured: Callable) -> None:
    found, predicted = measured(RoutingSkew(), slots)
    assert found == pytest.approx(predicted, abs=0.03)


@pytest.mark.parametrize("zipf", [0.0, 0.7, 1.4])
def test_the_hit_rate_follows_the_exponent(zipf: float, measured: Callable) -> None:
    found, predicted = measured(RoutingSkew(zipf), 80)
    assert found == pytest.approx(predicted, abs=0.035)


def test_drift_takes_hits_from_other_topics_only(measured: Callable) -> None:
    drift, slots = 0.5, 80
    at_home, predicted = measured(RoutingSkew(drift=drift), slots)
    assert at_home == pytest.approx(predicted, abs=0.03)
    away = np.mean([measured(RoutingSkew(drift=drift), slots, topic)[0] for topic in (1, 2, 3)])
    assert away == pytest.approx((1 - drift) * predicted + drift * slots / ALL_SLOTS, abs=0.08)


def test_activations_stay_in_range_through_48_layers(engine: Engine) -> None:
    model = synthetic(num_layers=48, num_experts=EXPERTS)
    request = PlanRequest(context_cells=256, chunk_tokens=256, kv_type="f32", expert_slots=0, spec_window=1)
    deep = Engine.load(model, model.geometry, plan(model.geometry, request))
    session = Session(deep)
    logits = session.prefill(model.topic_tokens(0, 64))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 3
    hidden = np.asarray(session.state.hidden)
    assert np.sqrt(np.mean(hidden**2)) == pytest.approx(model.stream_square(47) ** 0.5, rel=0.15)
