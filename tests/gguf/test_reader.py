"""The reader: what it accepts, and one broken file per rule, with the numbers that its error must name."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from strata_jax.errors import FormatError
from strata_jax.gguf.cursor import Cursor
from strata_jax.gguf.header import MAX_KEYS, MAX_TENSORS, parse_header
from strata_jax.gguf.reader import GGUFFile, open_gguf
from tests.calls import num_calls
from tests.gguf.tiny_writer import File, Key, Tensor, array, scalar, small_file, string, text


def refusal(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert str(path.parent) in message, "the error must name the file"
    return message


def has(message: str, *parts: object) -> None:
    for part in parts:
        assert re.search(rf"(?<!\d){re.escape(str(part))}(?!\d)", message), f"{part!r} is not in: {message}"


# ---------------------------------------------------------------- what is read
@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_scalar_and_array_width(tmp_path: Path, version: int) -> None:
    ints = {
        "u8": 250,
        "i8": -3,
        "u16": 65535,
        "i16": -300,
        "u32": 2**32 - 1,
        "i32": -70000,
        "u64": 2**64 - 1,
        "i64": -1,
    }
    keys: list[Key] = [(kind, scalar(kind, value)) for kind, value in ints.items()]
    keys += [(f"{kind}s", array(kind, [value, 1])) for kind, value in ints.items()]
    keys += [("f32", scalar("f32", 0.5)), ("f64", scalar("f64", 1e300)), ("f32s", array("f32", [1.5, -2.0]))]
    keys += [("yes", scalar("bool", 1)), ("bools", array("bool", [0, 1, 1])), ("empty", array("u32", []))]
    keys += [("s", string("ä\0b")), ("words", array("string", ["", "é", "x"])), ("none", array("string", []))]
    with open_gguf(File(keys=keys, version=version).write(tmp_path / "m.gguf")) as file:
        assert file.version == version
        metadata = file.metadata
        for kind, value in ints.items():
            assert metadata[kind] == value
            assert type(metadata[kind]) is int
            found = metadata[f"{kind}s"]
            assert isinstance(found, np.ndarray)
            assert found.tolist() == [value, 1]
            assert found.dtype == np.dtype(f"{kind[0]}{int(kind[1:]) // 8}")
            assert not found.flags.writeable
        assert metadata["f32"] == 0.5
        assert metadata["f64"] == 1e300
        assert metadata["yes"] is True
        bools = metadata["bools"]
        assert isinstance(bools, np.ndarray)
        assert bools.dtype == np.bool_
        assert bools.tolist() == [False, True, True]
        assert metadata["s"] == "ä\0b"
        assert metadata["words"] == ["", "é", "x"]
        assert metadata["none"] == []
        assert len(metadata) == len(keys)
        assert list(metadata)[:2] == ["u8", "i8"]
        assert metadata.type_of("u16s") == "uint16[2]"
        assert metadata.count_of("words") == 3
        with pytest.raises(KeyError):
            metadata["absent"]


def test_agrees_with_the_gguf_package_on_a_file_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen4exp")
    writer.add_custom_alignment(64)
    writer.add_token_list([f"tok{i}" for i in range(500)])
    rng = np.random.default_rng(0)
    arrays = {"a": rng.random((3, 5), np.float32), "b": rng.random(64, np.float32).astype(np.float16)}
    for name, values in arrays.items():
        writer.add_tensor(name, values)
    packed = gguf.quants.quantize(rng.random((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as file:
        assert file.metadata["tokenizer.ggml.tokens"] == [f"tok{i}" for i in range(500)]
        np.testing.assert_array_equal(file.data("a").view(np.float32), arrays["a"])
        np.testing.assert_array_equal(file.data("b").view(np.float16), arrays["b"])
        np.testing.assert_array_equal(file.data("q"), packed)
        info = file.tensors["q"]
        assert (info.shape, info.type_name, info.num_elements) == ((4, 64), "Q8_0", 256)
        assert (info.num_bytes, info.row_bytes) == (4 * 68, 68)
        assert info.offset_bytes % 64 == 0
        assert not file.data("a").flags.writeable


def test_views_and_metadata_outlive_the_file_object(tmp_path: Path) -> None:
    with open_gguf(small_file().write(tmp_path / "m.gguf")) as file:
        view = file.data("t0.weight")
        metadata = file.metadata
    assert view.shape == (16, 256)
    assert view[0, :5].tolist() == [0, 1, 2, 3, 4]
    assert metadata["a.words"] == ["one", "two", "drei"]
    with pytest.raises(ValueError, match="was closed"):
        file.data("t0.weight")


def test_gaps_between_tensors_and_bytes_behind_them_are_allowed(tmp_path: Path) -> None:
    file = File(tensors=[Tensor("b", (8,), offset=64), Tensor("a", (8,), offset=0)])
    path = tmp_path / "m.gguf"
    path.write_bytes(file.encode() + bytes(100))
    assert list(open_gguf(path).tensors) == ["b", "a"]


def test_last_tensor_needs_no_padding_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(File(tensors=[Tensor("a", (3,))]).encode()[:-20])
    assert open_gguf(path).data("a").shape == (12,)


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A buffer that ends where the data begins is enough, and a terabyte of data costs nothing."""
    file = File(tensors=[Tensor("huge", (2**20, 2**18)), Tensor("next", (32,), offset=2**40)])
    header = file.header()
    header += bytes(-len(header) % 32)
    parsed = parse_header(header, len(header) + 2**40 + 128, tmp_path)
    assert [t.offset_bytes for t in parsed.tensors] == [len(header), len(header) + 2**40]
    assert parsed.tensors[0].num_bytes == 2**40


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_opening_a_large_file_costs_no_memory_and_touches_no_data(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    file = File(tensors=[Tensor("a", (700, 2**20))], keys=[("general.architecture", string("x"))])
    with path.open("wb") as out:
        out.write(file.header())
        out.truncate(len(file.header()) + 64 + 4 * 700 * 2**20)
    before = _anonymous_bytes()
    with open_gguf(path) as opened:
        view = opened.data("a")
        assert view.nbytes == 4 * 700 * 2**20
        assert _anonymous_bytes() - before < 32 * 2**20
        mapped = Path("/proc/self/smaps").read_text().split(str(path))[1]
        assert int(re.search(r"Rss:\s+(\d+) kB", mapped)[1]) < 4096  # type: ignore[index]


def test_a_vocabulary_of_248k_tokens_is_read_with_two_calls_a_token(tmp_path: Path) -> None:
    words = [f"token{i}" for i in range(248_320)]
    path = File(keys=[("t", array("string", words)), ("m", array("string", words))]).write(tmp_path / "m.gguf")
    opened: list[GGUFFile] = []
    assert num_calls(lambda: opened.append(open_gguf(path))) < 2 * 2 * len(words) + 1000
    assert opened[0].metadata["t"] == opened[0].metadata["m"] == words


# ---------------------------------------------------------------- not a GGUF at all
@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
        (b"<html>", "HTML"),
        (b'{"error": "Entry not found"}', "JSON"),
        (b"PK\x03\x04" + bytes(40), "ZIP"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{"format":"pt"}}' + bytes(40), "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
        (b"\x1f\x8b" + bytes(40), "gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(40), "zstd"),
        (b"lmgg" + bytes(40), "before GGUF"),
        (b"tjgg" + bytes(40), "before GGUF"),
        (b"\x93NUMPY" + bytes(40), "NumPy"),
        (b"\x80\x02}q\x00", "pickle"),
        (bytes(1000), "zero"),
        (b"hello world", "68 65 6c 6c"),
        (b"GG", "47 47"),
    ],
)
def test_other_files_are_called_what_they_look_like(tmp_path: Path, start: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(start)
    message = refusal(path)
    assert words in message
    has(message, len(start), "at byte 0")


def test_missing_empty_directory_pipe_and_bad_name(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").touch()
    has(refusal(tmp_path / "empty.gguf"), "empty", "0 bytes")
    small_file().write(tmp_path / "model.gguf")
    has(refusal(tmp_path), "directory", "model.gguf")
    (tmp_path / "sub").mkdir()
    has(refusal(tmp_path / "sub"), "holds no .gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "regular file" in refusal(tmp_path / "pipe.gguf")
    assert "cannot be opened" in refusal(tmp_path / "a\0b.gguf")


# ---------------------------------------------------------------- versions and byte order
def test_G02_big_endian_file_is_called_big_endian(tmp_path: Path) -> None:
    """G02: magic as written in either order, version 3 and all numbers big-endian."""
    for magic in (b"GGUF", b"FUGG"):
        path = tmp_path / "m.gguf"
        path.write_bytes(struct.pack(">4sIQQ", magic, 3, 1, 5) + bytes(200))
        message = refusal(path)
        has(message, "big-endian", "version 3", "gguf-convert-endian")
        assert "50331648" not in message


def test_G02_big_endian_file_of_the_gguf_package(tmp_path: Path) -> None:
    """G02: the same, on a file that a real writer made."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen4exp", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    has(refusal(tmp_path / "m.gguf"), "big-endian", "version 3")


@pytest.mark.parametrize("version", [0, 1, 4, 999])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    has(refusal(File(version=version).write(tmp_path / "m.gguf")), f"version {version}", "2 and 3", "at byte 4")


# ---------------------------------------------------------------- cut off, hostile lengths
def test_G01_truncated_file_names_tensor(tmp_path: Path) -> None:
    """G01: the last 1000 bytes removed."""
    raw = small_file().encode()
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[:-1000])
    has(refusal(path), "'t2.weight'", "4096 bytes", f"{len(raw) - 1000} bytes", "1000 are missing")


def test_G01_offset_past_the_end_names_tensor(tmp_path: Path) -> None:
    """G01: the third tensor's offset lies past the end of the file; also when arithmetic in 64 bits would wrap."""
    for offset in (10**6 // 32 * 32, 2**64 - 32):
        file = small_file()
        size = len(file.encode())
        file.tensors[2].offset = offset
        path = tmp_path / "m.gguf"
        path.write_bytes(file.header() + bytes(size - len(file.header())))
        message = refusal(path)
        has(message, "'t2.weight'", "4096 bytes", f"{size} bytes")
        assert str(offset // 1000)[:4] in message


def test_first_tensor_out_of_bounds_is_the_one_named(tmp_path: Path) -> None:
    raw = small_file().encode()
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[: -3 * 4096 + 100])
    message = refusal(path)
    has(message, "'t0.weight'")
    assert "t1" not in message


def test_every_cut_in_the_header_is_an_error_with_an_offset(tmp_path: Path) -> None:
    file = small_file()
    header = file.header()
    for length in range(1, len(header)):
        with pytest.raises(FormatError, match=r"at byte \d+") as caught:
            parse_header(header[:length], length, tmp_path)
        if length > 24:
            assert re.search(rf"cut off|left in the file of {length}", str(caught.value)), (length, str(caught.value))


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 2**40, MAX_TENSORS + 1])
def test_hostile_counts(tmp_path: Path, value: int) -> None:
    file = small_file()
    file.num_tensors = value
    has(refusal(file.write(tmp_path / "m.gguf")), "tensor count", value, MAX_TENSORS, "at byte 8")
    file = small_file()
    file.num_keys = value
    has(refusal(file.write(tmp_path / "m.gguf")), "key count", value, MAX_KEYS, "at byte 16")


def test_counts_within_the_limit_but_beyond_the_file(tmp_path: Path) -> None:
    file = File(num_tensors=30_000)
    has(refusal(file.write(tmp_path / "m.gguf")), "tensor count", 30_000, 33 * 30_000)


@pytest.mark.parametrize("count", [2**64 - 1, 2**61, 100_000])
def test_hostile_array_lengths(tmp_path: Path, count: int) -> None:
    for kind, width in (("u64", 8), ("u8", 1), ("string", 8)):
        file = File(keys=[("arr", array(kind, [], count=count))])
        has(refusal(file.write(tmp_path / "m.gguf")), "'arr'", count, count * width)


def test_hostile_string_lengths(tmp_path: Path) -> None:
    for length in (2**64 - 1, 2**40, 500):
        file = File(keys=[("s", struct.pack("<IQ", 8, length) + b"abc")])
        has(refusal(file.write(tmp_path / "m.gguf")), "cut off", "'s'", length)
        file = File(keys=[("s", struct.pack("<IIQQ", 9, 8, 2, 1) + b"a" + struct.pack("<Q", length))])
        has(refusal(file.write(tmp_path / "m.gguf")), "cut off", "string 1", "'s'", length)


# ---------------------------------------------------------------- keys
def test_key_of_no_or_too_many_bytes(tmp_path: Path) -> None:
    has(refusal(File(keys=[("", scalar("u8", 1))]).write(tmp_path / "m.gguf")), "name of 0 bytes", "1 to 1024")
    has(refusal(File(keys=[("k" * 1025, scalar("u8", 1))]).write(tmp_path / "m.gguf")), 1025, "at byte 24")


def test_invalid_utf8(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    has(refusal(File(keys=[(b"ab\xff", scalar("u8", 1))]).write(path)), "not UTF-8", "key 0", "at byte 32")
    has(refusal(File(keys=[("s", string(b"ab\xff"))]).write(path)), "not UTF-8", "'s'")
    has(refusal(File(tensors=[Tensor(b"t\xc3", (8,))]).write(path)), "not UTF-8", "tensor 0")


@pytest.mark.parametrize("cut", [0, 1])
def test_long_strings_are_checked_across_step_borders(tmp_path: Path, cut: int) -> None:
    """A character on the border of two validation steps is fine; one cut off at the very end is not."""
    raw = b"a" * ((1 << 20) - 1) + "é".encode() + b"b" * 10 + "é".encode()
    path = File(keys=[("s", string(raw[: len(raw) - cut]))]).write(tmp_path / "m.gguf")
    if cut:
        has(refusal(path), "not UTF-8", "'s'")
    else:
        assert open_gguf(path).metadata["s"] == raw.decode()


def test_duplicate_key(tmp_path: Path) -> None:
    file = File(keys=[("k", scalar("u8", 1)), ("k", scalar("u8", 2))])
    has(refusal(file.write(tmp_path / "m.gguf")), "'k' appears twice", "byte 37", "at byte 38")


def test_unknown_value_type(tmp_path: Path) -> None:
    file = File(keys=[("k", struct.pack("<I", 13) + bytes(8))])
    has(refusal(file.write(tmp_path / "m.gguf")), "'k'", "value type 13", "0 to 12", "at byte 33")
    file = File(keys=[("k", struct.pack("<IIQ", 9, 77, 1) + bytes(8))])
    has(refusal(file.write(tmp_path / "m.gguf")), "'k'", "value type 77", "0 to 12")


def test_nested_arrays_are_refused(tmp_path: Path) -> None:
    file = File(keys=[("k", struct.pack("<IIQ", 9, 9, 1) + array("u8", [1]))])
    has(refusal(file.write(tmp_path / "m.gguf")), "'k'", "array of arrays")


def test_boolean_that_is_neither_0_nor_1(tmp_path: Path) -> None:
    file = File(keys=[("k", array("bool", [1, 0, 7, 9]))])
    has(refusal(file.write(tmp_path / "m.gguf")), "'k'", "boolean 2", "as 7", "at byte 51")


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31])
def test_alignment_that_is_no_power_of_two(tmp_path: Path, alignment: int) -> None:
    file = File(keys=[("general.alignment", scalar("u32", alignment))])
    has(refusal(file.write(tmp_path / "m.gguf")), "general.alignment", alignment, "power of two")


def test_alignment_of_another_type(tmp_path: Path) -> None:
    file = File(keys=[("general.alignment", string("32"))])
    has(refusal(file.write(tmp_path / "m.gguf")), "general.alignment", "string", "integer")


@pytest.mark.parametrize("alignment", [1, 8, 4096])
def test_alignment_is_honoured(tmp_path: Path, alignment: int) -> None:
    file = File(
        keys=[("general.alignment", scalar("u64", alignment))],
        tensors=[Tensor("a", (5,)), Tensor("b", (5,))],
        alignment=alignment,
    )
    opened = open_gguf(file.write(tmp_path / "m.gguf"))
    start = -(-len(file.header()) // alignment) * alignment
    assert opened.tensors["a"].offset_bytes == start
    assert opened.data("b")[0] == -(-20 // alignment) * alignment % 251


# ---------------------------------------------------------------- tensors
@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ([Tensor("a", (8,)), Tensor("a", (8,))], ("'a' appears twice",)),
        ([Tensor("a", (4, 0, 8))], ("'a'", "(4, 0, 8)", "at least 1")),
        ([Tensor("a", (), num_bytes=4)], ("'a' has 0 dimensions", "1 to 4")),
        ([Tensor("a", (1, 1, 1, 1, 8))], ("'a' has 5 dimensions", "1 to 4")),
        ([Tensor("a", (2**32, 2**31), num_bytes=32)], ("'a'", 2**63, "2^63 - 1")),
        ([Tensor("a", (2**63, 2, 2**63, 2), num_bytes=32)], ("'a'", 2**128)),
        ([Tensor("a", (3, 100), ggml_id=21, num_bytes=128)], ("'a' has rows of 100", "IQ3_S", "multiple of 256")),
        ([Tensor("a", (8,), offset=8)], ("'a' has offset 8", "alignment 32")),
        ([Tensor("a", (16,)), Tensor("b", (16,), offset=32)], ("'a'", "'b'", "overlap")),
        ([Tensor("a", (16,), offset=32), Tensor("b", (16,), offset=32)], ("'a'", "'b'", "overlap")),
        ([Tensor("x" * 65, (8,))], ("name of 65 bytes", "1 to 64")),
        ([Tensor("", (8,))], ("name of 0 bytes", "1 to 64")),
    ],
)
def test_broken_tensor_records(tmp_path: Path, tensors: list[Tensor], parts: tuple[object, ...]) -> None:
    message = refusal(File(tensors=tensors).write(tmp_path / "m.gguf"))
    has(message, *parts)
    assert re.search(r"at byte \d+", message)


def test_G07_unknown_tensor_type_keeps_the_rest_readable(tmp_path: Path) -> None:
    """G07: one tensor of a fork's type 153 next to known ones."""
    file = small_file()
    file.tensors[1].ggml_id = 153
    opened = open_gguf(file.write(tmp_path / "m.gguf"))
    assert opened.metadata["a.u32"] == 7
    assert [t.type_name for t in opened.tensors.values()] == ["F32", "unknown(153)", "F32"]
    assert opened.data("t2.weight").shape == (16, 256)
    odd = opened.tensors["t1.weight"]
    actions: list[Callable[[], object]] = [
        lambda: opened.data("t1.weight"),
        lambda: odd.num_bytes,
        lambda: odd.block_type,
    ]
    for action in actions:
        with pytest.raises(FormatError) as caught:
            action()
        has(str(caught.value), "'t1.weight'", 153)


# ---------------------------------------------------------------- split files
def write_split(folder: Path, wrong: dict[str, dict[int, int]] | None = None) -> list[Path]:
    """Write a set of three whose first shard holds metadata only. `wrong` maps a key to {shard: other value}."""
    kinds = {"split.no": "u16", "split.count": "u16", "split.tensors.count": "i32"}
    paths = []
    for idx in range(3):
        values = {"split.no": idx, "split.count": 3, "split.tensors.count": 2}
        values |= {key: by_shard[idx] for key, by_shard in (wrong or {}).items() if idx in by_shard}
        keys: list[Key] = [(key, scalar(kinds[key], value)) for key, value in values.items()]
        keys += [("general.architecture", string("qwen4exp")), ("whose", string(f"shard {idx + 1}"))] if idx < 2 else []
        file = File(keys=keys, tensors=[Tensor(f"t{idx}", (idx, 8))] if idx else [])
        paths.append(file.write(folder / f"m-{idx + 1:05d}-of-00003.gguf"))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_G12_any_shard_loads_the_whole_set(tmp_path: Path, given: int) -> None:
    """G12: all three shards in order, metadata from shard 1, whichever was named."""
    paths = write_split(tmp_path)
    with open_gguf(paths[given]) as file:
        assert file.paths == tuple(paths)
        assert file.metadata["whose"] == "shard 1"
        assert list(file.tensors) == ["t1", "t2"]
        assert [t.shard_idx for t in file.tensors.values()] == [1, 2]
        assert file.data("t2").shape == (2, 32)
        assert file.data("t2")[0, :3].tolist() == [0, 1, 2]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[0].unlink()
    has(refusal(paths[1]), "1 of 3 shards are missing", str(paths[0]))
    paths[2].unlink()
    has(refusal(paths[1]), "2 of 3", str(paths[0]), str(paths[2]))


@pytest.mark.parametrize(
    ("wrong", "given", "parts"),
    [
        ({"split.no": {2: 1}}, 2, ("00003-of-00003", "split.no", "shard 2 of 3")),
        ({"split.no": {0: 1}}, 1, ("00001-of-00003", "split.no is 1", "needs 0")),
        ({"split.no": {1: 5}}, 1, ("split.no is 5", "0 to 2")),
        ({"split.count": {0: 4}}, 1, ("00001-of-00003", "split.count is 4", "needs 3")),
        ({"split.tensors.count": {2: 9}}, 1, ("00003-of-00003", "split.tensors.count is 9", "together 2")),
        ({"split.tensors.count": {0: 1, 1: 1, 2: 1}}, 1, ("split.tensors.count is 1", "together 2")),
    ],
)
def test_shards_that_do_not_fit_together(
    tmp_path: Path, wrong: dict[str, dict[int, int]], given: int, parts: tuple[object, ...]
) -> None:
    has(refusal(write_split(tmp_path, wrong)[given]), *parts)


def test_shard_under_another_name_says_which_name_it_needs(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    other = paths[1].rename(tmp_path / "table.gguf")
    has(refusal(other), "shard 2 of 3", "-00002-of-00003.gguf")


def test_name_of_a_shard_without_split_keys(tmp_path: Path) -> None:
    has(refusal(small_file().write(tmp_path / "m-00002-of-00003.gguf")), "shard 2 of 3", "split.count")


def test_same_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    keys: list[Key] = [
        ("split.no", scalar("u16", 2)),
        ("split.count", scalar("u16", 3)),
        ("split.tensors.count", scalar("i32", 2)),
    ]
    File(keys=keys, tensors=[Tensor("t1", (8,))]).write(paths[2])
    has(refusal(paths[0]), "'t1'", str(paths[1]), "00003-of-00003")


def test_split_key_that_is_missing(tmp_path: Path) -> None:
    path = File(keys=[("split.count", scalar("u16", 2))]).write(tmp_path / "m-00001-of-00002.gguf")
    has(refusal(path), "'split.no' is missing")


def test_merged_file_keeps_a_split_count_of_zero(tmp_path: Path) -> None:
    """llama.cpp's merge tool writes split.count = 0 and leaves the other keys."""
    file = small_file()
    file.keys += [("split.no", scalar("u16", 2)), ("split.count", scalar("u16", 0))]
    assert len(open_gguf(file.write(tmp_path / "m.gguf")).paths) == 1


def test_set_of_one(tmp_path: Path) -> None:
    file = small_file()
    file.keys += [
        ("split.no", scalar("u16", 0)),
        ("split.count", scalar("u16", 1)),
        ("split.tensors.count", scalar("i32", 3)),
    ]
    assert len(open_gguf(file.write(tmp_path / "m-00001-of-00001.gguf")).tensors) == 3


def test_cursor_never_passes_the_end(tmp_path: Path) -> None:
    cursor = Cursor(text("abc"), tmp_path)
    assert cursor.u64("length") == 3
    with pytest.raises(FormatError, match="needs 4 bytes, 3 of the file's 11 are left"):
        cursor.u32("a number")
    assert cursor.pos == 8
