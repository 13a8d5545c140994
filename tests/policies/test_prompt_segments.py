"""Where a prompt is cut, and where its states are stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.policies.prompt_segments import CheckpointRule, Segment, segments, turn_positions

RULE = CheckpointRule(every=100, root=40)


@pytest.mark.parametrize(
    ("tokens", "turns", "reused", "expected"),
    [
        (30, (), 0, [Segment(0, 30)]),
        (30, (10, 25), 0, [Segment(0, 25, (25,)), Segment(25, 30)]),
        (90, (10, 50, 80), 0, [Segment(0, 50, (50,)), Segment(50, 80, (80,)), Segment(80, 90)]),
        # the root only when nothing is reused
        (90, (10, 50, 80), 20, [Segment(20, 80, (80,)), Segment(80, 90)]),
        (90, (10, 50, 80), 80, [Segment(80, 90)]),
        # multiples of `every`, whatever was reused
        (350, (), 0, [Segment(0, 350, (100, 200, 300))]),
        (350, (), 130, [Segment(130, 350, (200, 300))]),
        (350, (), 300, [Segment(300, 350)]),
        (300, (), 99, [Segment(99, 300, (100, 200))]),
        (350, (250,), 0, [Segment(0, 250, (100, 200, 250)), Segment(250, 350, (300,))]),
        (350, (200,), 0, [Segment(0, 200, (100, 200)), Segment(200, 350, (300,))]),
    ],
)
def test_segments(tokens: int, turns: tuple[int, ...], reused: int, expected: list[Segment]) -> None:
    assert segments(tokens, turns, reused, RULE) == expected


def test_without_a_rule_there_is_one_segment() -> None:
    assert segments(350, (50, 200), 7, None) == [Segment(7, 350)]


def test_every_0_leaves_the_turns() -> None:
    assert segments(350, (250,), 0, CheckpointRule(every=0, root=40)) == [Segment(0, 250, (250,)), Segment(250, 350)]


@given(st.integers(1, 700), st.lists(st.integers(1, 699), max_size=8), st.data())
def test_parts_cover_the_fresh_tokens_once_and_end_at_every_checkpoint(
    tokens: int, turns: list[int], data: st.DataObject
) -> None:
    turns = sorted({turn for turn in turns if turn < tokens})
    reused = data.draw(st.integers(0, tokens - 1))
    found = segments(tokens, turns, reused, RULE)
    parts = [part for segment in found for part in segment.parts()]
    assert [first for first, _ in parts] == [reused, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == tokens
    assert all(first < last for first, last in parts)
    stored = [position for segment in found for position in segment.checkpoints]
    assert stored == [last for _, last in parts[:-1]]
    # what is stored behind the reused prefix is what a read from the start would store there, its root apart
    whole = {position for segment in segments(tokens, turns, 0, RULE) for position in segment.checkpoints}
    assert set(stored) <= whole
    assert len({position for position in whole if position > reused} - set(stored)) <= 1


def test_turns_start_at_their_token_but_not_at_the_first() -> None:
    assert turn_positions([7, 1, 7, 7, 2], 7) == (2, 3)
    assert turn_positions([7, 1, 7], None) == ()
