"""Small models for the tests, made once per session and shared by its workers, and what the oracles say about them.

`PARITY_CASES` lists weights and prompts that no tie can decide: engines round differently, so two experts or two index
blocks closer than `MIN_MARGIN` at a cut may be chosen differently, and the logits then differ by far more than
rounding.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.oracle as oracle
from strata_jax.files import replaced_on_success
from strata_jax.synthetic import shape_for, write_synthetic_gguf
from strata_jax.synthetic.tokenizer import CONTROL_TOKENS, VISIBLE_SPECIAL_TOKENS

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
MIN_MARGIN = 1e-5
_CUT_TENSORS = r"(ffn_moe_probs|ffn_moe_topk|indexer_score|indexer_top_k)-\d+"
NUM_PARITY_TOKENS = 400  # sparse attention starts to leave blocks out at 36 tokens in the small presets
# 256-wide rows everywhere a K or IQ type goes, few experts: the slow encoders need about 2 s
QUANTIZABLE: Mapping[str, object] = {"num_experts": 4, "num_experts_used": 2}


@dataclass(frozen=True, slots=True)
class ParityCase:
    """A preset's weights, a prompt, and the narrowest cuts of routers (in probability) and index scores over it."""

    preset: str
    seed: int
    token_seed: int
    router_margin: float
    index_margin: float

    @property
    def token_ids(self) -> list[int]:
        """The prompt, `NUM_PARITY_TOKENS` long."""
        vocab_size = shape_for(self.preset).vocab_size
        return sample_tokens(self.token_seed, NUM_PARITY_TOKENS, vocab_size, boundary_id(vocab_size))

    def __str__(self) -> str:
        return f"{self.preset}-{self.seed}-{self.token_seed}"


# measured with `margins` below over trunk and draft block; rounded down
PARITY_CASES: tuple[ParityCase, ...] = (
    ParityCase("nano", 0, 1, router_margin=1.4e-5, index_margin=3.2e-4),
    ParityCase("nano", 1, 7, router_margin=1.4e-5, index_margin=2.7e-4),
    ParityCase("nano", 2, 4, router_margin=1.7e-5, index_margin=2.1e-5),
    ParityCase("tiny", 0, 6, router_margin=1.2e-5, index_margin=5.9e-5),
    ParityCase("tiny", 1, 1, router_margin=1.4e-5, index_margin=7.3e-5),
    ParityCase("tiny", 2, 20, router_margin=1.4e-5, index_margin=4.1e-4),
    ParityCase("ragged", 0, 21, router_margin=2.1e-5, index_margin=1.3e-5),
    ParityCase("ragged", 1, 10, router_margin=1.2e-5, index_margin=4.4e-5),
    ParityCase("ragged", 2, 17, router_margin=1.5e-5, index_margin=3.1e-5),
)


@dataclass(frozen=True, slots=True)
class Margins:
    """The narrowest cut over all tokens and layers: smallest kept value minus largest value left out."""

    router: float
    index: float


@dataclass(frozen=True, slots=True)
class Golden:
    """What Hugging Face transformers computed for a parity case: f32[P, V] trunk logits at i32[P] positions."""

    positions: np.ndarray
    logits: np.ndarray
    margins: Margins


