"""Short reads: what decode windows read, and that nothing is touched for it."""

from __future__ import annotations

import policy_models as pm
import pytest

from strata_jax.policies.moves import MoveKind


@pytest.mark.parametrize(("fresh", "claimed"), [(1, True), (64, True), (65, False), (0, False)])
def test_up_to_64_fresh_tokens_touch_nothing(fresh: int, claimed: bool) -> None:
    stack = pm.make_stack()
    state = pm.ready(stack)
    facts = pm.ask("a", 1_000 + fresh, reused=1_000)
    assert stack.reads_by_windows(facts, fresh) is claimed
    if claimed:
        step = stack.before_read(state, facts, fresh)
        assert step.moves == ()
        assert step.state is state


def test_images_are_read_in_chunks_and_0_turns_short_reads_off() -> None:
    stack = pm.make_stack()
    assert not stack.reads_by_windows(pm.ask("a", 10, text_only=False), 10)
    off = pm.make_stack(short_read_tokens=0)
    assert "short_reads" not in off.names
    assert not off.reads_by_windows(pm.ask("a", 10), 10)


def test_a_short_segment_after_a_long_one_returns_the_loan_first() -> None:
    stack = pm.make_stack()
    facts = pm.ask("a", 2_030)
    reading = stack.before_read(pm.ready(stack), facts, 2_000).state
    step = pm.checked(stack, stack.before_read(reading, facts, 30))
    assert pm.kinds(step.moves) == [MoveKind.RETURN, MoveKind.REFILL]
