"""Hostile headers: any bytes give a FormatError or a model, never another exception, a hang or a large allocation."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_jax.errors import FormatError
from strata_jax.geometry import Geometry, size_table
from strata_jax.gguf.header import MAX_KEYS, MAX_TENSORS
from strata_jax.gguf.reader import open_gguf
from tests.gguf.model_files import model_file, small_keys, small_shapes
from tests.gguf.tiny_writer import File, Key, Tensor, array, scalar, small_file, string

ALLOWANCE_BYTES = 64 * 2**20


def _split_file() -> File:
    file = small_file()
    file.keys += [("split.no", scalar("u16", 0)), ("split.count", scalar("u16", 1))]
    file.keys += [("split.tensors.count", scalar("i32", 3)), ("general.alignment", scalar("u32", 32))]
    return file


BASES = (small_file(), _split_file(), model_file(small_keys(), small_shapes()))
HEADERS = tuple(base.header() for base in BASES)
DATA_BYTES = tuple(base.data_bytes() + 32 for base in BASES)
HUGE = (0, 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[bytes, int]:
    """Return header bytes after one to four mutations, and the size of the file they stand in."""
    base = draw(st.integers(0, len(HEADERS) - 1))
    raw = bytearray(HEADERS[base])
    file_bytes = len(raw) + DATA_BYTES[base]
    for _ in range(draw(st.integers(1, 4))):
        # short distances too: the interesting fields crowd at the start
        at = min(draw(st.one_of(st.integers(0, 64), st.integers(0, max(len(raw) - 1, 0)))), max(len(raw) - 1, 0))
        match draw(st.sampled_from(("flip", "cut", "insert", "remove", "number"))):
            case "flip" if raw:
                raw[at] ^= draw(st.integers(1, 255))
            case "cut":
                del raw[at:]
                file_bytes = len(raw)
            case "insert":
                raw[at:at] = draw(st.binary(min_size=1, max_size=24))
            case "remove":
                del raw[at : at + draw(st.integers(1, 24))]
            case "number":
                value, code = draw(st.sampled_from(HUGE)), draw(st.sampled_from("IQ"))
                raw[at : at + struct.calcsize(code)] = struct.pack(
                    "<" + code, value & (2**32 - 1 if code == "I" else -1)
                )
    return bytes(raw), max(file_bytes, len(raw))


def use(path: Path) -> bool:
    """Open a file and use all of it; return whether it was a model."""
    with contextlib.suppress(FormatError), open_gguf(path) as file:
        for key in file.metadata:
            assert file.metadata[key] is not None
        for name, info in file.tensors.items():
            if not info.type_name.startswith("unknown"):
                assert file.data(name).nbytes == info.num_bytes
        geometry = Geometry.from_gguf(file)
        assert sum(row.num_bytes for row in size_table(geometry)) == sum(t.num_bytes for t in file.tensors.values())
        return True
    return False


@contextlib.contextmanager
def bounded_memory(limit_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak} bytes were allocated; the limit is {limit_bytes}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.gguf"


def write(path: Path, raw: bytes, file_bytes: int) -> None:
    with path.open("wb") as out:
        out.write(raw)
        out.truncate(file_bytes)


def test_the_unmutated_headers_are_read(path: Path) -> None:
    for raw, data_bytes, is_model in zip(HEADERS, DATA_BYTES, (False, False, True), strict=True):
        write(path, raw, len(raw) + data_bytes)
        assert use(path) is is_model


@given(mutated())
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_mutated_headers(path: Path, case: tuple[bytes, int]) -> None:
    raw, file_bytes = case
    write(path, raw, file_bytes)
    with bounded_memory(file_bytes + ALLOWANCE_BYTES):
        use(path)


@given(st.binary(max_size=300), st.sampled_from((b"", b"GGUF", b"GGUF\x03\0\0\0", b"GGUF\x02\0\0\0")))
@settings(max_examples=150, deadline=None)
def test_random_bytes_are_refused(path: Path, raw: bytes, start: bytes) -> None:
    write(path, start + raw, len(start + raw))
    use(path)


# ---------------------------------------------------------------- the dearest headers: what they cost before they fail
def _refused_within_bounds(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with bounded_memory(len(raw) + ALLOWANCE_BYTES), pytest.raises(FormatError) as caught:
        open_gguf(path)
    return str(caught.value)


def test_memory_of_the_largest_number_of_tensors(path: Path) -> None:
    """All records valid but the last; names as long as allowed and stored four bytes a character."""
    tensors = [Tensor(f"\U0001f600{i:05d}".ljust(61, "x"), (1, 1, 1, 1), offset=32 * i) for i in range(MAX_TENSORS)]
    tensors[-1].offset = 2**50
    raw = File(tensors=tensors).header()
    assert "lies outside the file" in _refused_within_bounds(path, raw + bytes(32 * MAX_TENSORS + 64))


def test_memory_of_the_largest_number_of_keys(path: Path) -> None:
    keys: list[Key] = [(f"\U0001f600{i:05d}".ljust(1021, "x"), scalar("u8", 1)) for i in range(MAX_KEYS - 1)]
    assert "value type 99" in _refused_within_bounds(path, File(keys=[*keys, ("bad", struct.pack("<I", 99))]).header())


def test_memory_of_long_arrays_and_strings_before_a_broken_key(path: Path) -> None:
    keys: list[Key] = [
        ("strings", array("string", ["é"] * 300_000)),
        ("text", string("é\U0001f600" * 3_000_000)),
        ("numbers", array("f64", [0.0] * 1_000_000)),
        ("bad", struct.pack("<I", 99)),
    ]
    raw = File(keys=keys).header()
    with bounded_memory(8 * 2**20):
        path.write_bytes(raw)
        with pytest.raises(FormatError, match="value type 99"):
            open_gguf(path)


def test_a_long_string_in_place_of_a_number_is_not_decoded(path: Path) -> None:
    keys = {**small_keys(), "block_count": "\U0001f600" + "x" * 10_000_000}
    path.write_bytes(model_file(keys, {}).header())
    with (
        bounded_memory(8 * 2**20),
        open_gguf(path) as file,
        pytest.raises(FormatError, match=r"block_count.* string .*expected an integer"),
    ):
        Geometry.from_gguf(file)
