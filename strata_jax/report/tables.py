"""Tables on the terminal and in text files. Without a terminal, or with NO_COLOR, they come out as plain text."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from strata_jax.report.summary import FIELDS

PIPE_WIDTH = 120  # columns when nobody says how wide the output is

# fields of the summary that a reader sees first, in this order
RESULT_FIELDS = (
    "model",
    "device",
    "num_requests",
    "prompt_tokens",
    "fresh_tokens",
    "reused_tokens",
    "output_tokens",
    "draft_tokens",
    "draft_accepted_tokens",
    "ttft_ms",
    "prompt_tok_s",
    "decode_tok_s",
    "hit_rate",
    "prompt_hit_rate",
    "first_run_s",
    "median_run_s",
    "compile_s",
    "load_s",
    "peak_device_bytes",
    "peak_ram_bytes",
)


def console(stream: IO[str] | None = None) -> Console:
    """Return a console for `stream` (default: stdout) that degrades on pipes."""
    target: IO[str] = sys.stdout if stream is None else stream
    width = None if target.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=target, width=width, highlight=False, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table; columns that only hold numbers stand to the right."""
    built = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = all(_is_number(row[index]) for row in rows) and bool(rows)
        built.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        built.add_row(*(format_value(value) for value in row))
    return built


def table_text(built: Table, width: int = PIPE_WIDTH) -> str:
    """Return a table as plain text, for plan.txt and logs."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, no_color=True, highlight=False).print(built)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def result_table(summary: Mapping[str, Any]) -> Table:
    """Return the result table of a run: the fields that have a value, with what they mean."""
    rows = [
        (name, format_field(name, summary[name]), FIELDS[name])
        for name in RESULT_FIELDS
        if summary.get(name) is not None
    ]
    return table("Result", ("field", "value", "meaning"), rows)


def format_field(name: str, value: Any) -> str:
    """Return a summary value with its unit where the name has one."""
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**20:,.1f} MiB"
    return format_value(value)


def format_value(value: Any) -> str:
    """Return a value for a cell: thousands separated, four significant digits for fractions."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
