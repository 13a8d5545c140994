"""Streamed text: whole characters, nothing of a stop text, and the same text however it comes in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata_jax.engine.text_stream import TextStream
from strata_jax.errors import ConfigError

LETTERS = "ab\u00e9\u20ac\U0001f638\ufffd"  # characters of one to four bytes; U+FFFD is what broken bytes become
stops_of_letters = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
pieces_of_letters = st.lists(st.text(LETTERS, max_size=4).map(str.encode), max_size=12)
broken_pieces = st.lists(
    st.sampled_from([b"a", b"b", b"\xf0\x9f", b"\x98", b"\xb8", b"\xed\xa0", b"\xc0\xaf", b"\xff"])
)


def stream_of(pieces: Sequence[bytes | str], stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """Push the pieces as tokens; return what was shown for each, then at the end, and the stream."""
    bytes_of = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    stream = TextStream(bytes_of.__getitem__, stop)
    shown = [stream.push(token_id) for token_id in range(len(pieces))]
    return [*shown, stream.finish()], stream


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    found = [at for at in (text.find(one) for one in stop) if at >= 0]
    return text[: min(found)] if found else text


def test_V01_a_character_in_two_tokens_comes_whole() -> None:
    shown, stream = stream_of([b"ok ", b"\xf0\x9f", b"\x98\xb8", b"!"])
    assert shown == ["ok ", "", "\U0001f638", "!", ""]
    assert "".join(shown) == "ok \U0001f638!"
    assert "\ufffd" not in "".join(shown)
    assert not stream.stopped


def test_V03_a_stop_text_over_several_tokens_is_never_shown() -> None:
    shown, stream = stream_of(["The quick br", "own", " fox", " jumps"], ["own fox"])
    assert shown == ["The quick br", "", "", "", ""]
    assert stream.stopped  # the finish reason is "stop"
    assert stream.num_tokens == 3  # the last one came after the end


def test_a_stop_text_inside_one_token_ends_there() -> None:
    shown, stream = stream_of(["say STOP and more", " words"], ["STOP"])
    assert shown == ["say ", "", ""]
    assert stream.stopped


def test_what_might_have_become_a_stop_text_is_shown_when_it_does_not() -> None:
    assert stream_of(["a", "b", "x"], ["abc"])[0] == ["", "", "abx", ""]


def test_finish_gives_what_was_held_back() -> None:
    shown, stream = stream_of(["one ab"], ["abc"])
    assert shown == ["one ", "ab"]
    assert not stream.stopped
    assert stream.finish() == ""


def test_a_character_that_never_ends_becomes_a_replacement_character_at_the_end() -> None:
    assert stream_of([b"ok \xf0\x9f"])[0] == ["ok ", "\ufffd"]


@pytest.mark.parametrize(("following", "shown"), [("d", "x"), ("e", "xab"), (None, "xab")])
def test_of_stop_texts_that_overlap_the_one_that_begins_first_counts(following: str | None, shown: str) -> None:
    """ "c" is complete when "abcd" may still come: which of them counts is known with the next token."""
    pieces = ["xab", "c"] + ([following] if following else [])
    parts, stream = stream_of(pieces, ["c", "abcd"])
    assert "".join(parts) == shown
    assert stream.stopped


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload\.stop holds an empty text"):
        TextStream(lambda _: b"", ["a", ""])


@settings(max_examples=400, deadline=None)
@given(pieces_of_letters | broken_pieces, stops_of_letters)
@example([b"aab"], ["ab"])
@example([b"a", b"a", b"b"], ["aab", "a\ufffd"])
@example([b"\xf0\x9f", b"a"], ["\ufffda"])
def test_text_is_that_of_the_whole_cut_at_the_first_stop(pieces: list[bytes], stop: list[str]) -> None:
    whole = cut_at_stop(b"".join(pieces).decode("utf-8", "replace"), stop)
    shown, stream = stream_of(pieces, stop)
    assert "".join(shown) == whole
    assert all(part.encode().decode() == part for part in shown)
    assert stream.stopped == any(one in b"".join(pieces).decode("utf-8", "replace") for one in stop)


@settings(max_examples=200, deadline=None)
@given(st.text(LETTERS, max_size=20), st.lists(st.integers(0, 60), max_size=8), stops_of_letters)
def test_cutting_the_bytes_elsewhere_changes_nothing(text: str, cuts: list[int], stop: list[str]) -> None:
    data = text.encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(places)]
    shown = "".join(stream_of(pieces, stop)[0])
    assert shown == cut_at_stop(text, stop)
    assert shown == "".join(stream_of([data], stop)[0])


@settings(max_examples=200, deadline=None)
@given(pieces_of_letters, stops_of_letters)
def test_nothing_is_held_back_without_need(pieces: list[bytes], stop: list[str]) -> None:
    """Before the end, what is held could begin a stop text."""
    stream = TextStream(pieces.__getitem__, stop)
    text = shown = ""
    for token_id, piece in enumerate(pieces):
        text += piece.decode()
        shown += stream.push(token_id)
        held = text[len(shown) :]
        assert stream.stopped or not held or any(one.startswith(held[: len(one)]) for one in stop)
