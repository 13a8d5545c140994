"""The oracles agree with each other: llama.cpp with itself, with transformers, and ggml with gguf-py."""

from __future__ import annotations

import importlib.util
import platform
import struct
import sys
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

import tests.oracle as oracle
from strata_jax.synthetic import ModelShape, builtin_model_path
from tests.oracle import ggml, glibc, llama
from tests.oracle.models import (
    MIN_MARGIN,
    NUM_PARITY_TOKENS,
    PARITY_CASES,
    ModelStore,
    ParityCase,
    assert_no_near_tie,
    boundary_id,
    hf_golden,
    margins,
    margins_of,
    oracle_logits,
    oracle_mtp_logits,
    sample_tokens,
)

pytestmark = pytest.mark.usefixtures("llama_oracle")

TOLERANCE = 2e-5  # llama.cpp against transformers: 8.8e-6 was the largest seen when the goldens were made
ENGINE_TYPES = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q6_K",
    "Q5_K",
    "Q4_K",
    "Q4_0",
    "Q5_0",
    "Q5_1",
    "IQ4_NL",
    "IQ4_XS",
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "Q2_0",
]
SHORT_PROMPT = sample_tokens(0, 60, 512, boundary_id(512))


# --- availability


def test_a_missing_wheel_is_an_error_where_one_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match=r"llama\.cpp oracle is missing: pip install 'llama-cpp-py-sync=="):
        oracle.require()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")])
def test_a_machine_without_a_wheel_skips(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(pytest.skip.Exception, match=f"no llama-cpp-py-sync==.* wheel for {system} on {machine}"):
        oracle.require()


def test_libraries_on_disk_need_no_newer_glibc_than_this_one() -> None:
    release = platform.libc_ver()[1].split(".")
    if tuple(int(part) for part in release[:2]) >= glibc.WANTED_GLIBC:
        pytest.skip("glibc is new enough for the wheel as it is")
    libraries = sorted(glibc.loadable_library_dir().glob("lib*.so*"))
    assert {"libllama.so", "libggml-base.so.0", "libggml-cpu.so.0"} <= {path.name for path in libraries}
    for path in libraries:
        assert glibc.rebind(path.read_bytes()) == (path.read_bytes(), 0), path.name


def _library_needing(symbols: list[tuple[str, int]]) -> bytes:
    """Build the parts of an ELF-64 library that `rebind` reads: undefined symbols, bound to version 2 (2.38) or 3."""
    names = b"\0libc.so.6\0GLIBC_2.38\0GLIBC_2.2.5\0" + b"".join(name.encode() + b"\0" for name, _ in symbols)
    records = [
        struct.pack("<IBBHQQ", names.index(b"\0" + name.encode() + b"\0") + 1, 0, 0, 0, 0, 0) for name, _ in symbols
    ]
    needed = struct.pack("<HHIII", 1, 2, names.index(b"libc.so.6"), 16, 0)
    needed += struct.pack("<IHHII", 0, 0, 2, names.index(b"GLIBC_2.38"), 16)
    needed += struct.pack("<IHHII", 0, 0, 3, names.index(b"GLIBC_2.2.5"), 0)
    parts = {
        b".dynstr": names,
        b".dynsym": b"".join(records),
        b".gnu.version": b"".join(struct.pack("<H", version) for _, version in symbols),
        b".gnu.version_r": needed,
    }
    titles = b"\0" + b"\0".join(parts) + b"\0.shstrtab\0"
    body, heads = b"", b""
    for title, content in (*parts.items(), (b".shstrtab", titles)):
        info = int(title == b".gnu.version_r")  # one library
        name = titles.index(b"\0" + title + b"\0") + 1
        heads += struct.pack("<IIQQQQIIQQ", name, 0, 0, 0, 64 + len(body), len(content), 0, info, 0, 0)
        body += content
    start = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    return start.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 5, 4) + body + heads


