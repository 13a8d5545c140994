"""Synthetic models: deterministic, whole or absent, refused when sizes contradict; the built-in one is cached."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from strata_jax.errors import ConfigError
from strata_jax.files import replaced_on_success
from strata_jax.synthetic import (
    PRESETS,
    ModelShape,
    builtin_model_path,
    shape_for,
    shapes,
    write_synthetic_gguf,
    writer,
)
from strata_jax.synthetic.tokenizer import CONTROL_TOKENS, build_vocabulary


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_gguf(tmp_path_factory.mktemp("synthetic") / "nano.gguf", preset="nano")


def test_same_arguments_give_the_same_bytes(nano: Path, tmp_path: Path) -> None:
    assert sha256(write_synthetic_gguf(tmp_path / "again.gguf", preset="nano")) == sha256(nano)
    assert sha256(write_synthetic_gguf(tmp_path / "other.gguf", preset="nano", seed=1)) != sha256(nano)


def test_weights_are_those_that_the_parity_seeds_were_chosen_for(nano: Path) -> None:
    """A NumPy whose random streams differ would silently void the margins of the chosen seeds."""
    tensors = tensors_of(nano)
    expected_head = [0.36017066, 0.4617387, -0.22160637, 0.24082202]
    expected_decay = [-3.3092391, -1.1870642]
    np.testing.assert_allclose(tensors["output.weight"][0, :4], expected_head, rtol=1e-6)
    np.testing.assert_allclose(tensors["blk.0.ssm_a"][:2], expected_decay, rtol=1e-6)


def test_a_tensor_does_not_change_when_others_are_left_out(nano: Path, tmp_path: Path) -> None:
    full = tensors_of(nano)
    trunk = tensors_of(write_synthetic_gguf(tmp_path / "trunk.gguf", preset="nano", mtp=False))
    draft = tensors_of(write_synthetic_gguf(tmp_path / "draft.gguf", preset="nano", mtp_only=True))
    assert set(trunk) | set(draft) == set(full)
    assert set(trunk) & set(draft) == {"token_embd.weight", "output.weight"}
    for part in (trunk, draft):
        for name, values in part.items():
            np.testing.assert_array_equal(values, full[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_types_are_for_matrices_only(tmp_path: Path, dtype: str) -> None:
    path = write_synthetic_gguf(tmp_path / "m.gguf", preset="nano", dtype=dtype)  # pyright: ignore[reportArgumentType]
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert types["blk.0.ffn_down_exps.weight"] == types["per_layer_token_embd.weight"] == dtype.upper()
    for name in ("blk.0.ffn_gate_inp.weight", "blk.0.ssm_a", "blk.1.ple_conv1d.weight", "blk.0.hc_attn_norm.weight"):
        assert types[name] == "F32"


def test_fused_experts_replace_gate_and_up(tmp_path: Path) -> None:
    path = write_synthetic_gguf(tmp_path / "m.gguf", preset="nano", fused_experts=True)
    shapes_of = {name: values.shape for name, values in tensors_of(path).items()}
    assert shapes_of["blk.0.ffn_gate_up_exps.weight"] == (16, 128, 64)
    assert "blk.0.ffn_gate_exps.weight" not in shapes_of


def test_expert_width_may_differ_by_block(tmp_path: Path) -> None:
    widths = (64, 32, 96, 64, 32)
    path = write_synthetic_gguf(tmp_path / "m.gguf", preset="nano", overrides={"expert_width": widths})
    reader = gguf.GGUFReader(path)
    assert reader.fields["qwen4exp.expert_feed_forward_length"].contents() == list(widths)
    assert {t.name: t for t in reader.tensors}["blk.2.ffn_up_exps.weight"].shape.tolist() == [64, 96, 16]


def test_draft_block_of_an_echo_model_shares_the_output_mixer(tmp_path: Path) -> None:
    plain = tensors_of(write_synthetic_gguf(tmp_path / "plain.gguf", preset="nano"))
    echo = tensors_of(write_synthetic_gguf(tmp_path / "echo.gguf", preset="nano", echo_mtp=0.25))
    np.testing.assert_array_equal(echo["blk.4.nextn.hc_head_up.weight"], plain["output_hc_up.weight"])
    np.testing.assert_array_equal(echo["blk.4.nextn.eh_proj.weight"], np.eye(64, 128, dtype=np.float32))
    np.testing.assert_array_equal(
        echo["blk.3.attn_output.weight"], plain["blk.3.attn_output.weight"] * np.float32(0.25)
    )
    np.testing.assert_array_equal(echo["blk.3.attn_q.weight"], plain["blk.3.attn_q.weight"])


def test_ngram_constants_are_those_of_the_real_checkpoint() -> None:
    real = ModelShape(vocab_size=248320, embed_width=2560, ple_heads_per_ngram=8, ple_table_base=20_000_000)
    assert shapes.ple_multipliers(real) == [23703573157769, 20109073645365, 8052911324071]
    assert shapes.ple_head_vocab_sizes(real)[:3] == [20000003, 20000023, 20000033]
    assert shapes.ple_head_offsets(real)[-1] == 300001275
    assert shapes.ple_table_rows(real) == 320001536
    assert real.ple_row_width == 160


def test_vocabulary_has_distinct_tokens_and_control_tokens_at_its_end() -> None:
    vocabulary = build_vocabulary(512)
    assert len(set(vocabulary.tokens)) == len(vocabulary.types) == 512
    assert [vocabulary.id_of(token) for token in CONTROL_TOKENS] == list(range(498, 506))
    assert all(a + b in vocabulary.tokens for a, b in (merge.split(" ") for merge in vocabulary.merges))


def test_a_failed_write_leaves_the_old_file_and_no_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def fail(*_: object) -> np.ndarray:
        raise OSError("disk full")

    monkeypatch.setattr(writer, "tensor_values", fail)
    with pytest.raises(OSError, match="disk full"):
        write_synthetic_gguf(path, preset="nano")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_scratch_files_sit_beside_the_target(tmp_path: Path) -> None:
    with replaced_on_success(tmp_path / "x") as scratch:
        assert scratch.parent == tmp_path
        scratch.write_text("new")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_permissions_of_any_new_one(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with replaced_on_success(tmp_path / "x") as scratch:
            scratch.write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode


def test_unknown_names_are_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'tinny'.*Did you mean 'tiny'"):
        write_synthetic_gguf(tmp_path / "m.gguf", preset="tinny")
    with pytest.raises(ConfigError, match=r"unknown size 'num_expert' .*Did you mean 'num_experts"):
        write_synthetic_gguf(tmp_path / "m.gguf", overrides={"num_expert": 4})
    with pytest.raises(ConfigError, match=r"unknown dtype 'q8_0'.*f32, f16, bf16"):
        write_synthetic_gguf(tmp_path / "m.gguf", dtype="q8_0")  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())


def test_contradicting_sizes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        shape_for("tiny", {"num_experts": 2, "ple_layer": 3, "rope_dim": 30})
    message = str(caught.value)
    assert "num_experts_used 4 exceeds num_experts 2" in message
    assert "ple_layer 3 is not a GDN block" in message
    assert "rope_sections sum to 16, half of rope_dim is 15" in message


def test_a_draft_file_needs_a_draft_block(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="asks for a draft block"):
        write_synthetic_gguf(tmp_path / "m.gguf", preset="nano", mtp=False, mtp_only=True)


def test_every_preset_is_consistent() -> None:
    for name in PRESETS:
        assert shape_for(name) == PRESETS[name]


@pytest.fixture
def small_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the built-in model as small as `nano`, so that caching can be tested many times."""
    monkeypatch.setattr("strata_jax.synthetic.builtin.PRESET", "nano")


