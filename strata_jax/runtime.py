"""JAX's environment: decided by the settings, put in place before JAX starts, and checked afterwards.

JAX reads the platform, its share of device memory, preallocation and the host pool once, when its first backend starts;
a later change would be ignored in silence, so it is refused here. Names and behaviour: JAX's pages on GPU memory
allocation and on the persistent compilation cache.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import stat
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_jax.config.schema import AUTO, Platform, RunConfig
from strata_jax.errors import ConfigError
from strata_jax.hardware import GIB, MIB, Hardware, cpu_model, describe_local, resolve_hardware

log = logging.getLogger(__name__)

MEM_FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # deprecated; both set is an error inside JAX
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
HOST_POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # XLA multiplies by 2^30 and takes 64 where it is not set
# JAX's own allocator gives a whole hole to what fills more than half of it, and finds no room where free memory lies in
# pieces: beside 170 MB of planned temporaries its count went 300 MB up (4 layers, chunk 512, jax 0.11.2). CUDA's counts
# what was asked for and maps pieces together.
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
ALLOCATOR_KIND = "cuda_async"
# Equal rounds get equal addresses: else CUDA's pool gives out what happens to be free already, not the next in the
# order of the stream, and launches that are recorded have to be changed for each address that moves.
IN_STREAM_ORDER = "TF_DETERMINISTIC_ALLOCATOR"
PLATFORMS = "JAX_PLATFORMS"
CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"
XLA_FLAGS = "XLA_FLAGS"

# XLA's default order of operations on a CPU starts whatever is ready. Decoding a packed matrix depends on no
# activation, so it would decode all dense matrices of a step at once and hold them as float32 (measured: 33 MB of
# temporaries instead of 1.5 for 30 MB of weights). As a compiler option it has no effect (jaxlib 0.10.2, 0.12.0.1).
FREE_EARLY_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"

# XLA times several kernels for every product while it compiles, takes memory for that, and may choose differently in
# another process. Without that the programs of a 4-layer model of full width compiled in 27 s on an H200 (jax 0.11.2);
# with it they had not after 85 s.
# Nor does it look for values to compute twice to save memory: it counts the pinned bank as device memory, so that it
# always finds too little and tries for long.
GPU_FLAGS = {
    "--xla_gpu_autotune_level": "0", "--xla_gpu_enable_triton_gemm": "false",
    "--xla_disable_hlo_passes": "rematerialization",
}  # fmt: skip

# Fixed when the first backend starts; the others can be changed while JAX runs.
CLIENT_VARIABLES = (PLATFORMS, MEM_FRACTION, PREALLOCATE, ALLOCATOR, IN_STREAM_ORDER, HOST_POOL_GIB, XLA_FLAGS)

# JAX keeps programs above 1 s of compile time by default; a run here consists of many that take less.
CACHE_MIN_COMPILE_S = 0.05
LIMIT_TOLERANCE_FRAC = 0.01
# The pool grows in whole regions that double up to its limit and never shrink, and each region ends with a hole that is
# smaller than an array: banks of 9.7 GB in arrays of 0.7 to 0.9 GB did not fit into 11 GiB. XLA can take the pool at
# once, but takes it twice then (jax 0.11.2: 38 GiB pinned in 29 s, and again in 32 s at the first array).
HOST_POOL_SLACK_GIB = 2
HOST_POOL_SLACK_FRAC = 0.12


@dataclass(frozen=True, slots=True)
class RuntimeEnv:
    """What JAX must have: the variables to set and the facts to check once it has started."""

    platform: str | None
    """`cpu` or `gpu`; None leaves the choice to JAX."""
    variables: Mapping[str, str]
    memory_limit_bytes: int | None
    """Device memory JAX may take; None on the CPU."""
    compilation_cache_dir: Path | None


def describe_target(config: RunConfig, environ: Mapping[str, str] = os.environ) -> Hardware:
    """Return the machine that the settings ask for: without its GPU where the run computes on the CPU.

    Raises ConfigError for sizes that this machine does not have, and for a share of a GPU's memory without a GPU.
    """
    on_cpu = config.engine.platform is Platform.cpu or environ.get(PLATFORMS, "").split(",")[0] == "cpu"
    hardware = resolve_hardware(config.hardware, describe_local(look_for_gpu=not on_cpu))
    if config.engine.mem_fraction != AUTO and hardware.gpu is None:
        raise ConfigError(
            f"engine.mem_fraction={config.engine.mem_fraction}: there is no GPU in this run, so there is no device"
            " memory to take a share of. Leave it at auto; hardware.vram_mib lets the CPU stand in for a card."
        )
    return hardware


def device_budget_bytes(config: RunConfig, hardware: Hardware) -> int | None:
    """Return the device memory that JAX may take: the given fraction, or vram - reserve; None on the CPU."""
    if config.engine.mem_fraction != AUTO and hardware.gpu is not None:
        return int(hardware.gpu.total_bytes * float(config.engine.mem_fraction))
    return hardware.vram_budget_bytes


def plan_runtime(
    config: RunConfig, hardware: Hardware, environ: Mapping[str, str], *, host_pool_bytes: int | None = None
) -> RuntimeEnv:
    """Decide JAX's environment. Pure: changes nothing and looks at `environ` only.

    host_pool_bytes: pinned host memory of the RAM plan; None takes the whole RAM budget.
    """
    variables: dict[str, str] = {XLA_FLAGS: with_free_early(environ.get(XLA_FLAGS, ""))}
    asked = config.engine.platform
    present = environ.get(PLATFORMS, "")
    if asked is not Platform.auto:
        wanted = {Platform.cpu: "cpu", Platform.cuda: "cuda,cpu"}[asked]
        if present and present.split(",")[0] not in (wanted.split(",")[0], "gpu" if asked is Platform.cuda else ""):
            raise ConfigError(
                f"engine.platform={asked.name} and the environment variable {PLATFORMS}={present}: they ask for"
                " different"
                f" devices. Unset {PLATFORMS}, or set engine.platform=auto to follow it."
            )
        variables[PLATFORMS] = present or wanted
    on_cpu = asked is Platform.cpu or present.split(",")[0] == "cpu"
    if asked is Platform.cuda and hardware.gpu is None:
        raise ConfigError("engine.platform=cuda: no GPU that JAX can use was found. " + " ".join(hardware.notes))
    on_gpu = hardware.gpu is not None and not on_cpu
    limit_bytes = None
    if on_gpu and hardware.gpu is not None:
        limit_bytes = device_budget_bytes(config, hardware)
        if limit_bytes is None:
            raise ValueError("a GPU without a memory budget")
        variables |= _gpu_variables(config, hardware, limit_bytes, environ, host_pool_bytes)
        variables[XLA_FLAGS] = _with_flags(variables[XLA_FLAGS], GPU_FLAGS)
    cache_dir = _cache_dir(config, environ)
    if cache_dir is None:
        variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    else:
        variables[CACHE_DIR] = str(cache_dir)
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = str(CACHE_MIN_COMPILE_S)
        variables["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    return RuntimeEnv("gpu" if on_gpu else "cpu" if on_cpu else None, variables, limit_bytes, cache_dir)


def with_free_early(flags: str) -> str:
    """Return XLA's flags with the one that this program needs, unless they set it already."""
    return _with_flags(flags, {FREE_EARLY_FLAG: "false"})