def test_rebinding_takes_the_older_symbol_and_leaves_the_others() -> None:
    """The same library, written with the older name and version, is what comes out (but for the flag)."""
    needs_new = _library_needing([("__isoc23_strtol", 2), ("malloc", 3)])
    rebound, count = glibc.rebind(needs_new)
    assert count == 1
    names = rebound.index(b"\0libc.so.6")
    symbols = names + len(b"\0libc.so.6\0GLIBC_2.38\0GLIBC_2.2.5\0__isoc23_strtol\0malloc\0")
    first, second = (struct.unpack_from("<I", rebound, symbols + 24 * i)[0] for i in range(2))
    assert rebound[names + first :].startswith(b"strtol\0")
    assert rebound[names + second :].startswith(b"malloc\0")
    assert struct.unpack_from("<HH", rebound, symbols + 48) == (3, 3)
    assert struct.unpack_from("<H", rebound, symbols + 48 + 4 + 16 + 4) == (2,)  # weak
    assert glibc.rebind(rebound) == (rebound, 0)


def test_a_symbol_without_an_older_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strlcpy needs glibc 2\.38 and has no older form"):
        glibc.rebind(_library_needing([("strlcpy", 2)]))


# --- llama.cpp


def test_llama_gives_the_same_logits_in_batches_and_token_by_token(models: ModelStore) -> None:
    path = models.synthetic("nano")
    whole = oracle_logits(path, SHORT_PROMPT)
    with closing(llama.Model(path)) as model, closing(llama.Context(model, batch_tokens=7)) as context:
        chunked = context.prefill(SHORT_PROMPT)
        context.clear()
        stepped = np.concatenate([context.run([token], i) for i, token in enumerate(SHORT_PROMPT)])
    np.testing.assert_allclose(chunked, whole, atol=TOLERANCE)
    np.testing.assert_allclose(stepped, whole, atol=TOLERANCE)


def test_llama_refuses_what_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match=r"could not load .*m\.gguf"):
        oracle_logits(tmp_path / "m.gguf", [1])


def test_llama_dumps_the_tensors_that_are_asked_for(models: ModelStore) -> None:
    logits, seen = llama.dump(models.synthetic("nano"), SHORT_PROMPT, r"hc_mixed-0|ffn_moe_topk-3")
    assert [name for name, _ in seen] == ["hc_mixed-0", "hc_mixed-0", "ffn_moe_topk-3"]
    assert seen[0][1].shape == (60, 64)
    assert seen[2][1].dtype == np.int32
    assert logits.shape == (60, 512)


def test_llama_tokenizes_with_the_files_vocabulary(models: ModelStore) -> None:
    text = "<|im_start|>user\nThe quick brown fox: 2048 → ünï<|im_end|>"
    with closing(llama.Model(models.synthetic("nano"))) as model:
        ids = model.tokenize(text)
        assert ids[0] == 499
        assert ids[-1] == 500
        assert model.detokenize(ids).decode() == text
        assert model.token_bytes(499, special=False) == b""
        assert 499 not in model.tokenize(text, parse_special=False)


@pytest.mark.parametrize("separate_draft_file", [False, True])
def test_greedy_text_is_the_same_with_drafts(models: ModelStore, separate_draft_file: bool) -> None:
    path = models.synthetic("nano", echo_mtp=0.1)
    draft = models.synthetic("nano", echo_mtp=0.1, mtp_only=True) if separate_draft_file else None
    drafted = llama.speculative(path, SHORT_PROMPT, 60, num_drafts=3, draft_path=draft)
    assert drafted.token_ids == llama.greedy(path, SHORT_PROMPT, 60)
    assert 0 < drafted.num_accepted < drafted.num_drafted == 3 * drafted.num_rounds


def test_some_drafts_of_the_builtin_model_are_accepted(models: ModelStore) -> None:
    path = builtin_model_path(models.folder / "builtin")
    drafted = llama.speculative(path, SHORT_PROMPT[:40], 24, num_drafts=3)
    assert 3 <= drafted.num_accepted <= drafted.num_drafted // 2


@pytest.mark.parametrize(
    "overrides",
    [{"ple_layer": None}, {"tied_output": True}, {"expert_width": [64] * 5}, {"num_streams": 2}],
    ids=lambda overrides: next(iter(overrides)),
)
def test_llama_reads_every_kind_of_synthetic_model(models: ModelStore, overrides: dict[str, object]) -> None:
    path = models.synthetic("nano", overrides=overrides)
    for logits in (oracle_logits(path, SHORT_PROMPT), oracle_mtp_logits(path, SHORT_PROMPT)):
        assert np.isfinite(logits).all()
        assert 1 < logits.std() < 3


