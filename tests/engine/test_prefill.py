"""Reading a prompt: any chunk size gives the same logits, with few programs."""

from __future__ import annotations

import numpy as np
import pytest

from strata_jax.engine.session import ChunkRecord, Session
from strata_jax.errors import ConfigError, DoesNotFit
from tests.engine.conftest import LoadEngine, load
from tests.oracle.models import PARITY_CASES, ModelStore

CASE = PARITY_CASES[0]
TOLERANCE = 2e-5


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 256])
def test_chunk_size_does_not_change_the_logits(chunk_tokens: int, models: ModelStore, load_engine: LoadEngine) -> None:
    path = models.synthetic(CASE.preset, CASE.seed)
    tokens = CASE.token_ids
    one_shot = Session(load_engine(path, chunk_tokens=512)).prefill(tokens, want="all")
    chunked = Session(load_engine(path, chunk_tokens=chunk_tokens)).prefill(tokens, want="all")
    assert np.abs(one_shot - chunked).max() <= TOLERANCE


def test_prompt_in_several_reads_equals_one_read(models: ModelStore, load_engine: LoadEngine) -> None:
    engine = load_engine(models.synthetic(CASE.preset, CASE.seed))
    whole = Session(engine).prefill(CASE.token_ids[:150])
    session = Session(engine)
    for first, last in ((0, 1), (1, 3), (3, 70), (70, 149)):
        session.prefill(CASE.token_ids[first:last])
    assert np.abs(session.prefill(CASE.token_ids[149:150]) - whole).max() <= TOLERANCE


@pytest.mark.parametrize("kv_type", ["f32", "int8"])
def test_cells_that_nobody_has_written_may_hold_anything(models: ModelStore, kv_type: str) -> None:
    """K/V pages that were expert slots hold their bytes: here NaN in every cell, beside a chunk with unused rows."""
    path = models.synthetic("nano", 0, overrides={"full_attention_interval": 2, "ple_layer": 0})  # GDN after attention
    clean, dirty = (load(path, kv_type=kv_type) for _ in range(2))
    dirty.arena = dirty.arena.at[np.asarray(dirty.tables.kv_pages).reshape(-1)].set(np.uint32(0xFFFFFFFF))
    sessions = Session(clean), Session(dirty)
    for tokens in (CASE.token_ids[:104], CASE.token_ids[104:125]):
        expected, found = (session.prefill(tokens) for session in sessions)
        np.testing.assert_array_equal(found, expected)
    rounds = [[r.emitted for r in session.decode(expected, max_tokens=8)] for session in sessions]
    assert rounds[0] == rounds[1]


def test_fifty_prompt_lengths_compile_no_more_than_the_chunk_buckets_need(models: ModelStore) -> None:
    engine = load(models.synthetic(CASE.preset, CASE.seed), chunk_tokens=64)
    assert engine.plan.prefill_buckets == (8, 64)
    lengths = [*range(1, 40), *range(60, 71)]
    assert len(lengths) == 50
    for length in lengths:
        Session(engine).prefill(CASE.token_ids[:length])
    # embed, PLE, GDN, attention, draft and head for each bucket, the fill of the arena and the counts of a chunk
    assert len(engine.programs.compiled) <= 6 * 2 + 2


def test_chunk_records_say_what_was_read(models: ModelStore, load_engine: LoadEngine) -> None:
    engine = load_engine(models.synthetic(CASE.preset, CASE.seed))
    records: list[ChunkRecord] = []
    Session(engine, on_chunk=records.append).prefill(CASE.token_ids[:70])
    assert [(r.start, r.num_tokens, r.padded_tokens) for r in records] == [(0, 64, 64), (64, 6, 8)]
    used = engine.geometry.num_experts_used * engine.plan.num_blocks
    assert [r.lookups for r in records] == [64 * used, 6 * used]
    assert [r.hits for r in records] == [64 * used, 6 * used]


def test_prompt_longer_than_the_context_is_refused_with_the_setting(
    models: ModelStore, load_engine: LoadEngine
) -> None:
    session = Session(load_engine(models.synthetic(CASE.preset, CASE.seed)))
    with pytest.raises(DoesNotFit, match=r"600 tokens .* 512 cells, 0 are used; set model\.max_context=600"):
        session.prefill([1] * 600)


@pytest.mark.parametrize(("tokens", "message"), [([], "no tokens"), ([1, 512], "token 512 at place 1"), ([-1], "-1")])
def test_wrong_tokens_are_refused(tokens: list[int], message: str, models: ModelStore, load_engine: LoadEngine) -> None:
    with pytest.raises(ConfigError, match=message):
        Session(load_engine(models.synthetic(CASE.preset, CASE.seed))).prefill(tokens)
