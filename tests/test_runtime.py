"""JAX's environment: what is decided, what is refused, and, in a fresh process, that it takes effect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strata_jax import runtime
from strata_jax.config import EngineConfig, HardwareConfig, Platform, RunConfig
from strata_jax.errors import ConfigError
from strata_jax.hardware import GIB, MIB, Gpu, Hardware, resolve_hardware
from strata_jax.runtime import check_limit, default_cache_dir, describe_target, plan_runtime, prepare_jax

REPOSITORY = Path(__file__).resolve().parents[1]
CARD = Gpu("Some GPU", 16_000 * MIB, 15_900 * MIB)


def machine(gpu: Gpu | None = None) -> Hardware:
    """Return a machine with 32 GiB of RAM."""
    found = Hardware("local", "Linux", "cpu", 2, 32 * GIB, 0, "host memory", gpu, gpu.total_bytes if gpu else None, 0)
    return resolve_hardware(HardwareConfig(), found)


def test_memory_fraction_comes_from_the_budget_of_the_plan() -> None:
    env = plan_runtime(RunConfig(), machine(CARD), {}, host_pool_bytes=10 * GIB + 1)
    assert env.platform == "gpu"
    assert env.memory_limit_bytes == 15_300 * MIB
    assert env.variables["XLA_CLIENT_MEM_FRACTION"] == f"{15_300 / 16_000:.6f}"
    assert env.variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert env.variables["XLA_PYTHON_CLIENT_ALLOCATOR"] == "cuda_async"
    assert env.variables["TF_DETERMINISTIC_ALLOCATOR"] == "1"
    chosen = plan_runtime(RunConfig(), machine(CARD), {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"})
    assert chosen.variables["XLA_PYTHON_CLIENT_ALLOCATOR"] == "bfc"
    assert env.variables["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "14"  # the plan's bytes, 12 % more, 2
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env.variables


def test_products_are_not_tuned_on_a_gpu_unless_the_flags_say_so() -> None:
    given = {"XLA_FLAGS": "--xla_gpu_autotune_level=4"}
    on_gpu = plan_runtime(RunConfig(), machine(CARD), given).variables["XLA_FLAGS"].split()
    ours = {"--xla_gpu_enable_triton_gemm=false", "--xla_disable_hlo_passes=rematerialization"}
    assert {"--xla_gpu_autotune_level=4", *ours} <= set(on_gpu)
    assert sum("autotune_level" in flag for flag in on_gpu) == 1
    assert "xla_gpu" not in plan_runtime(RunConfig(), machine(), {}).variables["XLA_FLAGS"]


def test_a_given_memory_fraction_is_the_budget() -> None:
    env = plan_runtime(RunConfig(engine=EngineConfig(mem_fraction=0.25)), machine(CARD), {})
    assert env.memory_limit_bytes == 4_000 * MIB
    assert env.variables["XLA_CLIENT_MEM_FRACTION"] == "0.250000"


def test_no_gpu_variables_on_the_cpu() -> None:
    for env in (
        plan_runtime(RunConfig(), machine(), {}),
        plan_runtime(RunConfig(engine=EngineConfig(platform=Platform.cpu)), machine(CARD), {}),
        plan_runtime(RunConfig(), machine(CARD), {"JAX_PLATFORMS": "cpu"}),
    ):
        assert env.memory_limit_bytes is None
        assert [name for name in env.variables if name.startswith("XLA_")] == ["XLA_FLAGS"]


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_a_fraction_in_the_environment_is_refused_with_the_setting_that_replaces_it(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=0\.5.*engine\.mem_fraction=0\.5"):
        plan_runtime(RunConfig(), machine(CARD), {name: "0.5"})


def test_platform_and_environment_must_not_contradict() -> None:
    config = RunConfig(engine=EngineConfig(platform=Platform.cpu))
    with pytest.raises(ConfigError, match=r"engine\.platform=cpu.*JAX_PLATFORMS=cuda"):
        plan_runtime(config, machine(CARD), {"JAX_PLATFORMS": "cuda"})
    assert plan_runtime(config, machine(CARD), {"JAX_PLATFORMS": "cpu"}).platform == "cpu"


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.platform=cuda: no GPU"):
        plan_runtime(RunConfig(engine=EngineConfig(platform=Platform.cuda)), machine(), {})


def test_cache_directory_is_given_or_of_the_environment_or_of_the_user(tmp_path: Path) -> None:
    given = RunConfig(engine=EngineConfig(compilation_cache_dir=str(tmp_path)))
    assert plan_runtime(given, machine(), {"JAX_COMPILATION_CACHE_DIR": "/elsewhere"}).compilation_cache_dir == tmp_path
    from_environment = plan_runtime(RunConfig(), machine(), {"JAX_COMPILATION_CACHE_DIR": "/elsewhere"})
    assert from_environment.compilation_cache_dir == Path("/elsewhere")
    assert default_cache_dir({"XDG_CACHE_HOME": "/c"}, "a").parent == Path("/c/strata-jax/xla")
    assert default_cache_dir({"HOME": "/h"}, "a") != default_cache_dir({"HOME": "/h"}, "b")
    none = plan_runtime(RunConfig(engine=EngineConfig(compilation_cache_dir=None)), machine(), {})
    assert none.variables["JAX_ENABLE_COMPILATION_CACHE"] == "false"


def test_a_cache_that_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    config = RunConfig(engine=EngineConfig(compilation_cache_dir=str(shared)))
    with pytest.raises(ConfigError, match=r"compilation_cache_dir=.*everybody can write"):
        prepare_jax(config, machine(), environ={})


def test_the_limit_that_jax_reports_must_be_the_planned_one() -> None:
    check_limit(1000 * MIB, 1005 * MIB)
    with pytest.raises(RuntimeError, match=r"12,000 MiB.*8,000 MiB"):
        check_limit(12_000 * MIB, 8_000 * MIB)
    with pytest.raises(RuntimeError, match="does not report"):
        check_limit(None, 8_000 * MIB)


CHILD = """
import json, sys
from pathlib import Path
from strata_jax.config import EngineConfig, Platform, RunConfig
from strata_jax.errors import ConfigError
from strata_jax.hardware import GIB, MIB, Gpu, Hardware
from strata_jax.runtime import prepare_jax, start_jax, verify_jax

