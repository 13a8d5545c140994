"""Who may be parked and who goes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from strata_jax.policies.admission import MIB, make_room, ram_refusal, with_checkpoint


@dataclass(frozen=True)
class Facts:
    name: str
    bytes: int
    order: int
    pinned: bool = False


A, B, C = Facts("A", 30, 1), Facts("B", 40, 3), Facts("C", 20, 2)


def room(size: int, *, leaving: str = "X", incoming: str = "Y", parked: tuple = (A, B, C), budget: int = 100,
         most: int = 4) -> tuple[str, str] | str:  # fmt: skip
    found = make_room(parked, leaving, incoming, size, budget, most)
    return found if isinstance(found, str) else ("".join(c.name for c in found[0]), "".join(c.name for c in found[1]))


@pytest.mark.parametrize(
    ("size", "expected"),
    [(10, ("ACB", "")), (11, ("CB", "A")), (40, ("CB", "A")), (41, ("B", "AC")), (60, ("B", "AC")), (61, ("", "ACB"))],
)
def test_the_oldest_go_until_the_budget_holds(size: int, expected: tuple[str, str]) -> None:
    assert room(size) == expected


def test_more_than_the_budget_is_not_parked_and_nothing_goes_for_it() -> None:
    assert "conversation.budget_mib" in str(room(101))
    assert room(100) == ("", "ACB")


def test_the_count_is_a_limit_too() -> None:
    assert room(1, most=3) == ("CB", "A")
    assert room(1, most=1) == ("", "ACB")
    assert "conversation.slots=0" in str(room(1, most=0))


def test_older_images_of_the_leaving_one_go_first() -> None:
    assert room(30, leaving="B") == ("AC", "B")
    assert room(1, leaving="B") == ("AC", "B")


def test_pinned_ones_and_the_one_that_is_about_to_be_restored_stay() -> None:
    assert room(20, incoming="A") == ("AB", "C")
    pinned = Facts("A", 30, 1, pinned=True)
    assert room(60, parked=(pinned, B, C)) == ("A", "CB")
    assert "no room" in str(room(71, parked=(pinned, B, C)))
    assert "slots=2" in str(room(1, parked=(pinned, B, C), incoming="C", most=2))


@pytest.mark.parametrize(
    ("available", "size", "floor", "refused"),
    [
        (None, 0, 0, "unknown"),
        (100 * MIB, 60 * MIB, 40 * MIB, None),
        (100 * MIB, 60 * MIB + 1, 40 * MIB, "conversation.min_free_mib=40"),
        (39 * MIB, 0, 40 * MIB, "conversation.min_free_mib=40"),
        (40 * MIB, 0, 40 * MIB, None),
    ],
)
def test_ram_that_must_stay_free_stays_free(available: int | None, size: int, floor: int, refused: str | None) -> None:
    found = ram_refusal(available, size, floor)
    assert (found is None) == (refused is None)
    assert refused is None or refused in str(found)


def test_the_root_stays_and_the_oldest_of_the_others_goes() -> None:
    def stored(capacity: int) -> tuple[int, ...]:
        kept: tuple[int, ...] = ()
        for i in range(1, 7):
            kept = with_checkpoint(kept, i, capacity)
        return kept

    assert stored(3) == (1, 5, 6)
    assert stored(2) == (1, 6)
    assert stored(1) == (6,)
    assert stored(9) == (1, 2, 3, 4, 5, 6)
