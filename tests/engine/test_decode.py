"""Decoding: windows equal single steps, drafts change the speed and never the text."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from strata_jax.engine.engine import Engine
from strata_jax.engine.sampler import sampling_arrays
from strata_jax.engine.session import RoundRecord, Session
from strata_jax.errors import ConfigError
from strata_jax.sampling import Sampling
from tests.engine.conftest import LoadEngine, load
from tests.oracle import llama
from tests.oracle.models import PARITY_CASES, ModelStore

CASE = PARITY_CASES[0]
PROMPT = CASE.token_ids[:60]
SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, seed=7)


def generate(engine: Engine, count: int, **options: object) -> tuple[list[int], list[RoundRecord]]:
    session = Session(engine)
    logits = session.prefill(PROMPT)
    rounds = list(session.decode(logits, max_tokens=count, **options))  # type: ignore[arg-type]
    return [token for r in rounds for token in r.emitted], rounds


@pytest.fixture(scope="module")
def echo_engine(models: ModelStore, load_engine: LoadEngine) -> Engine:
    """A model whose drafts are right some of the time."""
    return load_engine(models.synthetic("nano", 0, echo_mtp=0.1), spec_window=4)


def test_single_steps_equal_a_chunk(models: ModelStore, load_engine: LoadEngine) -> None:
    engine = load_engine(models.synthetic(CASE.preset, CASE.seed))
    chunked = Session(engine).prefill(CASE.token_ids[:100], want="all")
    stepped = np.stack([logits for _, logits in Session(engine).force(CASE.token_ids[:100])])
    assert np.abs(chunked - stepped).max() <= 2e-5


@pytest.mark.parametrize("size", [2, 4])
def test_a_window_equals_as_many_single_steps(echo_engine: Engine, size: int) -> None:
    text, _ = generate(echo_engine, 40, draft=False)
    session, how = Session(echo_engine), sampling_arrays(Sampling())
    session.prefill(PROMPT)
    stepped = np.stack([logits for _, logits in session.force(text[:12])])
    session = Session(echo_engine)
    session.prefill(PROMPT)
    windows = []
    for first in range(0, 12, size):
        record, _, logits = session._round(text[first : first + size], [], how, 0.0, 3)
        assert list(record.emitted) == text[first + 1 : first + size + 1]  # the right drafts are all accepted
        windows.append(np.asarray(logits)[:size])
    assert np.abs(np.concatenate(windows) - stepped).max() <= 2e-5


def test_text_equals_llama_cpp(models: ModelStore, echo_engine: Engine, llama_oracle: None) -> None:
    expected = llama.greedy(models.synthetic("nano", 0, echo_mtp=0.1), PROMPT, 300)
    assert generate(echo_engine, 300)[0] == expected


@pytest.mark.parametrize("how", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_drafted_text_equals_plain_text_with_some_drafts_accepted(echo_engine: Engine, how: Sampling) -> None:
    drafted, rounds = generate(echo_engine, 300, sampling=how)
    plain, _ = generate(echo_engine, 300, sampling=how, draft=False)
    assert drafted == plain
    proposed, accepted = sum(r.num_drafted for r in rounds), sum(r.num_accepted for r in rounds)
    assert 0 < accepted < proposed
    assert len(rounds) < 300


@pytest.mark.parametrize("drafter", ["own", "random", "always wrong"])
@pytest.mark.parametrize("window", [2, 3, 4])
def test_DC01_any_drafter_and_window_gives_the_plain_text(
    drafter: str,
    window: int,
    models: ModelStore,
    load_engine: LoadEngine,
    monkeypatch: pytest.MonkeyPatch,
    echo_engine: Engine,
) -> None:
    plain, _ = generate(echo_engine, 128, draft=False)
    engine = load_engine(models.synthetic("nano", 0, echo_mtp=0.1), spec_window=window)
    rng = np.random.default_rng(window)
    original = Session._round

    def meddle(self: Session, *args: object) -> tuple:
        record, drafts, logits = original(self, *args)  # type: ignore[arg-type]
        if drafter == "random":
            drafts = rng.integers(0, engine.geometry.vocab_size, window - 1).tolist()
        if drafter == "always wrong":
            following = plain[len(self.tokens) - len(PROMPT) + 1 :][: len(drafts)]
            drafts = [(token + 1) % engine.geometry.vocab_size for token in following]
        return record, drafts, logits

    monkeypatch.setattr(Session, "_round", meddle)
    text, rounds = generate(engine, 128)
    assert text == plain
    if drafter == "always wrong":
        assert sum(r.num_accepted for r in rounds[2:]) == 0


def test_state_after_rejected_drafts_is_the_state_of_plain_decoding(echo_engine: Engine) -> None:
    def state_after(count: int, *, draft: bool) -> tuple[list[int], list[np.ndarray]]:
        session = Session(echo_engine)
        logits = session.prefill(PROMPT)
        steps = session.decode(logits, max_tokens=count, draft=draft)
        for _ in steps:
            pass
        return session.tokens, [np.asarray(x) for x in jax.tree.leaves((session.state.blocks, session.state.hidden))]

    tokens, drafted = state_after(50, draft=True)
    plain_tokens, plain = state_after(50, draft=False)
    assert tokens == plain_tokens
    for a, b in zip(drafted, plain, strict=True):
        if a.shape[0] > 100:  # index keys: those of incomplete blocks are overwritten before they are read
            a, b = a[: len(tokens) // 4], b[: len(tokens) // 4]
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_hit_rate_counts_resident_experts_only(models: ModelStore) -> None:
    engine = load(models.synthetic("nano", 0), expert_slots=40)
    _, rounds = generate(engine, 8, draft=False)
    used = engine.geometry.num_experts_used * engine.geometry.num_layers
    assert [r.lookups for r in rounds[1:]] == [used] * 7
    assert 0 < sum(r.hits for r in rounds) < sum(r.lookups for r in rounds)


def test_forced_tokens_take_one_row_each_and_no_drafts(echo_engine: Engine) -> None:
    session = Session(echo_engine)
    session.prefill(PROMPT)
    forced = CASE.token_ids[100:110]
    steps = list(session.force(forced))
    assert session.tokens == PROMPT + forced
    assert [r.window_tokens for r, _ in steps] == [1] * 10
    assert [r.emitted[0] for r, _ in steps[:-1]] == forced[1:]


def test_generation_stops_at_max_tokens_and_at_the_context_end(models: ModelStore, echo_engine: Engine) -> None:
    for count in (1, 2, 7):
        assert len(generate(echo_engine, count)[0]) == count
    short = load(models.synthetic("nano", 0, echo_mtp=0.1), context_cells=72)
    text, _ = generate(short, 100)
    # 60 prompt cells leave 12; the last token needs none
    assert text == generate(echo_engine, 100)[0][:13]


def test_generation_ends_with_the_round_that_holds_a_stop_token(echo_engine: Engine) -> None:
    text, _ = generate(echo_engine, 40, draft=False)
    stop = text[20]
    stopped, _ = generate(echo_engine, 40, draft=False, stop_ids=frozenset({stop}))
    assert stopped == text[: text.index(stop) + 1]


def test_min_p_keeps_doubtful_drafts_out_of_the_window(echo_engine: Engine) -> None:
    _, every = generate(echo_engine, 60)
    text, sure = generate(echo_engine, 60, min_p=0.9)
    assert text == generate(echo_engine, 60, draft=False)[0]
    assert sum(r.num_drafted for r in sure) < sum(r.num_drafted for r in every)


def test_a_sequence_that_lost_its_cells_cannot_go_on(echo_engine: Engine) -> None:
    first = Session(echo_engine)
    logits = first.prefill(PROMPT)
    Session(echo_engine)
    with pytest.raises(RuntimeError, match="taken over"):
        first.prefill(PROMPT)
    with pytest.raises(RuntimeError, match="taken over"):
        next(first.decode(logits, max_tokens=2))


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_a_further_prompt_after_decoding_equals_one_prompt(echo_engine: Engine, count: int) -> None:
    session = Session(echo_engine)
    logits = session.prefill(PROMPT)
    list(session.decode(logits, max_tokens=count))
    turn = CASE.token_ids[200:230]
    whole = [*session.tokens, *turn]
    continued = session.prefill(turn, want="draft")
    assert np.abs(continued - Session(echo_engine).prefill(whole, want="draft")[-len(turn) :]).max() <= 2e-5


def test_draft_logits_after_tokens_that_the_draft_block_missed_are_refused(echo_engine: Engine) -> None:
    session = Session(echo_engine)
    session.prefill(PROMPT)
    list(session.force(PROMPT[:3]))
    with pytest.raises(ConfigError, match="has not seen all tokens"):
        session.prefill(PROMPT, want="draft")


def test_same_seed_same_text_and_other_seed_other_text(echo_engine: Engine) -> None:
    once, _ = generate(echo_engine, 40, sampling=SAMPLED)
    assert once == generate(echo_engine, 40, sampling=SAMPLED)[0]
    assert once != generate(echo_engine, 40, sampling=replace(SAMPLED, seed=8))[0]