cache = Path(sys.argv[1])
hardware = Hardware("local", "Linux", "cpu", 2, 32 * GIB, 0, "host memory", None, None, 0)
config = RunConfig(engine=EngineConfig(platform=Platform.cpu, compilation_cache_dir=str(cache / "one")))
before = "jax" in sys.modules
env = start_jax(config, hardware)
import jax
def program(x):
    for step in range(40):  # compiles in a fraction of a second, below JAX's own limit of 1 s
        x = jax.numpy.sin(x @ x) + jax.numpy.cumsum(x * step, axis=1)
    return x
jax.jit(program)(jax.numpy.ones((64, 64))).block_until_ready()
kept = len(list((cache / "one").iterdir()))

other = RunConfig(engine=EngineConfig(platform=Platform.cpu, compilation_cache_dir=str(cache / "two")))
start_jax(other, hardware)   # the cache may change while JAX runs
jax.config.update("jax_compilation_cache_dir", str(cache / "three"))
try:
    verify_jax(env)
    noticed = ""
except RuntimeError as error:
    noticed = str(error)

card = Gpu("Some GPU", 16_000 * MIB, 16_000 * MIB)
with_card = Hardware("local", "Linux", "cpu", 2, 32 * GIB, 0, "host memory", card, card.total_bytes, 700 * MIB)
import os
os.environ.pop("JAX_PLATFORMS")
try:
    prepare_jax(RunConfig(), with_card)
    refused = ""
except ConfigError as error:
    refused = str(error)
print(json.dumps({"before": before, "kept": kept, "noticed": noticed, "refused": refused,
                  "platform": jax.default_backend()}))
"""


def test_the_environment_takes_effect_and_a_later_change_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["before"] is False
    assert found["platform"] == "cpu"
    assert found["kept"] > 0, "small programs are kept too"
    assert "three" in found["noticed"]
    assert "XLA_CLIENT_MEM_FRACTION" in found["refused"]
    assert "one process for each value" in found["refused"]


def test_importing_the_package_and_its_settings_does_not_import_jax() -> None:
    names = ", ".join(f"strata_jax.{name}" for name in ("config", "runtime", "report", "workloads", "hardware"))
    code = f"import sys, {names}"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit('jax' in sys.modules)"], cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0


GPU_CHILD = """
import json
from strata_jax.config import EngineConfig, HardwareConfig, RunConfig
from strata_jax.hardware import GIB, describe_local, resolve_hardware
from strata_jax.runtime import start_jax

hardware = resolve_hardware(HardwareConfig(vram_mib=8151, vram_reserve_mib=590), describe_local())
env = start_jax(RunConfig(engine=EngineConfig(compilation_cache_dir=None)), hardware, host_pool_bytes=GIB)
import jax
print(json.dumps([env.memory_limit_bytes, jax.devices()[0].memory_stats()["bytes_limit"]]))
"""


@pytest.mark.gpu
def test_a_card_can_stand_in_for_a_smaller_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GPU_CHILD], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    planned, reported = json.loads(done.stdout.splitlines()[-1])
    assert planned == (8151 - 590) * MIB
    assert abs(planned - reported) <= 0.01 * planned


def test_a_run_on_the_cpu_of_a_gpu_machine_is_planned_without_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def found(*, look_for_gpu: bool = True) -> Hardware:
        seen.append(look_for_gpu)
        return machine(CARD if look_for_gpu else None)

    monkeypatch.setattr(runtime, "describe_local", found)
    assert describe_target(RunConfig(), {}).gpu is not None
    assert describe_target(RunConfig(), {"JAX_PLATFORMS": "cpu"}).gpu is None
    on_cpu = RunConfig(engine=EngineConfig(platform=Platform.cpu))
    assert describe_target(on_cpu, {}).vram_bytes is None
    assert seen == [True, False, False]


def test_a_memory_fraction_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "describe_local", lambda *, look_for_gpu=True: machine())
    with pytest.raises(ConfigError, match=r"engine\.mem_fraction=0\.5: there is no GPU in this run"):
        describe_target(RunConfig(engine=EngineConfig(mem_fraction=0.5)), {})