def test_llama_reads_fused_experts(models: ModelStore) -> None:
    assert 1 < oracle_logits(models.synthetic("nano", fused_experts=True), SHORT_PROMPT).std() < 2


# --- margins, and transformers


@pytest.mark.parametrize("case", PARITY_CASES, ids=str)
def test_llama_agrees_with_transformers_where_no_tie_decides(models: ModelStore, case: ParityCase) -> None:
    path = models.synthetic(case.preset, case.seed)
    found = margins(path, case.token_ids)
    assert found.router >= case.router_margin > MIN_MARGIN
    assert found.index >= case.index_margin > MIN_MARGIN
    golden = hf_golden(case)
    assert golden.margins.router > MIN_MARGIN
    assert golden.margins.index > MIN_MARGIN
    logits = oracle_logits(path, case.token_ids)
    assert 1.2 < logits.std() < 1.6
    np.testing.assert_allclose(logits[golden.positions], golden.logits, atol=TOLERANCE)


def test_parity_prompts_hold_the_boundary_token_and_pass_the_sparse_budget() -> None:
    for case in PARITY_CASES:
        ids = case.token_ids
        assert len(ids) == NUM_PARITY_TOKENS > 10 * ModelShape().index_top_k
        assert 6 <= ids.count(boundary_id(512)) < 20
        assert len(set(ids)) > 250
    assert {case.preset for case in PARITY_CASES} == {"nano", "tiny", "ragged"}


def test_a_prompt_with_a_near_tie_is_refused(models: ModelStore) -> None:
    """Seed 0 with prompt 0 has a router cut of 6e-6: it must not be used where engines are compared."""
    near_tie = ParityCase("nano", 0, 0, 0.0, 0.0)
    with pytest.raises(AssertionError, match=r"router cut of nano-0\.gguf is only 6\.\de-06 wide"):
        assert_no_near_tie(models.synthetic("nano"), near_tie.token_ids)


def test_margins_ignore_rows_that_keep_everything_and_what_cannot_be_seen() -> None:
    probs = np.array([[0.5, 0.3, 0.2], [0.6, 0.25, 0.15]], np.float32)
    scores = np.array([[3.0, -np.inf, -np.inf], [1.0, 4.0, -np.inf], [2.0, 5.0, 1.5]], np.float32)
    two = np.zeros((3, 2), np.int32)
    found = margins_of(
        [("ffn_moe_probs-0", probs), ("ffn_moe_topk-0", two), ("indexer_score-3", scores), ("indexer_top_k-3", two)]
    )
    assert found.router == pytest.approx(0.1)
    assert found.index == pytest.approx(0.5)
    with pytest.raises(RuntimeError, match="no router tensors seen"):
        margins_of([])


def test_draft_logits_do_not_depend_on_later_tokens(models: ModelStore) -> None:
    path = models.synthetic("nano")
    whole = oracle_mtp_logits(path, SHORT_PROMPT)
    np.testing.assert_allclose(oracle_mtp_logits(path, SHORT_PROMPT[:37]), whole[:37], atol=TOLERANCE)
    assert np.abs(whole - oracle_logits(path, SHORT_PROMPT)).max() > 1


def test_draft_logits_pair_each_token_with_the_trunks_residual_row_before_it(models: ModelStore) -> None:
    """The rows are taken from the trunk's graph, after its last layer, and paired by hand, one token at a time."""
    path = models.synthetic("nano")
    last_layer = dict(llama.dump(path, SHORT_PROMPT, "l_last-3")[1])["l_last-3"].reshape(len(SHORT_PROMPT), -1)
    rows = np.concatenate([np.zeros_like(last_layer[:1]), last_layer[:-1]])
    with (
        closing(llama.Model(path, load_mtp=True)) as model,
        closing(llama.Context(model)) as trunk,
        closing(llama.Context(model, draft_for=trunk)) as draft,
    ):
        trunk.keep_hidden(only_outputs=False)
        draft.keep_hidden(only_outputs=True)
        trunk.run(SHORT_PROMPT, 0)
        stepped = [draft.run([token], i, hidden=rows[i : i + 1])[0] for i, token in enumerate(SHORT_PROMPT)]
    np.testing.assert_allclose(oracle_mtp_logits(path, SHORT_PROMPT), np.stack(stepped), atol=TOLERANCE)


