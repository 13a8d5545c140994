"""The published tables: what is in them, and that a file which breaks the schema is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from strata_jax.errors import ConfigError, FormatError
from strata_jax.reproduce.rows import FOLDER, TABLES, load_rows, load_tables, unit_of

ROW = {
    "id": "a-1", "kind": "memory", "hardware": {}, "software": {}, "model": {}, "settings": {}, "workload": {},
    "results": [{"metric": "lent_slots", "value": 3, "unit": "slots"}],
}  # fmt: skip


def write(folder: Path, name: str, *rows: dict) -> None:
    document = {"schema": 1, "source": "a report", "notes": [], "rows": list(rows)}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")


def test_every_published_cell_is_there() -> None:
    tables = load_tables()
    assert tuple(table.name for table in tables) == TABLES
    assert sum(len(table.rows) for table in tables) == 394
    assert sum(len(row.cells) for row in load_rows()) == 805
    assert len({row.id for row in load_rows()}) == 394


def test_units_follow_from_names() -> None:
    assert unit_of("prefill_tok_s") == "tok/s"  # not the s of seconds
    assert unit_of("vram_free_mib") == "MiB"
    assert unit_of("prompt_s") == "s"
    assert unit_of("colour") is None
    assert all(unit_of(cell.metric) == cell.unit for row in load_rows() for cell in row.cells)


def test_no_file_names_a_place_on_some_machine() -> None:
    for path in FOLDER.rglob("*.yaml"):
        assert not re.search(r"(?<![\w.~>/-])/(work|home|tmp|root|mnt|usr|etc)/", path.read_text(encoding="utf-8"))


def test_bounds_of_a_cell_come_from_its_range_or_its_runs() -> None:
    cells = {(row.id, cell.metric): cell for row in load_rows(["prefill_head_alias"]) for cell in row.cells}
    assert cells["alias-chunk-512.prefill", "prefill_tok_s"].bounds == (281.0, 306.1)
    assert cells["alias-port-default.cold", "decode_tok_s"].bounds == (34.7, 35.7)
    assert cells["alias-prod-change", "decode_change_pct"].bounds == (17.0, 23.0)
    assert cells["alias-slots-default", "lent_slots"].bounds is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "guess"}, "kind 'guess'"),
        ({"id": "A 1"}, "lower case"),
        ({"settings": [1]}, "settings is not a mapping"),
        ({"colour": 1}, "not in the schema ['colour']"),
        ({"results": []}, "no results"),
        ({"results": [{"metric": "lent_slots", "value": 3, "unit": "MiB"}]}, "its name says 'slots'"),
        ({"results": [{"metric": "lent_slots", "unit": "slots"}]}, "no value"),
        ({"results": [{"metric": "lent_slots", "value": 3, "range": [4, 5], "unit": "slots"}]}, "outside its range"),
        ({"results": [{"metric": "lent_slots", "range": [5, 4], "unit": "slots"}]}, "an interval is [low, high]"),
        ({"results": [{"metric": "lent_slots", "value": 3, "unit": "slots", "stat": "mode"}]}, "statistic 'mode'"),
    ],
)
def test_broken_rows_are_refused(tmp_path: Path, change: dict, words: str) -> None:
    write(tmp_path, "broken", {**ROW, **change})
    with pytest.raises(FormatError, match=re.escape(words)):
        load_tables(["broken"], tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write(tmp_path, "broken", {key: value for key, value in ROW.items() if key != "workload"})
    with pytest.raises(FormatError, match="missing \\['workload'\\]"):
        load_tables(["broken"], tmp_path)


def test_an_id_is_unique_over_all_files(tmp_path: Path) -> None:
    write(tmp_path, "one", ROW)
    write(tmp_path, "two", ROW)
    with pytest.raises(FormatError, match="id a-1 is also in one"):
        load_tables(["one", "two"], tmp_path)


def test_an_unknown_table_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"no published table rtx9999.*kv_grow"):
        load_tables(["rtx9999"])
