"""What the original refuses or switches off, applied to a request: the `upstream.*` settings have no other use."""

from __future__ import annotations

from dataclasses import replace

from strata_jax.config.checks import join_problems
from strata_jax.config.choices import Compat
from strata_jax.config.schema import RunConfig
from strata_jax.errors import ConfigError
from strata_jax.memory.strata.request import StrataRequest
from strata_jax.policies.policy import Compat as PolicyCompat
from strata_jax.policies.refusals import Switches, downgrades, refusals

# What a flag that is off changes in a request.
SWITCHED_OFF = {
    "policy.kv_grow": lambda request: replace(request, grow=replace(request.grow, enabled=False)),
    "upstream.vram_elastic": lambda request: replace(request, vram_elastic_mib=0),
    "prefill.own": lambda request: replace(request, own="off"),
}


def allowed_request(
    config: RunConfig, request: StrataRequest, *, num_layers: int, needed_cells: int
) -> tuple[StrataRequest, tuple[str, ...]]:
    """Return the request without what is switched off, and a line for each of those flags.

    With policy.compat=native nothing is switched off in silence: a combination that cannot run is a contradiction.

    Args:
        needed_cells: of the longest request of the workload, prompt and output.

    Raises:
        ConfigError: combinations that cannot run, each with its reason.
    """
    compat = PolicyCompat(config.policy.compat.value)
    switches = switches_of(config, os=request_os(config), num_layers=num_layers, needed_cells=needed_cells)
    problems = refusals(request, switches, compat)
    off = downgrades(request, switches, compat)
    if config.policy.compat is Compat.native:
        problems += [line.replace(" is off (", ": cannot be on (") for line in off.values()]
    if problems:
        raise ConfigError(join_problems(problems))
    for flag in off:
        if flag in SWITCHED_OFF:
            request = SWITCHED_OFF[flag](request)
    return request, tuple(off.values())


def switches_of(config: RunConfig, *, os: str, num_layers: int, needed_cells: int) -> Switches:
    """Return the original's switches as the settings have them."""
    u = config.upstream
    cuts = tuple(int(part) for part in (u.layer_split or "").split(",") if part.strip().isdigit())
    return Switches(
        serve=u.serve,
        batch=u.batch,
        batch_mtp=u.batch_mtp,
        devices=u.devices,
        layer_split=u.layer_split is not None,
        layer_cuts=cuts,
        num_layers=num_layers,
        split_device=u.split_device,
        peer_device=u.peer_device is not None,
        pipeline_windows=u.pipeline_windows,
        remote_caches=u.remote_caches,
        remote_expert_opt=u.remote_expert_opt,
        pool=u.pool,
        no_native_head=u.no_native_head,
        shared_expert_arena=u.shared_expert_arena,
        mmap_experts=u.mmap_experts,
        resident_cpu_experts=u.resident_cpu_experts,
        cpu_oracle=u.cpu_oracle,
        no_capture=u.no_capture,
        adapt_async=u.adapt_async,
        live_memory=u.live_memory,
        stage_own_buffers=u.stage_own_buffers,
        ple_io=u.ple_io,
        os=os,
        device_host=u.device_host,
        vmm=u.vmm,
        prefill_borrow=config.prefill.borrow is not False,
        context_needed=needed_cells,
    )


def request_os(config: RunConfig) -> str:
    """Return the operating system that the settings give; `auto` counts as Linux, which refuses less."""
    return config.hardware.os if config.hardware.os != "auto" else "linux"