class ModelStore:
    """Files made on demand in a folder that all workers of a test session share; each is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def synthetic(self, preset: str = "tiny", seed: int = 0, **options: Any) -> Path:
        """Return a random-weight model; options as for `write_synthetic_gguf`."""
        name = f"{preset}-{seed}{_suffix(options)}.gguf"
        return self.made(name, lambda path: write_synthetic_gguf(path, preset=preset, seed=seed, **options))

    def quantized(
        self, recipe: str, preset: str = "tiny", seed: int = 0, overrides: Mapping[str, object] = QUANTIZABLE
    ) -> Path:
        """Return a variant quantised by ggml; `recipe` is a key of `ggml.RECIPES`."""
        from . import ggml

        source = self.synthetic(preset, seed, overrides=dict(overrides))
        return self.made(f"{source.stem}-{recipe}.gguf", lambda path: ggml.quantize_gguf(source, path, recipe))

    def expanded(self, path: Path) -> Path:
        """Return the F32 expansion of a file of this store: the tight reference for a quantised one."""
        from . import ggml

        return self.made(f"{path.stem}-expanded.gguf", lambda target: ggml.expand_gguf(path, target))

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the file `name`, calling `make(scratch_path)` if no worker has made it yet."""
        path = self.folder / name
        with _locked(self.folder / f".{name}.lock"):
            if not path.exists():
                with replaced_on_success(path) as scratch:
                    make(scratch)
        return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelStore]:
    """Models shared by all workers of this session; the last worker to finish removes them (about 1 GB)."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "models"
    folder.mkdir(exist_ok=True)
    with (folder / ".users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield ModelStore(folder)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for path in folder.rglob("*.gguf"):
            path.unlink()


@pytest.fixture(scope="session")
def llama_oracle() -> None:
    """Ask for llama.cpp: skips where no wheel exists, fails where it is not installed."""
    oracle.require()


def boundary_id(vocab_size: int) -> int:
    """Return the id of the n-gram boundary token of a synthetic model: the first special token."""
    return vocab_size - len(CONTROL_TOKENS) - len(VISIBLE_SPECIAL_TOKENS)


def sample_tokens(seed: int, count: int, vocab_size: int, boundary: int) -> list[int]:
    """Draw token ids with the boundary token inside: alone, twice in a row, one apart, and as the last token."""
    ids = np.random.default_rng([seed, count]).integers(0, vocab_size, count)
    for place in (count // 5, 2 * count // 5, 2 * count // 5 + 1, 3 * count // 5, 3 * count // 5 + 2, count - 1):
        ids[place] = boundary
    return [int(i) for i in ids]


def hf_golden(case: ParityCase) -> Golden:
    """Load the golden of a case; made by `tests/goldens/make_hf_goldens.py`."""
    path = GOLDENS / f"hf_{case.preset}_{case.seed}_{case.token_seed}.npz"
    with np.load(path) as stored:
        if stored["token_ids"].tolist() != case.token_ids:
            raise ValueError(f"{path.name} was made for another prompt; run make_hf_goldens.py again")
        found = Margins(float(stored["router_margin"]), float(stored["index_margin"]))
        return Golden(stored["positions"], stored["logits"], found)


def oracle_logits(path: str | Path, token_ids: Sequence[int]) -> np.ndarray:
    """Return llama.cpp's trunk logits, f32[T, V]."""
    from . import llama

    oracle.require()
    return llama.logits(path, token_ids)


def oracle_mtp_logits(path: str | Path, token_ids: Sequence[int]) -> np.ndarray:
    """Return llama.cpp's draft logits, f32[T, V]: position p is fed token p and the trunk's hidden row of p-1."""
    from . import llama

    oracle.require()
    return llama.mtp_logits(path, token_ids)


def margins(path: str | Path, token_ids: Sequence[int], *, mtp: bool = True) -> Margins:
    """Measure the narrowest cuts of a prompt in llama.cpp's own graph, over trunk and (with `mtp`) draft block."""
    from . import llama

    oracle.require()
    seen = llama.dump(path, token_ids, _CUT_TENSORS)[1]
    if mtp:
        seen = seen + llama.mtp_dump(path, token_ids, _CUT_TENSORS)[1]
    return margins_of(seen)


def margins_of(seen: Sequence[tuple[str, np.ndarray]]) -> Margins:
    """Compute the margins from recorded graph tensors."""
    router, index = [np.inf], [np.inf]
    for (name, values), (next_name, chosen) in itertools.pairwise(seen):
        if name.startswith("ffn_moe_probs") and next_name.startswith("ffn_moe_topk"):
            router.append(_narrowest_cut(values, chosen.shape[-1]))
        if name.startswith("indexer_score") and next_name.startswith("indexer_top_k"):
            index.append(_narrowest_cut(values, chosen.shape[-1]))
    if len(router) == 1:
        raise RuntimeError(f"no router tensors seen among {sorted({re.sub(r'-.*', '', name) for name, _ in seen})}")
    return Margins(float(min(router)), float(min(index)))


def assert_no_near_tie(path: str | Path, token_ids: Sequence[int], *, mtp: bool = True) -> None:
    """Fail when a router or index cut is so narrow that rounding may decide it."""
    found = margins(path, token_ids, mtp=mtp)
    assert found.router > MIN_MARGIN, (
        f"a router cut of {Path(path).name} is only {found.router:.1e} wide; choose another seed"
    )
    assert found.index > MIN_MARGIN, (
        f"an index cut of {Path(path).name} is only {found.index:.1e} wide; choose another seed"
    )


def _narrowest_cut(values: np.ndarray, num_kept: int) -> float:
    """Smallest gap between the last kept and the first dropped value of a row; rows that keep all have none."""
    if values.shape[-1] <= num_kept:
        return np.inf
    ordered = -np.sort(-values, axis=-1)
    kept, dropped = ordered[:, num_kept - 1], ordered[:, num_kept]
    cut = np.isfinite(dropped)  # -inf marks what a token cannot see
    return float(np.min(kept[cut] - dropped[cut], initial=np.inf))


def _suffix(options: Mapping[str, Any]) -> str:
    if not options:
        return ""
    return "-" + hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
