"""Tables: readable without a terminal, with and without colour."""

from __future__ import annotations

import io

import pytest

from strata_jax.report.summary import complete
from strata_jax.report.tables import console, format_value, result_table, table, table_text


def test_a_table_on_a_pipe_has_no_escape_codes_and_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = io.StringIO()
    console(stream).print(table("Sizes", ("part", "bytes"), [("experts", 1234567), ("head", 8)]))
    assert "\x1b" not in stream.getvalue()
    assert "1,234,567" in stream.getvalue()


def test_no_color_is_respected_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert console().no_color


def test_plain_text_of_a_table_ends_no_line_with_spaces() -> None:
    text = table_text(table("T", ("a", "b"), [("x", None), ("y", 1.23456)]))
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "1.235" in text


def test_result_table_shows_fields_that_have_a_value() -> None:
    text = table_text(result_table(complete({"ttft_ms": 12.0, "peak_ram_bytes": 3 * 2**20, "hit_rate": None})))
    assert "ttft_ms" in text
    assert "3.0 MiB" in text
    assert "hit_rate" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (True, "yes"), (1234, "1,234"), (0.00012346, "0.0001235"), (12345.67, "12,345.7")]
)
def test_numbers_are_shown_with_four_digits(value: object, text: str) -> None:
    assert format_value(value) == text
