"""Combinations that are refused or turned off, one row of a table each (planning notes 3.2, 6.2, 6.3).

`Effect.FATAL`: the original stops, or refuses the flag. `Effect.OFF`: it goes on without the flag and logs
"<flag> is off (<reason>)". `policy.compat=upstream` reproduces all of them. `native` keeps those marked physical and
lifts the rest, for the reason in `native`. What is left of the matrix under native:

| | compat=upstream | compat=native |
| --- | --- | --- |
| head alias with short reads | refused: windows need the head | a window loads the head; short reads leave it loaded |
| head alias with a fixed cache | refused above one slot | planned: a fixed cache is a constraint like any other |
| head alias without drafts | refused | nothing is bound, the head is still loaded and unloaded |
| head alias outside a server | refused | a run of one prompt has the same cycle |
| elastic K/V with an elastic cache | growth off | both: segments that hold cells stay |
| elastic K/V with experts in files | growth off | evicted experts are read again like any miss |
| elastic K/V with streamed K/V | growth off | growth off: there is no K/V on the device that could grow |
| elastic K/V without a profile | growth off | growth off: slots have no order of heat |
| several sequences or devices, pipelined windows | refused or off | refused: one session on one device is planned |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from strata_jax.memory.strata.request import ExpertTier, StrataRequest
from strata_jax.policies.policy import Compat

MIN_SEGMENT_MIB = 64


class Effect(StrEnum):
    """What the original does with a combination."""

    FATAL = "fatal"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Switches:
    """Settings of the original that no plan has; most exist here only to express what it refuses.

    Attributes:
        serve: a server, rather than one prompt. devices: GPUs in use. layer_split: layers are split over devices.
        layer_cuts: first layers of the later devices. device_host: runtime of the device, cuda, hip or sycl.
        remote_caches: expert caches on helper devices. cpu_oracle, no_capture: diagnostics of the original.
        context_needed: prompt and output of a request, 0: none is known.
    """

    serve: bool = True
    batch: int = 1
    batch_mtp: bool = False
    devices: int = 1
    layer_split: bool = False
    layer_cuts: tuple[int, ...] = ()
    num_layers: int = 48
    split_device: int | None = None
    peer_device: bool = False
    pipeline_windows: int = 0
    remote_caches: bool = False
    remote_expert_opt: bool = False
    pool: bool = False
    no_native_head: bool = False
    native_pack: bool = True
    native_shards: bool = True
    shared_expert_arena: bool = False
    mmap_experts: bool = False
    resident_cpu_experts: bool = False
    cpu_oracle: bool = False
    no_capture: bool = False
    adapt_async: bool = False
    live_memory: bool = False
    stage_own_buffers: bool = False
    ple_io: str = "direct"
    os: str = "linux"
    device_host: str = "cuda"
    vmm: bool = True
    prefill: bool = True
    prefill_borrow: bool = True
    context_needed: int = 0


Condition = Callable[[StrataRequest, Switches], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal.

    Attributes:
        flag: what is refused, by its key here. condition: when. message: why, both sides named.
        physical: native refuses it too. native: why, or what native does instead.
    """

    flag: str
    effect: Effect
    condition: Condition
    message: str
    physical: bool
    native: str


FATAL, OFF = Effect.FATAL, Effect.OFF


def _alias(when: Condition) -> Condition:
    return lambda r, s: r.head_alias and when(r, s)


def _grow(when: Condition) -> Condition:
    return lambda r, s: r.grow.enabled and when(r, s)


def _elastic(when: Condition) -> Condition:
    return lambda r, s: r.vram_elastic_mib > 0 and when(r, s)


def _own(when: Condition) -> Condition:
    return lambda r, s: r.own != "off" and when(r, s)


def _split(s: Switches) -> bool:
    return s.layer_split or s.devices > 1


def _cuts_increase(s: Switches) -> bool:
    return all(2 <= cut < s.num_layers for cut in s.layer_cuts) and all(
        a < b for a, b in zip(s.layer_cuts, s.layer_cuts[1:])
    )


def _has_cache(r: StrataRequest) -> bool:
    return r.expert_cache != 0 or r.profile


ONE_SEQUENCE = "one sequence on one device is planned"
ENGINE = "a path of the original's engine; the switch does nothing here"
ALIAS, GROW, ELASTIC = "policy.head_alias", "policy.kv_grow", "upstream.vram_elastic"

