"""Own prompt buffers: the boundary checks of the published chooser, the list without borrowing, RAM headroom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata_packs import IQ3_S, MIB, PINNED, STREAMED_Q4, UNPINNED, pack

from strata_jax.errors import ConfigError
from strata_jax.memory.strata.borrow import SlotSizes, borrowed_path
from strata_jax.memory.strata.own_buffers import (
    MAX_BYTES,
    OWN_CHUNKS,
    choose_own_chunk,
    expert_headroom_bytes,
    independent_path,
    own_candidates,
    own_path,
)
from strata_jax.memory.strata.prompt_buffers import request_owned_bytes
from strata_jax.memory.strata.request import StrataRequest, Version
from strata_jax.memory.strata.result import Layout

GIB = 2**30
CHECKED = ((8_192, 4 * GIB), (4_096, 2 * GIB), (2_048, 1 * GIB))
SLOTS = SlotSizes(7_056, 2_035_000)
SEED_A = StrataRequest(version=Version.V0_1_35, reserve_mib=1_536)


@pytest.mark.parametrize(
    ("free", "reserve", "cap", "borrowed", "chosen"),
    [
        (6 * GIB, 2 * GIB, 8_192, 4_096, 8_192),
        (6 * GIB - 1, 2 * GIB, 8_192, 4_096, 4_096),
        (4 * GIB - 1, 2 * GIB, 8_192, 4_096, 0),
        (1 * GIB, 2 * GIB, 8_192, 0, 0),
        (10 * GIB, 1 * GIB, 4_096, 0, 4_096),
        (10 * GIB, 1 * GIB, 0, 0, 0),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_boundary_checks_of_the_chooser(free, reserve, cap, borrowed, chosen, order) -> None:
    assert choose_own_chunk(CHECKED[::order], free, reserve, cap, borrowed) == chosen


@pytest.mark.parametrize(
    ("existing", "budget", "floor", "enabled", "headroom"),
    [
        (4 * GIB, 2 * GIB, 2_560 * MIB, True, 4_864 * MIB),
        (4 * GIB, 1 * GIB, 2_560 * MIB, True, 4 * GIB),
        (4 * GIB, 2 * GIB, 2_560 * MIB, False, 4 * GIB),
        (4 * GIB, 0, 2_560 * MIB, True, 4 * GIB),
        (4 * GIB, MAX_BYTES, 1, True, MAX_BYTES),
    ],
)
def test_boundary_checks_of_the_headroom(existing, budget, floor, enabled, headroom) -> None:
    assert expert_headroom_bytes(existing, budget, floor, enabled) == headroom


def test_headroom_of_a_negative_amount_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        expert_headroom_bytes(1, -1, 1, True)


@pytest.mark.parametrize(("free_mib", "chosen"), [(5_341, 8_192), (5_340, 0), (8_936, 16_384), (8_935, 8_192)])
def test_p06_equality_fits_and_a_smaller_chunk_than_borrowing_never_wins(free_mib: int, chosen: int) -> None:
    buffers = {16_384: 7_400, 8_192: 3_805, 6_144: 2_900, 4_096: 1_980}
    candidates = [(chunk, mib * MIB) for chunk, mib in buffers.items()]
    assert choose_own_chunk(candidates, free_mib * MIB, 1_536 * MIB, 32_768, 8_192) == chosen


@given(
    candidates=st.lists(st.tuples(st.integers(-2, 40), st.integers(-2, 60)), max_size=8),
    free=st.integers(0, 100),
    reserve=st.integers(0, 100),
    cap=st.integers(-2, 40),
    borrowed=st.integers(0, 40),
)
def test_the_chooser_takes_the_largest_that_meets_every_condition(candidates, free, reserve, cap, borrowed) -> None:
    chosen = choose_own_chunk(candidates, free, reserve, cap, borrowed)
    fitting = {c for c, b in candidates if 0 < c <= cap and c >= borrowed and 0 < b <= free - reserve}
    assert chosen == max(fitting, default=0)
    assert choose_own_chunk(candidates, free + 1, reserve, cap, borrowed) >= chosen


def test_the_published_run_takes_own_buffers_of_its_8192_tokens_and_lends_nothing() -> None:
    found = independent_path(pack(IQ3_S), SLOTS, SEED_A, UNPINNED, 6_000 * MIB, 1_536 * MIB, 8_192)
    assert found is not None
    assert (found.chunk_tokens, found.layout, found.ring_slots) == (8_192, Layout.OWN, 96)
    assert found.own_bytes / MIB == pytest.approx(3_805, rel=0.02)
    assert (found.lent_slots, found.first_lent, found.lent_bytes) == (0, 7_056, 0)
    short = found.own_bytes + 1_536 * MIB - 1
    assert independent_path(pack(IQ3_S), SLOTS, SEED_A, UNPINNED, short, 1_536 * MIB, 8_192) is None
    assert independent_path(pack(IQ3_S), SLOTS, SEED_A, UNPINNED, short + 1, 1_536 * MIB, 8_192) == found


def test_an_automatic_cache_leaves_nothing_to_own() -> None:
    borrowed = borrowed_path(pack(IQ3_S), SLOTS, SEED_A, UNPINNED)
    assert borrowed is not None
    left = (1_536 + 200) * MIB
    assert independent_path(pack(IQ3_S), SLOTS, SEED_A, UNPINNED, left, 1_536 * MIB, borrowed.chunk_tokens) is None


def test_own_buffers_stop_at_the_cap_and_at_the_context() -> None:
    def chosen(**change) -> int:
        request = replace(SEED_A, **change)
        found = independent_path(pack(), SLOTS, request, PINNED, 60 * GIB, 1_536 * MIB, 0)
        return found.chunk_tokens if found else 0

    assert chosen() == 8_192
    assert chosen(chunk_auto_max=32_768) == 32_768
    assert chosen(chunk_tokens=3_000) == 3_000, "a chunk that is given, though the list lacks it"
    assert chosen(context_cells=1_000) == 512
    assert chosen(context_cells=200) == 0


def test_the_list_without_borrowing_needs_512_mib_beside_the_buffers() -> None:
    request = replace(STREAMED_Q4, borrow=False)
    assert own_candidates(request) == OWN_CHUNKS
    price = request_owned_bytes(pack(), request, 2_048, 384)
    fits = own_path(pack(), SLOTS, request, PINNED, price + 512 * MIB)
    assert fits is not None
    assert (fits.chunk_tokens, fits.own_bytes) == (2_048, price)
    assert "3,072 tokens" in fits.why_not_larger
    smaller = own_path(pack(), SLOTS, request, PINNED, price + 512 * MIB - 1)
    assert smaller is not None
    assert smaller.chunk_tokens == 1_536
    assert own_path(pack(), SLOTS, request, PINNED, 700 * MIB) is None


def test_where_auto_starts_without_a_profile_or_without_slots_to_lend() -> None:
    assert own_candidates(replace(STREAMED_Q4, profile=False))[0] == 2_048
    assert own_candidates(STREAMED_Q4)[0] == 1_024
    assert own_candidates(replace(STREAMED_Q4, borrow=False, token_graph=False))[0] == 1_024
    assert own_candidates(replace(STREAMED_Q4, chunk_tokens=768)) == (768,)
    assert own_candidates(replace(STREAMED_Q4, borrow=False, chunk_auto_max=256)) == (256,), "auto:256 is kept"
    one_slot = own_path(pack(), SlotSizes(1, 1_715_200), STREAMED_Q4, UNPINNED, 4 * GIB)
    assert one_slot is not None
    assert one_slot.chunk_tokens == 1_024  # published: a cache of one slot reads 1,024 tokens at a time
