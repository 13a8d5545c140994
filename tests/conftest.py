"""Markers, and the settings that tests compose without a command line."""

from __future__ import annotations

import gc
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import settings

from strata_jax.config import RunConfig
from strata_jax.config.load import check_overrides, find_groups, register, to_config
from strata_jax.runtime import with_free_early

REPOSITORY = Path(__file__).resolve().parents[1]
# Engines of one shape share their compiled programs, also between the workers. Set before any test imports JAX.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
# Compiling is most of what the tests take, and what they look at is not the speed of small models: LLVM optimises
# nothing, and the slower of two ways to generate code is left out (from jaxlib 0.11 on there is one, and no flag).
# Unoptimised, a multiplication and an addition become one instruction in one program and two in another, whose bits
# then differ: code is for processors without that instruction, where the machine is of their kind. Flags that are given
# in XLA_FLAGS stay as they are.
if platform.machine() in ("x86_64", "AMD64"):
    QUICK_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    QUICK_FLAGS.append("--xla_cpu_max_isa=AVX")
else:
    QUICK_FLAGS = ["--xla_backend_optimization_level=1"]
QUICK_FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")  # the workers have the processors: nothing to split for
if tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 11):
    QUICK_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
given = os.environ.get("XLA_FLAGS", "")
quick = [flag for flag in QUICK_FLAGS if flag.split("=")[0] not in given]
os.environ["XLA_FLAGS"] = " ".join([with_free_early(given), *quick]).strip()
# JAX makes many objects that stay: looking for cycles among them more rarely takes less of the time.
gc.set_threshold(50_000, 20, 20)
MARKERS = ("cpu", "gpu")

# The same examples in every run; `pytest --hypothesis-profile=explore` looks for new ones.
settings.register_profile("explore")
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test a place to run: `cpu` unless it says `gpu`; without an NVIDIA driver the latter are skipped."""
    has_gpu = shutil.which("nvidia-smi") is not None
    for item in items:
        if not any(item.get_closest_marker(name) for name in MARKERS):
            item.add_marker(pytest.mark.cpu)
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> Iterator[None]:
    """What a file leaves (JAX keeps programs and what it traced) is not looked through again.

    It took seconds whenever a later file counted the bytes of live arrays.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def schema() -> None:
    """The schema as Hydra knows it, which takes a fifth of composing."""
    register()


@pytest.fixture
def compose_config(schema: None) -> Callable[[Sequence[str]], RunConfig]:
    """Return a function from override texts to the checked configuration, as `run.py` composes it."""

    def build(overrides: Sequence[str] = ()) -> RunConfig:
        check_overrides(overrides, find_groups([REPOSITORY / "conf"]), multirun=False)
        with initialize_config_dir(version_base="1.3", config_dir=str(REPOSITORY / "conf")):
            return to_config(compose("config", overrides=list(overrides)))

    return build