RULES: tuple[Rule, ...] = (
    # head alias (planning notes 3.2, 6.2)
    Rule(ALIAS, FATAL, _alias(lambda r, s: not s.serve), "needs a server; this is a run of one prompt", False,
         "a single prompt has the same cycle"),
    Rule(ALIAS, FATAL, _alias(lambda r, s: _split(s)), "upstream.layer_split or more than one device", True,
         ONE_SEQUENCE),
    Rule(ALIAS, FATAL, _alias(lambda r, s: s.batch > 1), "upstream.batch above 1: another sequence needs the head while"
         " a prompt is read", True, "the head cannot be away and in use at once"),
    Rule(ALIAS, FATAL, _alias(lambda r, s: s.pipeline_windows > 0), "upstream.pipeline_windows above 0: a second window"
         " is in flight", True, "the head cannot be away and in use at once"),
    Rule(ALIAS, FATAL, _alias(lambda r, s: r.short_read_tokens > 0), "prefill.short_read_tokens above 0: decode windows"
         " need the head", False, "a window loads the head if it is away"),
    Rule(ALIAS, FATAL, _alias(lambda r, s: r.expert_cache is not None and r.expert_cache > 1), "cache.slots fixed above"
         " 1: the cache is to take the head's bytes", False, "a fixed cache is planned like any constraint"),
    Rule(ALIAS, FATAL, _alias(lambda r, s: not r.mtp), "upstream.mtp=false: no drafter copies its rows from the head",
         False, "nothing needs to be bound"),
    Rule(ALIAS, FATAL, _alias(lambda r, s: s.no_native_head), "upstream.no_native_head=true: there is no head on the"
         " device to lend", True, "there is nothing to lend"),
    # elastic K/V (planning notes 6.3, 3.2)
    Rule(GROW, OFF, _grow(lambda r, s: _split(s)), "more than one device", True, ONE_SEQUENCE),
    Rule(GROW, OFF, _grow(lambda r, s: r.kv_resident_cells > 0), "kv.resident_cells above 0: the K/V lies in RAM", True,
         "no K/V on the device could grow"),
    Rule(GROW, OFF, _grow(lambda r, s: not r.profile), "no expert profile", True, "slots have no order of heat"),
    Rule(GROW, OFF, _grow(lambda r, s: s.resident_cpu_experts), "resident CPU experts", False,
         "evicted experts are read like any miss"),
    Rule(GROW, OFF, _grow(lambda r, s: not _has_cache(r) or r.expert_cache == 0), "cache.slots=0: no slots could pay",
         True, "nothing could pay"),
    Rule(GROW, OFF, _grow(lambda r, s: s.remote_caches), "expert caches on helper devices", True, ONE_SEQUENCE),
    Rule(GROW, OFF, _grow(lambda r, s: not s.vmm), "the device cannot map memory in parts (VMM)", False,
         "K/V pages are table entries"),
    Rule(GROW, OFF, _grow(lambda r, s: s.batch > 1), "upstream.batch above 1", True, ONE_SEQUENCE),
    Rule(GROW, OFF, _grow(lambda r, s: r.vram_elastic_mib > 0), "upstream.vram_elastic: another owner of the cache's"
         " memory", False, "segments that hold K/V cells stay"),
    Rule(GROW, OFF, _grow(lambda r, s: s.peer_device), "upstream.peer_device", True, ONE_SEQUENCE),
    Rule(GROW, OFF, _grow(lambda r, s: r.tier is not ExpertTier.ARENA or s.mmap_experts), "experts without a slot stay"
         " in files (low-RAM tier)", False, "evicted experts are read again like any miss"),
    Rule(GROW, OFF, _grow(lambda r, s: not r.token_graph), "upstream.token_graph=false: no residency table on the"
         " device", False, "the table is always on the device"),
    Rule(GROW, FATAL, _grow(lambda r, s: s.live_memory), "live memory is on", True, "two owners of the cache's memory"),
    # elastic cache
    Rule(ELASTIC, OFF, _elastic(lambda r, s: not s.serve), "needs a server: nobody asks for memory otherwise", False,
         "the request comes from the caller"),
    Rule(ELASTIC, OFF, _elastic(lambda r, s: _split(s)), "more than one device", True, ONE_SEQUENCE),
    Rule(ELASTIC, OFF, _elastic(lambda r, s: s.remote_caches or s.peer_device), "expert caches on helper devices", True,
         ONE_SEQUENCE),
    Rule(ELASTIC, OFF, _elastic(lambda r, s: r.vram_elastic_mib < MIN_SEGMENT_MIB), "segments below 64 MiB", True,
         "the cost of a segment no longer pays"),
    Rule(ELASTIC, OFF, _elastic(lambda r, s: s.device_host == "hip"), "a HIP device", False,
         "no driver calls are made"),
    Rule(ELASTIC, FATAL, _elastic(lambda r, s: s.live_memory), "live memory is on", True,
         "two owners of the cache's memory"),
    # own prompt buffers (planning notes 6.1)
    Rule("prefill.own", OFF, _own(lambda r, s: _split(s) or s.remote_caches), "more than one device, or caches on"
         " helper devices", True, ONE_SEQUENCE),
    Rule("prefill.own", OFF, _own(lambda r, s: not r.profile), "no expert profile: buffers are the prompt path's own"
         " already", False, "the planner decides as without the switch"),
    Rule("prefill.own", OFF, _own(lambda r, s: not s.prefill_borrow), "prefill.borrow=false: buffers are owned and"
         " priced already", False, "the planner decides as without the switch"),
    # the rest of 3.2
    Rule("upstream.shared_expert_arena", FATAL, lambda r, s: s.shared_expert_arena and s.mmap_experts,
         "with mapped expert files: two owners of the same pages", True, "two owners of the same pages"),
    Rule("upstream.resident_cpu_experts", FATAL, lambda r, s: s.resident_cpu_experts and not (
         s.mmap_experts and r.profile), "needs mapped expert files and a profile", False, ENGINE),
    Rule("upstream.resident_cpu_experts", FATAL, lambda r, s: s.resident_cpu_experts and s.remote_caches,
         "with caches on helper devices", True, ONE_SEQUENCE),
    Rule("model.path", FATAL, lambda r, s: s.native_pack and not (
         s.native_shards and r.spec_window >= 2 and s.prefill),
         "a native pack needs its GGUF shards, spec.window of 2 or more and a prompt path", False,
         "windows of one token are supported"),
    Rule("upstream.layer_split", FATAL, lambda r, s: s.layer_split and not (s.serve and r.profile),
         "needs a server and a profile", True, ONE_SEQUENCE),
    Rule("upstream.layer_split", FATAL, lambda r, s: s.layer_split and not _cuts_increase(s),
         "cuts must increase, each from 2 to below the number of layers", True, ONE_SEQUENCE),
    Rule("conversation.budget_mib", FATAL, lambda r, s: r.conversation_mib > 0 and s.split_device == 0,
         "with a split onto device 0: the state lies on two devices", True, ONE_SEQUENCE),
    Rule("upstream.peer_device", FATAL, lambda r, s: s.peer_device and (_split(s) or s.remote_caches),
         "with a split or caches on helper devices", True, ONE_SEQUENCE),
    Rule("upstream.remote_expert_opt", FATAL, lambda r, s: s.remote_expert_opt and not s.serve, "needs a server", True,
         ONE_SEQUENCE),
    Rule("upstream.cpu_oracle", FATAL, lambda r, s: s.cpu_oracle and _has_cache(r), "with an expert cache", False,
         ENGINE),
    Rule("upstream.no_capture", FATAL, lambda r, s: s.no_capture and s.pool, "with upstream.pool", False, ENGINE),
    Rule("pipeline=serve", FATAL, lambda r, s: s.serve and not (r.spec_window >= 2 or s.prefill),
         "needs spec.window of 2 or more, or a prompt path", False, "windows of one token are supported"),
    Rule("spec.window", FATAL, lambda r, s: r.spec_window > 1 and not (r.profile and _has_cache(r) and r.token_graph),
         "above 1 needs a profile, expert slots and upstream.token_graph: the residency table on the device", False,
         "the table is always on the device"),
    Rule("upstream.ple_io", FATAL, lambda r, s: s.ple_io == "ram" and s.os == "windows", "ram on Windows", False,
         ENGINE),
    Rule("model.max_context", FATAL, lambda r, s: s.context_needed + 8 > r.context_cells > 0,
         "prompt, output and 8 cells exceed it", True, "cells cannot be missing"),
    Rule("upstream.adapt_async", OFF, lambda r, s: s.adapt_async and (
         s.batch > 1 or _split(s) or s.pipeline_windows > 0),
         "with several sequences, devices or windows in flight", True, ONE_SEQUENCE),
    Rule("upstream.batch_mtp", OFF, lambda r, s: s.batch_mtp and (s.batch <= 1 or _split(s) or s.pipeline_windows > 0),
         "needs upstream.batch above 1 on one device without pipelined windows", True, ONE_SEQUENCE),
    Rule("upstream.live_memory", FATAL, lambda r, s: s.live_memory and (
         s.batch > 1 or s.adapt_async or s.stage_own_buffers),
         "with several sequences, asynchronous swaps or own buffers of a stage", True, "two owners of the same memory"),
)  # fmt: skip


def broken_rules(request: StrataRequest, switches: Switches, compat: Compat) -> Iterator[Rule]:
    """Yield the rules that a run breaks, in the order of the table; native has the physical ones only."""
    for rule in RULES:
        if (rule.physical or compat is Compat.UPSTREAM) and rule.condition(request, switches):
            yield rule


def refusals(request: StrataRequest, switches: Switches, compat: Compat) -> list[str]:
    """Return one message for each combination that stops a run; what is only turned off is in `downgrades`."""
    return [_said(rule, compat) for rule in broken_rules(request, switches, compat) if rule.effect is FATAL]


def downgrades(request: StrataRequest, switches: Switches, compat: Compat) -> dict[str, str]:
    """Return the flags that are off and the log line of each; the first reason counts."""
    lines: dict[str, str] = {}
    for rule in broken_rules(request, switches, compat):
        if rule.effect is OFF:
            lines.setdefault(rule.flag, f"{rule.flag} is off ({rule.message})")
    return lines


def _said(rule: Rule, compat: Compat) -> str:
    lifted = "" if rule.physical else f"; with policy.compat=native: {rule.native}"
    return f"{rule.flag}: {rule.message}{lifted if compat is Compat.UPSTREAM else ''}"