def _with_flags(flags: str, defaults: Mapping[str, str]) -> str:
    """Return XLA's flags with the defaults that they do not set themselves."""
    missing = (f"{name}={value}" for name, value in defaults.items() if name not in flags)
    return " ".join([flags, *missing]).strip()


def prepare_jax(
    config: RunConfig,
    hardware: Hardware,
    *,
    host_pool_bytes: int | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> RuntimeEnv:
    """Put JAX's environment in place, before `import jax`. Raises ConfigError if JAX already runs with another one."""
    env = plan_runtime(config, hardware, environ, host_pool_bytes=host_pool_bytes)
    if env.compilation_cache_dir is not None:
        env = _with_usable_cache(env, given=config.engine.compilation_cache_dir != AUTO)
    if backend_started():
        fixed = {name: env.variables.get(name) for name in CLIENT_VARIABLES if name in env.variables}
        changed = {name: value for name, value in fixed.items() if environ.get(name) != value}
        if env.platform is not None and running_platform() == env.platform:
            changed.pop(PLATFORMS, None)
        if changed:
            name, value = next(iter(changed.items()))
            raise ConfigError(
                f"{name} would have to change from {environ.get(name, 'unset')} to {value}, but JAX has already"
                " started in"
                " this process and reads it only once. In a sweep the first job fixes it: start one process for"
                " each value,"
                " for example with hydra/launcher=joblib, or with a loop in the shell."
            )
    environ.update(env.variables)
    if "jax" in sys.modules:
        _update_running(sys.modules["jax"], env)
    return env


def verify_jax(env: RuntimeEnv) -> None:
    """Import JAX, start its backend and raise RuntimeError where it does not have what `env` says."""
    jax: Any = importlib.import_module("jax")  # only now: the environment is in place
    found = running_platform(jax)
    if env.platform is not None and found != env.platform:
        raise RuntimeError(f"JAX runs on {found}, but {env.platform} was asked for; see its warnings above")
    wanted_dir = str(env.compilation_cache_dir) if env.compilation_cache_dir else None
    if env.compilation_cache_dir is None:
        if jax.config.jax_enable_compilation_cache:
            raise RuntimeError("JAX keeps compiled programs, but engine.compilation_cache_dir=null")
    elif jax.config.jax_compilation_cache_dir != wanted_dir:
        raise RuntimeError(f"JAX's compilation cache is {jax.config.jax_compilation_cache_dir}, not {wanted_dir}")
    if env.memory_limit_bytes is not None:
        stats = jax.devices()[0].memory_stats() or {}
        check_limit(stats.get("bytes_limit"), env.memory_limit_bytes)


def check_limit(found_bytes: int | None, wanted_bytes: int) -> None:
    """Raise RuntimeError if JAX's own memory limit is not the planned one, within 1 %."""
    if found_bytes is None:
        raise RuntimeError("JAX's allocator does not report its memory limit; unset XLA_PYTHON_CLIENT_ALLOCATOR")
    if abs(found_bytes - wanted_bytes) > LIMIT_TOLERANCE_FRAC * wanted_bytes:
        raise RuntimeError(
            f"JAX may take {found_bytes // MIB:,} MiB of device memory, but {wanted_bytes // MIB:,} MiB were planned;"
            f" was JAX imported before the settings were read?"
        )


def start_jax(config: RunConfig, hardware: Hardware, *, host_pool_bytes: int | None = None) -> RuntimeEnv:
    """Prepare, import and verify JAX. Every pipeline that computes calls this once, before it imports the engine."""
    env = prepare_jax(config, hardware, host_pool_bytes=host_pool_bytes)
    verify_jax(env)
    return env


def backend_started() -> bool:
    """Say whether JAX runs in this process with a backend, whose settings can no longer change."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(getattr(bridge, "_backends", None))


def running_platform(jax: Any = None) -> str:
    """Return the platform of the running JAX: `cpu` or `gpu`."""
    return str((jax or sys.modules["jax"]).default_backend())


def default_cache_dir(environ: Mapping[str, str], cpu: str) -> Path:
    """Return the user's cache directory for compiled programs, apart for each kind of CPU.

    Programs for the CPU use its instructions: a home shared by different machines must not mix them.
    """
    given = environ.get("XDG_CACHE_HOME")
    base = Path(given) if given else Path(environ.get("HOME") or Path.home()) / ".cache"
    return base / "strata-jax" / "xla" / hashlib.sha256(cpu.encode()).hexdigest()[:8]


def _gpu_variables(
    config: RunConfig, hardware: Hardware, limit_bytes: int, environ: Mapping[str, str], host_pool_bytes: int | None
) -> dict[str, str]:
    if hardware.gpu is None:
        raise ValueError("variables for a GPU that is not there")
    fraction = f"{limit_bytes / hardware.gpu.total_bytes:.6f}"
    for name in (OLD_MEM_FRACTION, MEM_FRACTION):
        if name in environ and (name == OLD_MEM_FRACTION or environ[name] != fraction):
            raise ConfigError(
                f"the environment variable {name}={environ[name]} is set, but the plan gives JAX {fraction} of"
                " the device"
                f" memory. Unset it and set engine.mem_fraction={environ[name]} instead."
            )
    pool_bytes = hardware.ram_budget_bytes if host_pool_bytes is None else host_pool_bytes
    return {
        MEM_FRACTION: fraction,
        PREALLOCATE: "true" if config.engine.preallocate else "false",
        ALLOCATOR: environ.get(ALLOCATOR, ALLOCATOR_KIND),
        IN_STREAM_ORDER: environ.get(IN_STREAM_ORDER, "1"),
        HOST_POOL_GIB: str(math.ceil(pool_bytes * (1 + HOST_POOL_SLACK_FRAC) / GIB) + HOST_POOL_SLACK_GIB),
    }


def _cache_dir(config: RunConfig, environ: Mapping[str, str]) -> Path | None:
    given = config.engine.compilation_cache_dir
    if given is None:
        return None
    if given != AUTO:
        return Path(given).expanduser().absolute()
    present = environ.get(CACHE_DIR)
    return Path(present) if present else default_cache_dir(environ, cpu_model())


def _with_usable_cache(env: RuntimeEnv, *, given: bool) -> RuntimeEnv:
    """Make the cache directory. One that is not writable or not private is not used; a given one is then refused."""
    directory = env.compilation_cache_dir
    if directory is None:
        return env
    problem = None
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.name == "posix" and directory.stat().st_mode & stat.S_IWOTH:
            problem = "everybody can write to it, and compiled programs in it are executed"
        elif not os.access(directory, os.W_OK):
            problem = "it is not writable"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is None:
        return env
    if given:
        raise ConfigError(f"engine.compilation_cache_dir={directory}: {problem}. Give another directory, or null.")
    log.warning("compiled programs are not kept: %s: %s", directory, problem)
    kept = {k: v for k, v in env.variables.items() if k != CACHE_DIR and not k.startswith("JAX_PERSISTENT")}
    return RuntimeEnv(env.platform, kept | {"JAX_ENABLE_COMPILATION_CACHE": "false"}, env.memory_limit_bytes, None)


def _update_running(jax: Any, env: RuntimeEnv) -> None:
    """Bring the settings that an imported JAX can still change in line with `env`."""
    enabled = env.compilation_cache_dir is not None
    directory = str(env.compilation_cache_dir) if enabled else None
    same_place = jax.config.jax_compilation_cache_dir == directory
    if not backend_started() and PLATFORMS in env.variables:
        jax.config.update("jax_platforms", env.variables[PLATFORMS])
    jax.config.update("jax_enable_compilation_cache", enabled)
    if enabled:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHE_MIN_COMPILE_S)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_compilation_cache_dir", directory)
    if not same_place:
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()  # else the first place stays in use
