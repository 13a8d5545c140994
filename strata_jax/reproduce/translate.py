"""From a published row to what the planner and the simulator are asked for.

Generic: engine flags and environment switches have one meaning each (planning notes 3.1 and 3.3), wherever they occur;
nothing depends on a row's id or case. A setting that varied over a row's trials is run at both of its ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata_jax.memory.strata.request import MIB, ExpertTier, GrowSettings, StrataRequest, Version
from strata_jax.reproduce.asks import Ask, Focus, ask_of
from strata_jax.reproduce.rows import Row
from strata_jax.reproduce.stated import OWN_BUFFER_BUILD, Stated, stated

ENGINE = "Strata"  # rows of other engines are peers to look at, not to reproduce
DRAFT_VOCABULARY = {"cjk": 106_299, "en": 40_525, "cyrillic": 58_963, "fr": 46_211}  # planning notes 1.6
HEADROOM_MIB = 4096.0  # of resident experts, planning notes 2.8
WINDOWS_PIN_MIB = 8192  # pinning `auto` keeps this below half of the RAM on Windows, planning notes 2.8


class NotTranslatable(Exception):
    """A row that this translation has no words for; the message says what it is."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a row says of its machine, over the profile of its GPU. None: as the profile has it.

    Attributes:
        pin: how much of the expert arena is registered with the device: none, auto (by the system's rule) or the
            share.
    """

    gpu: str
    vram_mib: int | None = None
    ram_gib: float | None = None
    os: str | None = None
    pcie_gb_s: float | None = None
    pin: str | float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run to plan and simulate; rows with equal scenarios share it.

    Attributes:
        ple: type of the n-gram table where the row names one.
        pcie_frac: share of misses that the device reads itself; None: by the probe (planning notes 4.3).
        min_p: drafting stops below this probability.
        reserve_later_mib: device memory asked back from an elastic cache before the requests; None: nothing.
        draft_acceptance: share of offered drafts that were accepted, which the text decides; None: not stated.
    """

    machine: Machine
    model: str
    quant: str
    ple: str | None
    request: StrataRequest
    pcie_frac: float | None
    min_p: float
    reserve_later_mib: int | None
    ask: Ask
    draft_acceptance: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario as one row sees it.

    Attributes:
        end: which end of a varied setting this is, empty where nothing varied.
        focus: which of the scenario's requests the row is about.
        confounders: what differs from a clean comparison, and what had to be assumed.
    """

    scenario: Scenario
    focus: Focus
    end: str
    confounders: tuple[str, ...]


def translate(row: Row, siblings: Sequence[Row] = ()) -> tuple[Case, ...]:
    """Return the runs behind a row, one per end of what varied over its trials.

    siblings: rows of the same case; a row that states no prompt is about theirs.
    Raises NotTranslatable for rows of other engines and for settings whose value is not stated.
    """
    facts = stated(row)
    if not str(facts.software.get("engine", "")).startswith(ENGINE):
        raise NotTranslatable(f"another engine: {facts.software.get('engine')}")
    if not facts.hardware.get("gpu"):
        raise NotTranslatable("no machine")
    acceptance = draft_acceptance((row, *siblings))
    cases = []
    for end, settings in _ends(facts.settings):
        for ask, focus in ask_of(row, replace(facts, settings=settings), siblings):
            scenario = _scenario(replace(facts, settings=settings), ask)
            scenario = replace(scenario, draft_acceptance=acceptance)
            cases.append(Case(scenario, focus, end, (*facts.assumptions, *_confounders(row, facts, acceptance))))
    return tuple(cases)


def draft_acceptance(rows: Sequence[Row]) -> float | None:
    """Return the accepted share of offered drafts that a row, or else a row of its case, states."""
    scale = {"draft_acceptance_frac": 1.0, "draft_acceptance_pct": 0.01}
    cells = (cell for row in rows for cell in row.cells if cell.metric in scale and cell.value is not None)
    return next((float(cell.value) * scale[cell.metric] for cell in cells if cell.value is not None), None)


def without_policies(scenario: Scenario) -> Scenario:
    """Return the same run with every policy off: the other arm of a published change."""
    grow = replace(scenario.request.grow, enabled=False)
    request = replace(scenario.request, own="off", head_alias=False, grow=grow)
    if scenario.request.head_alias:  # the flag needs short reads off; without it they are at their default
        request = replace(request, short_read_tokens=StrataRequest().short_read_tokens)
    return replace(scenario, request=request)


def strata_version(text: str | None) -> Version:
    """Return the memory model of an engine version: rules changed with 0.1.40 and 0.1.43 (planning notes 2.4-2.6)."""
    parts = tuple(int(part) for part in re.findall(r"\d+", text or ""))
    if not parts:
        raise NotTranslatable("the engine's version is not stated")
    if parts < (0, 1, 40):
        return Version.V0_1_35
    return Version.V0_1_41 if parts < (0, 1, 43) else Version.V0_1_43


def preset_names(model: Mapping[str, Any]) -> tuple[str, str]:
    """Return model and quantisation preset for the names of a row: `IQ2_XS (ISTA)` is iq2_xs."""
    quant = re.sub(r"\(.*?\)", "", str(model.get("quant", ""))).strip().lower().replace("-", "_")
    return ("qwen38_coder" if "coder" in str(model.get("name", "")).lower() else "qwen38_flash"), quant


def _ends(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    varied = [key for key, value in settings.items() if isinstance(value, Mapping) and set(value) == {"min", "max"}]
    if not varied:
        yield "", settings
        return
    for end in ("min", "max"):
        text = ", ".join(f"{key}={settings[key][end]:,}" for key in varied)
        yield text, {**settings, **{key: settings[key][end] for key in varied}}


def _scenario(facts: Stated, ask: Ask) -> Scenario:
    settings, env = facts.settings, facts.env
    model, quant = preset_names(facts.model)
    ple = facts.model.get("ple")
    later = settings.get("vram_reserve_runtime_mib")
    return Scenario(
        machine=_machine(facts),
        model=model,
        quant=quant,
        ple=None if ple is None else str(ple),
        request=_request(facts, env, ask),
        pcie_frac=settings.get("pcie_frac"),
        min_p=float(settings.get("spec_min_p", 0.5)),
        reserve_later_mib=None if later is None else int(later),
        ask=ask,
    )


def _machine(facts: Stated) -> Machine:
    hardware, settings, env = facts.hardware, facts.settings, facts.env
    vram = hardware.get("vram_mib")
    pin: str | float | None = None
    if str(env.get("STRATA_ARENA_REGISTER", 1)) == "0":
        pin = "none"
    elif env.get("STRATA_ARENA_PIN_GIB") == "auto":
        pin = "auto"
    elif settings.get("arena_pinned_gib") is not None:
        pin = round(float(settings["arena_pinned_gib"]) / float(settings["arena_gib"]), 3)
    os = None if hardware.get("os") is None else "windows" if "windows" in hardware["os"].lower() else "linux"
    return Machine(hardware["gpu"], None if vram is None else int(vram), hardware.get("ram_gib"), os,
                   hardware.get("pcie_gb_s"), pin)  # fmt: skip


def _request(facts: Stated, env: Mapping[str, Any], ask: Ask) -> StrataRequest:
    settings = facts.settings
    alias = bool(settings.get("prefill_head_alias", False))
    reserve = settings.get("vram_reserve_mib")
    prefill = settings.get("prefill", "auto")
    cache = settings.get("expert_cache", "auto")
    if not isinstance(cache, int) and cache != "auto":
        raise NotTranslatable(f"expert_cache is {cache}")
    headroom_gib = env.get("STRATA_RESIDENT_HEADROOM_GIB")
    budget_gib = settings.get("resident_budget_gib")
    resident = headroom_gib is not None or budget_gib is not None
    tier = ExpertTier.RESIDENT if resident else ExpertTier.MMAP if settings.get("mmap_experts") else ExpertTier.ARENA
    defaults = StrataRequest()
    ring = env.get("STRATA_PREFILL_RING")
    pct = env.get("STRATA_PREFILL_LEND_PCT")
    return StrataRequest(
        version=strata_version(facts.software.get("version")),
        context_cells=int(settings.get("max_context") or ask.context_cells),
        kv_type=_kv_type(str(settings.get("kv", defaults.kv_type)), ask.prompt_tokens),
        kv_resident_cells=int(settings.get("kv_resident", 0)),
        expert_cache=cache if isinstance(cache, int) else None,
        cap_expert_cache=not settings.get("expert_cache_per_layer", False),  # equal slots per layer cannot shrink
        cache_per_layer=bool(settings.get("expert_cache_per_layer", False)),
        chunk_tokens=prefill if isinstance(prefill, int) else None,
        chunk_auto_max=_auto_max(prefill, env),
        reserve_mib=_reserve_mib(settings),
        reserve_given=reserve is not None,
        own=_own(facts, env),
        head_alias=alias,
        grow=_grow(settings, env),
        vram_elastic_mib=int(settings.get("vram_segment_mib", 512)) if settings.get("vram_elastic") else 0,
        stream_min_tokens=int(env.get("STRATA_PREFILL_STREAM_MIN", defaults.stream_min_tokens)),
        ring_slots=None if ring is None else int(ring),
        lend_pct=None if pct is None else int(pct),
        # the flag refuses short reads, so a run with it had none
        short_read_tokens=int(settings.get("short_read", 0 if alias else defaults.short_read_tokens)),
        spec_window=int(settings.get("spec", defaults.spec_window)),
        suffix_draft=int(settings.get("suffix_draft", defaults.suffix_draft)),
        draft_vocab=DRAFT_VOCABULARY[str(settings.get("draft_vocab", "cjk")).split()[0]],
        mtp=bool(settings.get("mtp", True)),
        token_graph=bool(settings.get("token_graph", True)),
        vision=settings.get("vision", False) not in (False, None),
        checkpoints=int(settings.get("prompt_cache", defaults.checkpoints)),
        tier=tier,
        resident_budget_bytes=None if budget_gib is None else int(budget_gib * 1024) * MIB,
        resident_headroom_bytes=int(float(headroom_gib) * 1024 * MIB) if headroom_gib else int(HEADROOM_MIB) * MIB,
        conversation_budget=OWN_BUFFER_BUILD in str(facts.software.get("build", "")),
        conversation_mib=int(settings.get("conversation_cache_mib", 0)),
        conversation_slots=int(settings.get("conversation_cache_slots", defaults.conversation_slots)),
        conversation_min_free_mib=int(
            settings.get("conversation_cache_min_free_mib", defaults.conversation_min_free_mib)
        ),
    )


def _reserve_mib(settings: Mapping[str, Any]) -> int:
    """Return the reserve in MiB. Equal slots per layer, a fixed number of them, are taken whatever it says."""
    if settings.get("expert_cache_per_layer") and isinstance(settings.get("expert_cache"), int):
        return 0
    given = settings.get("vram_reserve_mib")
    return StrataRequest().reserve_mib if given is None else int(given)


def rule_request(row: Row) -> StrataRequest:
    """Return the request of a row about the RAM rule alone: no machine, but copies of experts, as the rule supposes."""
    facts = stated(row)
    return replace(_request(facts, facts.env, Ask()), tier=ExpertTier.RESIDENT)


def _own(facts: Stated, env: Mapping[str, Any]) -> str:
    """Own buffers: the fork tries them unless its switch is 0 (planning notes 6.1); upstream has none."""
    switch = env.get("STRATA_PREFILL_OWN_AUTO")
    if switch is None:
        return "auto" if OWN_BUFFER_BUILD in str(facts.software.get("build", "")) else "off"
    return "off" if str(switch) == "0" else "auto"


def _grow(settings: Mapping[str, Any], env: Mapping[str, Any]) -> GrowSettings:
    """Elastic K/V: the environment switch overrides the flag with any value but 0 (planning notes 6.3)."""
    defaults = GrowSettings()
    enabled = bool(settings.get("kv_grow", False))
    if "STRATA_KV_GROW" in env:
        enabled = str(env["STRATA_KV_GROW"]) != "0"
    floor = env.get("STRATA_KV_GROW_FLOOR", defaults.floor_slots)
    return GrowSettings(
        enabled=enabled,
        init_cells=int(env.get("STRATA_KV_GROW_INIT", defaults.init_cells)),
        step_cells=int(env.get("STRATA_KV_GROW_STEP", defaults.step_cells)),
        floor_slots=int(floor) if str(floor).isdigit() else 2**31 - 1,  # `above the cache`: no slot is ever given
    )


def _kv_type(text: str, prompt_tokens: int) -> str:
    """Return the K/V type; `int8 above 4K` is f16 up to prompts of 4,096 tokens."""
    found = re.fullmatch(r"(\w+) above (\d+)K", text)
    if not found:
        return {"fp16": "f16"}.get(text, text)
    return found.group(1) if prompt_tokens > int(found.group(2)) * 1024 else "f16"


def _auto_max(prefill: Any, env: Mapping[str, Any]) -> int:
    limit = str(prefill).partition(":")[2] or env.get("STRATA_PREFILL_AUTO_MAX")
    return int(limit) if limit else StrataRequest().chunk_auto_max


# Settings that change the work of the CPU, the files or the driver, and that the simulator has no term for.
UNPRICED = {
    "pool_workers": "CPU workers",
    "pool_affinity": "CPU affinity",
    "host_worker": "the host thread computes no experts",
    "ple_io": "how the n-gram table is read",
}


def _confounders(row: Row, facts: Stated, acceptance: float | None) -> tuple[str, ...]:
    """Return what a reader must know beside the numbers, from the row's own words."""
    settings = facts.settings
    found = [f"{text} ({key}={settings[key]}) has no price" for key, text in UNPRICED.items() if key in settings]
    if "STRATA_STAGER_THREADS" in facts.env:
        found.append(f"stager threads ({facts.env['STRATA_STAGER_THREADS']}) have no price")
    if acceptance is not None:
        found.append(f"{acceptance:.1%} of the drafts are accepted, as the source states: a property of the text")
    if facts.hardware.get("cpu") is None:
        found.append("the CPU is not stated; the one of the card's profile stands in")
    if "session" in facts.workload:
        found.append(f"session {facts.workload['session']} of two, which differ by 3-4 % for no known reason")
    if "order" in facts.workload:
        found.append(f"order of the arms: {facts.workload['order']}")
    if row.notes:
        found.append(row.notes)
    return tuple(found)