# --- ggml


@pytest.mark.parametrize("type_name", ENGINE_TYPES)
def test_ggml_and_gguf_py_decode_alike(type_name: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    rows = ggml.quantize(values, type_name)
    decoded = ggml.dequantize(rows, type_name)
    assert rows.dtype == np.uint8
    assert decoded.shape == values.shape
    assert np.abs(decoded - values).max() < 4
    if type_name == "Q2_0":  # two-bit codes, lowest bits first, minus one, times an f16 scale
        blocks = rows.reshape(-1, 18)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        codes = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
        expected = (codes.reshape(-1, 64).astype(np.float32) - 1) * scales
    else:
        stored = rows.view({"F32": np.float32, "F16": np.float16}.get(type_name, np.uint8))
        expected = gguf.quants.dequantize(stored, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(decoded, expected.reshape(decoded.shape))


def test_rows_that_do_not_hold_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="IQ3_S has blocks of 256, rows of 192 do not fit"):
        ggml.quantize(np.zeros((2, 192), np.float32), "IQ3_S")


def test_gsq_recipe_mixes_types_by_layer_and_role_like_published_files(models: ModelStore) -> None:
    types = {t.name: t.type_name for t in ggml.read_tensors(models.quantized("gsq"))}
    up_and_down = [(types[f"blk.{i}.ffn_up_exps.weight"], types[f"blk.{i}.ffn_down_exps.weight"]) for i in range(4)]
    assert up_and_down == [("IQ2_S", "IQ4_NL"), ("IQ3_XXS", "IQ4_NL"), ("IQ3_S", "Q2_0"), ("IQ4_XS", "IQ4_NL")]
    assert types["blk.3.indexer.q_proj.weight"] == "BF16"
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ssm_conv1d.weight"] == "F32"
    assert types["per_layer_token_embd.weight"] == "IQ4_NL"  # 64 wide
    assert types["blk.0.hc_attn_up.weight"] == "Q8_0"  # 32 wide


def test_types_that_do_not_fit_fall_back_as_llama_does(models: ModelStore) -> None:
    path = models.quantized("iq4_xs", "ragged")
    types = {t.name: t.type_name for t in ggml.read_tensors(path)}
    assert types["blk.0.ffn_up_exps.weight"] == "IQ4_XS"
    assert types["blk.0.ffn_down_exps.weight"] == "IQ4_NL"  # 192 wide
    assert types["blk.0.hc_attn_up.weight"] == "Q5_1"  # 96 wide


def test_expansion_holds_the_quantised_weights_as_f32(models: ModelStore) -> None:
    """llama.cpp rounds activations next to quantised weights, so it is near its result on the expansion, not at it."""
    packed = models.quantized("gsq")
    expanded = models.expanded(packed)
    of_packed = {t.name: t for t in ggml.read_tensors(packed)}
    for tensor in ggml.read_tensors(expanded):
        stored = of_packed[tensor.name]
        assert (tensor.type_name, tensor.shape) == ("F32", stored.shape)
        np.testing.assert_array_equal(
            ggml.dequantize(tensor.rows, "F32"), ggml.dequantize(stored.rows, stored.type_name), err_msg=tensor.name
        )
    difference = np.abs(oracle_logits(packed, SHORT_PROMPT) - oracle_logits(expanded, SHORT_PROMPT))
    assert 1e-3 < difference.mean() < 0.1
    again = gguf.GGUFReader(expanded).fields
    assert again["tokenizer.ggml.pre"].contents() == "qwen35"
    assert again["qwen4exp.ple.layer_multipliers"].types[1] == gguf.GGUFValueType.UINT64


def test_gguf_py_learns_type_42_only_while_a_file_is_read(models: ModelStore) -> None:
    path = models.quantized("q2_0")
    assert "Q2_0" in {t.type_name for t in ggml.read_tensors(path)}
    with pytest.raises(ValueError, match=r"42\)? is not a valid"):
        gguf.GGUFReader(path)


def test_models_are_made_once(models: ModelStore) -> None:
    calls: list[Path] = []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_text("content")

    assert models.made("once.txt", make) == models.made("once.txt", make)
    assert len(calls) == 1
    assert (models.folder / "once.txt").read_text() == "content"