@pytest.mark.usefixtures("small_builtin")
def test_builtin_model_is_reused_while_intact(tmp_path: Path) -> None:
    path = builtin_model_path(tmp_path)
    made_at = path.stat().st_mtime_ns
    assert builtin_model_path(tmp_path) == path
    assert path.stat().st_mtime_ns == made_at
    assert builtin_model_path(tmp_path, seed=1) != path


@pytest.mark.usefixtures("small_builtin")
@pytest.mark.parametrize("damage", ["flip", "truncate", "no record", "bad record"])
def test_builtin_model_is_made_again_when_damaged(tmp_path: Path, damage: str) -> None:
    path = builtin_model_path(tmp_path)
    good = path.read_bytes()
    record = path.with_suffix(".json")
    match damage:
        case "flip":
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        case "truncate":
            path.write_bytes(good[:1000])
        case "no record":
            record.unlink()
        case "bad record":
            record.write_text("[")
    before = path.stat().st_ino
    assert builtin_model_path(tmp_path).read_bytes() == good
    assert path.stat().st_ino != before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, record.name])


def _make_builtin(folder: Path, barrier: object) -> None:
    barrier.wait()  # pyright: ignore[reportAttributeAccessIssue]
    builtin_model_path(folder)


@pytest.mark.usefixtures("small_builtin")
def test_two_processes_may_make_the_builtin_model_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=_make_builtin, args=(tmp_path, barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    path = tmp_path / "builtin-v1-seed0.gguf"  # the processes do not see the smaller preset
    made_at = path.stat().st_mtime_ns
    assert {p.name for p in tmp_path.iterdir()} == {path.name, path.with_suffix(".json").name}
    assert gguf.GGUFReader(path).fields["qwen4exp.context_length"].contents() == 8192
    assert path.stat().st_mtime_ns == made_at


@pytest.mark.usefixtures("small_builtin")
def test_builtin_model_goes_to_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert builtin_model_path().parent == tmp_path / "xdg" / "strata-jax" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert builtin_model_path().parent == tmp_path / "home" / ".cache" / "strata-jax" / "models"


def test_a_cache_that_cannot_be_written_is_a_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*file.*XDG_CACHE_HOME.*model\.path=FILE\.gguf"):
        builtin_model_path(tmp_path / "file" / "below")


def test_importing_does_not_import_jax() -> None:
    code = "import sys, strata_jax.synthetic; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
