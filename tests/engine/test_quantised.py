"""Packed weights: every type gives the logits of its own float32 expansion, without a float copy."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.session import Session
from strata_jax.memory.ledger import Owner, Phase
from tests.engine.conftest import load
from tests.oracle import ggml, llama
from tests.oracle.models import ModelStore, sample_tokens

# a GDN layer with the n-gram table, an attention layer, the draft block; rows of 256 where a K or IQ type goes.
# Files of one type do without the second layer (the draft block has the same tensors): programs take long to compile.
SMALL: dict[str, object] = {
    "num_layers": 2, "full_attention_interval": 2, "ple_layer": 0, "num_experts": 4, "num_experts_used": 2,
    "gdn_value_heads": 2,
}  # fmt: skip
# a scale, a scale and an offset, scales of scales, a codebook in all tensors; the others are in `MIXED` and `OTHERS`
TYPES = ("Q4_0", "Q5_1", "Q4_K", "IQ2_XS")
# types that differ between layers, within an expert and between gate and up of one layer, as in published files
MIXED: ggml.Rules = [
    (r"blk\.0\.ffn_gate_exps", "IQ2_S"),
    (r"blk\.0\.ffn_up_exps", "IQ3_XXS"),
    (r"blk\.0\.ffn_down_exps", "Q2_0"),
    (r"blk\.1\.ffn_(gate|up)_exps", "IQ3_S"),
    (r"blk\.2\.ffn_gate_exps", "Q4_K"),
    (r"blk\.2\.ffn_up_exps", "BF16"),
    ("ffn_down_exps", "IQ4_NL"),
    (r"token_embd|output\.weight", "Q6_K"),
    (r"nextn\.hc_head", "Q5_0"),
    ("hc_", "Q8_0"),
    ("indexer", "BF16"),
    (r"attn_(q|qkv|gate)|shexp", "Q5_K"),
    ("blk", "Q6_K"),
]
# what `MIXED` and `TYPES` have not, or not there
OTHERS: ggml.Rules = [
    (r"blk\.0\.ffn_gate_exps", "IQ4_XS"),
    (r"blk\.0\.ffn_up_exps", "F16"),
    (r"blk\.0\.ffn_down_exps", "IQ3_XXS"),
    (r"blk\.1\.ffn_gate_exps", "Q2_0"),
    (r"blk\.1\.ffn_up_exps", "Q8_0"),
    (r"blk\.1\.ffn_down_exps", "BF16"),
    ("token_embd", "IQ3_XXS"),
    (r"output\.weight", "IQ4_XS"),
    ("hc_", "Q2_0"),
    (r"attn_(q|qkv|gate)", "IQ3_XXS"),
    ("attn|ssm", "IQ4_XS"),
    ("shexp", "F16"),
    ("blk", "BF16"),
]
COMPARED = ("F32", "Q4_K", "mixed")
STEPPED = ("Q4_K", "Q5_1", "mixed", "others")  # the step's program takes longest to compile
RECIPES: dict[str, ggml.Rules] = {**{name: [(".", name)] for name in TYPES}, "mixed": MIXED, "others": OTHERS}
PROMPT = sample_tokens(3, 48, 512, 480)  # past the 32 tokens that sparse attention keeps
STEPS = [7, 300, 411]
SETTINGS = {"context_cells": 64, "chunk_tokens": 16}
TOLERANCE = 1e-4  # at a logit std of about 1.4


@dataclass(frozen=True)
class Logits:
    """Of the trunk for a prompt and for single steps after it, and of the draft block for the prompt."""

    chunks: np.ndarray
    draft: np.ndarray
    steps: np.ndarray | None


def logits(engine: Engine, *, steps: bool) -> Logits:
    draft = Session(engine).prefill(PROMPT, want="draft")
    session = Session(engine)
    chunks = session.prefill(PROMPT, want="all")
    return Logits(chunks, draft, np.stack([row for _, row in session.force(STEPS)]) if steps else None)


def small(models: ModelStore, recipe: str) -> Path:
    """A small model with every matrix of one type, or of the type that llama.cpp takes where rows do not allow it."""
    layers = {} if recipe in COMPARED else {"num_layers": 1}  # llama.cpp aborts on a trunk without attention
    source = models.synthetic("tiny", 0, overrides=SMALL | layers)
    if recipe == "F32":
        return source
    return models.made(f"small-{recipe}.gguf", lambda path: ggml.quantize_gguf(source, path, RECIPES[recipe]) and None)


@pytest.fixture(scope="module")
def engines(models: ModelStore) -> Callable[[str], Engine]:
    """Engines by recipe, kept: their programs take long to compile."""
    kept: dict[str, Engine] = {}

    def get(recipe: str) -> Engine:
        if recipe not in kept:
            kept[recipe] = load(small(models, recipe), **SETTINGS)
        return kept[recipe]

    return get


@pytest.mark.parametrize("recipe", ["F32", *RECIPES])
def test_logits_are_those_of_the_float32_expansion_from_arena_and_bank(
    recipe: str, models: ModelStore, engines: Callable[[str], Engine]
) -> None:
    engine = engines(recipe) if recipe in COMPARED else load(small(models, recipe), **SETTINGS)
    if recipe in TYPES:
        _assert_types(engine, recipe)
    elif recipe in RECIPES:
        of_file = {t.type_name for t in engine.geometry.tensor_types.values()}
        assert {type_name for _, type_name in RECIPES[recipe]} <= of_file
    steps = recipe in STEPPED
    found = logits(engine, steps=steps)

    expansion = load(models.expanded(small(models, recipe)), **SETTINGS)
    assert {t.type_name for t in expansion.geometry.tensor_types.values()} == {"F32"}
    expected = logits(expansion, steps=steps)
    names = ("chunks", "draft", "steps")[: 3 if steps else 2]
    for name in names:
        a, b = getattr(found, name), getattr(expected, name)
        assert 1 < b.std() < 2.5
        assert np.abs(a - b).max() <= TOLERANCE, name

    # the same experts from the bank: the same bits
    engine.tables = replace(engine.tables, slot_of=jnp.full_like(engine.tables.slot_of, -1))
    unread = np.asarray(engine.arena).copy()
    unread[: engine.plan.slot_pages] = 0xFFFFFFFF
    engine.arena = jnp.array(unread)
    from_bank = logits(engine, steps=steps)
    for name in names:
        np.testing.assert_array_equal(getattr(from_bank, name), getattr(found, name))


@pytest.mark.parametrize("recipe", COMPARED[1:])
def test_logits_are_near_those_of_llama_cpp_on_the_packed_file(
    recipe: str, models: ModelStore, engines: Callable[[str], Engine], llama_oracle: None
) -> None:
    """llama.cpp rounds activations to 8 bits beside packed weights; a wrong type or layout is off by far more."""
    found = Session(engines(recipe)).prefill(PROMPT, want="all")
    expected = llama.logits(small(models, recipe), PROMPT)
    assert np.abs(found - expected).mean() < 0.06
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.85
    other = Session(engines("F32")).prefill(PROMPT, want="all")
    assert np.abs(other - expected).mean() > 0.06, "the packed weights make no difference here"


# --- memory


@pytest.mark.parametrize(
    ("recipe", "slots", "options"),
    [("F32", 5, {}), ("mixed", 5, {}), ("mixed", 0, {}), ("mixed", 5, {"spec_window": 1}), ("F32", 12, {})],
    ids=str,
)
def test_arrays_of_a_loaded_model_are_those_planned(
    recipe: str, slots: int, options: dict[str, int], models: ModelStore
) -> None:
    path = small(models, recipe)
    gc.collect()
    earlier = jax.live_arrays()
    engine = load(path, expert_slots=slots, **SETTINGS, **options)
    session = Session(engine)
    known = {id(x) for x in earlier}
    live = [x for x in jax.live_arrays() if id(x) not in known]

    ledger = engine.plan.ledger
    planned = ledger.total_bytes(Phase.START)
    assert sum(x.nbytes for x in live) == pytest.approx(planned, rel=0.01)
    bytes_of = ledger.owner_bytes(Phase.START)
    weights = sum(bytes_of.get(owner, 0) for owner in (Owner.DENSE, Owner.EMBEDDING, Owner.HEAD, Owner.DRAFTER))
    state = bytes_of[Owner.RECURRENT_STATE] + bytes_of[Owner.INDEX_KEYS]
    expected = {
        "weights": weights,
        "bank": bytes_of[Owner.BANK],
        "arena": bytes_of[Owner.EXPERT_SLOTS] + bytes_of[Owner.KV],
    }
    assert dict(engine.live_bytes()) == expected
    assert sum(x.nbytes for x in jax.tree.leaves(engine.tables)) == bytes_of[Owner.TABLES]
    assert sum(x.nbytes for x in jax.tree.leaves(session.state)) == state


def test_no_float_copy_of_packed_experts_exists_before_or_after_a_run(models: ModelStore) -> None:
    path = small(models, "Q4_0")
    gc.collect()
    earlier = jax.live_arrays()
    known = {id(x) for x in earlier}
    engine = load(path, expert_slots=1, **SETTINGS)
    g = engine.geometry
    stack = g.num_experts * g.expert_width[0] * g.embed_width * 4  # gate, up or down of one layer as float32
    session = Session(engine)
    for run in (lambda: None, lambda: session.prefill(PROMPT, want="all")):
        run()
        gc.collect()
        live = [x for x in jax.live_arrays() if id(x) not in known]
        assert max(x.nbytes for x in live) < stack
        assert sum(x.nbytes for x in live) <= 1.01 * engine.plan.ledger.total_bytes(Phase.START)
    assert sum(bank.blobs.nbytes for bank in engine.banks) < 0.2 * 3 * 3 * stack


def test_a_tied_head_is_one_array(models: ModelStore) -> None:
    engine = load(models.synthetic("nano", 0, overrides={"tied_output": True}), context_cells=64)
    assert engine.weights.head.data is engine.weights.embed.data
    bytes_of = engine.plan.ledger.owner_bytes(Phase.START)
    planned = sum(bytes_of.get(owner, 0) for owner in (Owner.DENSE, Owner.EMBEDDING, Owner.HEAD, Owner.DRAFTER))
    assert dict(engine.live_bytes())["weights"] == planned


def _assert_types(engine: Engine, type_name: str) -> None:
    """All matrices are of the type but those that stay float32 or have rows too short for its blocks."""
    found = Counter(t.type_name for t in engine.geometry.tensor_types.values() if len(t.shape) > 1)
    assert found[type_name] >= 28, found
    assert {part.type_name for bank in engine.banks for part in bank.layout.parts} == {type_name}
