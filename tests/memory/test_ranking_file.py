"""Files of expert rankings: both formats, what is wrong with hostile ones, and writing in one step."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jax.errors import ConfigError, FormatError
from strata_jax.memory.expert_ranking import ExpertRanking
from strata_jax.memory.ranking_file import (
    MAX_FILE_BYTES,
    check_target,
    parse_own,
    parse_strp,
    ranking_text,
    read_ranking,
    write_ranking,
)

PAIRS = ((1, 2), (0, 0), (1, 0))
LEARNED = ExpertRanking(2, 3, False, PAIRS, "toy", (3.0, 1.5, 0.0), {"slots": 2, "prior_digest": None})


def strp(
    pairs: tuple[tuple[int, int], ...] = PAIRS, *, magic: bytes = b"STRP", version: int = 1, layers: int = 2,
    experts: int = 3, slots: int = 3, ranked: int | None = None, table: dict[tuple[int, int], int] | None = None,
    tail: bytes = b"",
) -> bytes:  # fmt: skip
    """Return an STRP file as planning notes 4.5 describe it, by hand."""
    cells = [-1] * (layers * experts)
    for (layer, expert), rank in ({pair: r for r, pair in enumerate(pairs)} | (table or {})).items():
        cells[layer * experts + expert] = rank
    head = struct.pack("<4s5I", magic, version, layers, experts, slots, len(pairs) if ranked is None else ranked)
    body = b"".join(struct.pack("<HH", *pair) for pair in pairs)
    return head + body + struct.pack(f"<{len(cells)}i", *cells) + tail


def own(**changes: Any) -> bytes:
    return json.dumps(json.loads(ranking_text(LEARNED)) | changes).encode()


def test_a_strp_file_is_read() -> None:
    found = parse_strp(strp(), "p.bin")
    assert (found.num_layers, found.num_experts, found.with_draft, found.pairs) == (2, 3, False, PAIRS)
    assert (found.model, found.usage, found.file) == (None, (), "p.bin")
    assert found.provenance == {"read_from": "STRP version 1", "slots": 3}


def test_experts_beyond_the_slots_may_be_missing_in_the_table() -> None:
    found = parse_strp(strp(slots=1, table={(0, 0): -1, (1, 0): -1}), "p.bin")
    assert found.pairs == PAIRS
    with pytest.raises(FormatError, match="gives expert 2 of layer 1 rank -1; it has rank 0"):
        parse_strp(strp(slots=1, table={(1, 2): -1}), "p.bin")


BROKEN_STRP = [
    (strp()[:20], "20 bytes; the header of an STRP file has 24"),
    (strp(magic=b"STRQ"), r"begins with b'STRQ'"),
    (strp(version=2), "STRP version 2; this program reads version 1"),
    (strp()[:-1], "59 bytes; an STRP file of 3 ranked experts of 6 has 60"),
    (strp(tail=b"x"), "61 bytes; an STRP file of 3 ranked experts of 6 has 60"),
    (strp(ranked=7), "7 ranked experts; 2 layers of 3 have 6"),
    (strp(ranked=2), "60 bytes; an STRP file of 2 ranked experts of 6 has 56"),
    (struct.pack("<4s5I", b"STRP", 1, 2**32 - 1, 2**32 - 1, 0, 0), "4294967295 layers; 1 to 4096 can be"),
    (struct.pack("<4s5I", b"STRP", 1, 4096, 2**32 - 1, 0, 0), "4294967295 experts a layer; 1 to 65536"),
    (struct.pack("<4s5I", b"STRP", 1, 0, 3, 0, 0), "0 layers; 1 to 4096"),
    (struct.pack("<4s5I", b"STRP", 1, 4096, 65536, 0, 0), "24 bytes; an STRP file of 0 ranked experts of 268435456"),
    (strp(((1, 2), (0, 0), (1, 2)), table={(1, 2): 0}), "ranks 0 and 2 are both expert 2 of layer 1"),
    (strp()[:24] + struct.pack("<H", 2) + strp()[26:], "rank 0 is expert 2 of layer 2; there are layers 0 to 1"),
    (strp()[:26] + struct.pack("<H", 3) + strp()[28:], "rank 0 is expert 3 of layer 1; .* experts 0 to 2"),
    (strp(table={(0, 0): 2}), "gives expert 0 of layer 0 rank 2; it has rank 1"),
    (strp(table={(0, 1): 5}), "gives expert 1 of layer 0 rank 5; it is not ranked"),
]


@pytest.mark.parametrize(("raw", "message"), BROKEN_STRP, ids=[message[:40] for _, message in BROKEN_STRP])
def test_broken_strp_files_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_strp(raw, "p.bin")


BROKEN_OWN = [
    (b"", "neither STRP nor JSON"),
    (b"\xff\xfe\xff", "neither STRP nor JSON"),
    (b"[" * 100_000, "neither STRP nor JSON"),
    (b'{"a": ' + b"9" * 5000 + b"}", "neither STRP nor JSON"),
    (b"[1]", 'a JSON object with "format"'),
    (own(format="other"), 'a JSON object with "format"'),
    (own(version=2), "version 2; this program reads version 1"),
    (own(version=True), "version True"),
    (own(extra=1), "unknown: \\['extra'\\]"),
    (json.dumps({"format": LEARNED and "strata-jax expert ranking", "version": 1}).encode(), "entries missing"),
    (own(num_layers="2"), "they must be integers"),
    (own(num_layers=True), "they must be integers"),
    (own(num_experts=10**30), "experts a layer; 1 to 65536 can be"),
    (own(with_draft=1), "with_draft is 1; it must be true or false"),
    (own(model=7), "model is 7"),
    (own(pairs={}), "pairs is {}"),
    (own(pairs=[[1, 2], [0, 0], [1]]), "rank 2 is \\[1\\]"),
    (own(pairs=[[1, 2.0]]), "rank 0 is \\[1, 2.0\\]"),
    (own(pairs=[[-1, 2]], usage=[]), "rank 0 is expert 2 of layer -1"),
    (own(pairs=[[2, 0]], usage=[]), "rank 0 is expert 0 of layer 2; there are layers 0 to 1"),
    (own(pairs=[[10**40, 2]], usage=[]), "there are layers 0 to 1"),
    (own(pairs=[[1, 2], [0, 0], [1, 2]]), "ranks 0 and 2 are both expert 2 of layer 1"),
    (own(usage=[1]), "usage has 1 numbers for 3 pairs"),
    (own(usage=7), "usage has 7 numbers"),
    (own(usage=[1, -0.5, 0]), "the usage of rank 1 is -0.5"),
    (own(usage=[1, True, 0]), "the usage of rank 1 is True"),
    (own().replace(b"1.5", b"1e999"), "the usage of rank 1 is inf"),
    (own().replace(b"1.5", b"NaN"), "neither STRP nor JSON .NaN is no number"),
    (own(provenance=[]), "provenance is \\[\\]"),
    (own(provenance={"a": 1.5}), "provenance has 'a': 1.5"),
]


@pytest.mark.parametrize(("raw", "message"), BROKEN_OWN, ids=[message[:40] for _, message in BROKEN_OWN])
def test_broken_files_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_own(raw, "r.json")


@pytest.mark.parametrize("base", [strp(), own(), ranking_text(LEARNED).encode()], ids=["strp", "json", "written"])
@given(data=st.data())
def test_changed_bytes_give_a_ranking_or_our_error(base: bytes, data: st.DataObject) -> None:
    raw = bytearray(base)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    parse = parse_strp if raw[:4] == b"STRP" else parse_own
    try:
        found = parse(bytes(raw), "f")
    except FormatError:
        return
    assert len(set(found.pairs)) == len(found.pairs) <= found.num_blocks * found.num_experts


@given(raw=st.binary(max_size=200).map(lambda tail: b"STRP" + tail) | st.binary(max_size=200))
def test_any_bytes_give_a_ranking_or_our_error(raw: bytes) -> None:
    for parse in (parse_strp, parse_own):
        try:
            parse(raw, "f")
        except FormatError:
            continue


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_ranking(path, LEARNED)
    found = read_ranking(path)
    assert found == LEARNED
    assert (found.model, found.usage, found.provenance, found.file) == (
        "toy", (3.0, 1.5, 0.0), {"slots": 2, "prior_digest": None}, str(path)
    )  # fmt: skip
    assert path.read_text() == ranking_text(found)
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    (tmp_path / "p.bin").write_bytes(strp())
    assert read_ranking(tmp_path / "p.bin") == LEARNED  # the same order


def test_rankings_are_equal_in_their_order_alone() -> None:
    assert ExpertRanking(2, 3, False, PAIRS) == LEARNED
    assert hash(ExpertRanking(2, 3, False, PAIRS)) == hash(LEARNED)
    for other in ((2, 3, True, PAIRS), (2, 4, False, PAIRS), (2, 3, False, PAIRS[::-1]), (2, 3, False, PAIRS[:2])):
        assert ExpertRanking(*other) != LEARNED


def test_a_failure_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_ranking(path, LEARNED)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"r\.json: the ranking of experts cannot be written: No space"):
        write_ranking(path, ExpertRanking(2, 3, False, PAIRS[::-1], "toy"))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_ranking(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_ranking(tmp_path)
    with (tmp_path / "big").open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(FormatError, match="67,108,865 bytes; a ranking of experts has 67,108,864 at most"):
        read_ranking(tmp_path / "big")


TARGETS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_text("my notes"), "exists and is no ranking of experts"),
    (lambda path: path.write_bytes(strp()), "is an STRP file, which would be lost"),
    (lambda path: path.write_bytes(own(model="other")), "ranks the experts of 'other', 2 layers of 3; this model is"),
    (lambda path: path.write_bytes(own(model=None)), "ranks the experts of an unnamed model"),
    (lambda path: path.write_bytes(own(num_layers=3)), "'toy', 3 layers of 3; this model is 'toy', 2 layers of 3"),
    (lambda path: path.mkdir(), "exists and is no ranking of experts"),
]


@pytest.mark.parametrize(("make", "message"), TARGETS, ids=[message[:30] for _, message in TARGETS])
def test_no_other_file_is_written_over(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "r.json"
    make(path)
    with pytest.raises(ConfigError, match=message):
        check_target(path, "toy", 2, 3)


def test_a_new_file_and_the_same_models_may_be_written(tmp_path: Path) -> None:
    check_target(tmp_path / "r.json", "toy", 2, 3)
    write_ranking(tmp_path / "r.json", LEARNED)
    check_target(tmp_path / "r.json", "toy", 2, 3)
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        check_target(tmp_path / "nowhere" / "r.json", "toy", 2, 3)


def test_a_large_model_is_read_at_once() -> None:
    """24,576 experts, as the published model has them."""
    order = np.random.default_rng(0).permutation(48 * 512)
    pairs = tuple((int(code) // 512, int(code) % 512) for code in order)
    found = parse_strp(strp(pairs, layers=48, experts=512, slots=len(pairs)), "p.bin")
    assert found.pairs == pairs
    assert parse_own(ranking_text(found).encode(), "r.json") == found
