"""What policy=auto chose and why, in words, as a table and as data: which quantity changed, by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from strata_jax.config.checks import show
from strata_jax.config.schema import RunConfig
from strata_jax.sim.search import LEAST_GAIN, TIE_SHARE, Candidate, Facts, Search
from strata_jax.sim.search_space import BORROW, INSIDE, SWITCHES, flipped, typed

OBJECTIVE = "the least time from the first request to the end of the last one: reading, decoding, parking, restoring"
FITTED_CHUNK_TOKENS = 8_192  # largest chunk of the published runs that profiles are fitted on
COLUMNS = (
    "candidate", "time s", "prompt tok/s", "decode tok/s", "slots", "chunk", "free MiB", "warnings", "remark",
)  # fmt: skip
MAX_ROWS = 12  # on the terminal
UP, DOWN = 1.005, 0.995  # changes that are worth a word


def why(config: RunConfig, search: Search) -> list[str]:
    """Return the reasons of a choice, the most important first."""
    chosen = search.chosen
    if chosen is None or chosen.facts is None:
        return [str(search.error())]
    return [
        _headline(search.plain, chosen),
        *_against_plain(search.plain, chosen),
        *_each_policy(config, search, chosen),
        *_each_parameter(search, chosen),
        *_reserve(search, chosen),
        *_limits(search, chosen),
    ]


def candidate_rows(search: Search, *, distinct: bool = False) -> list[tuple[Any, ...]]:
    """Return the candidates in the order of their time, those without one last. distinct: leave repeats out."""
    ordered = sorted(search.candidates, key=lambda c: c.facts.total_ms if c.facts else float("inf"))
    return [_row(search, c) for c in ordered if not (distinct and c.same_as and c is not search.chosen)]


def search_json(config: RunConfig, search: Search) -> dict[str, Any]:
    """Return everything about a search as plain data."""
    return {
        "objective": OBJECTIVE,
        "requests": search.num_requests,
        "sampled_requests": search.num_sampled,
        "tie_share": TIE_SHARE,
        "least_gain": LEAST_GAIN,
        "chosen": None if search.chosen is None else _json_of(search.chosen),
        "settings": [] if search.chosen is None else typed(search.chosen.settings),
        "why": why(config, search),
        "candidates": [_json_of(candidate) for candidate in search.candidates],
    }


def search_markdown(config: RunConfig, search: Search) -> str:
    """Return the whole table and the reasons as Markdown."""
    chosen = "nothing fits" if search.chosen is None else search.chosen.label
    lines = [f"# policy=auto: {chosen}", "", f"Objective: {OBJECTIVE}. {sampling(search)}", ""]
    lines += [f"- {reason}" for reason in why(config, search)]
    if search.chosen is not None:
        lines += ["", f"Without the search: `policy=baseline {' '.join(typed(search.chosen.settings))}`"]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in candidate_rows(search):
        lines.append("| " + " | ".join(_cell(value) for value in row) + " |")
    said = {text: None for c in search.candidates if c.facts for text in c.facts.warnings}
    lines += ["", *(f"- warning {index}: {text}" for index, text in enumerate(said, 1))] if said else []
    return "\n".join(lines)


def sampling(search: Search) -> str:
    """Return how much of the workload the search simulated."""
    if search.num_sampled == search.num_requests:
        return f"All {search.num_requests:,} requests were simulated for every candidate."
    return (
        f"{search.num_sampled:,} of {search.num_requests:,} requests were simulated for every candidate: whole"
        " conversations, evenly spread, the one with the longest request among them."
    )


def _headline(plain: Candidate, chosen: Candidate) -> str:
    assert chosen.facts is not None
    time = f"{chosen.label}: {_s(chosen.facts.total_ms)}"
    if plain.facts is None:
        return f"{time}. {plain.label} cannot run: {_short(plain.error)}"
    if chosen is plain:
        return f"{time}. No other candidate is {TIE_SHARE:.1%} faster and keeps the reserve."
    share = _percent(plain.facts.total_ms, chosen.facts.total_ms)
    return f"{time}, {share} against {plain.label} ({_s(plain.facts.total_ms)})."


def _against_plain(plain: Candidate, chosen: Candidate) -> Iterator[str]:
    if plain.facts is None or chosen.facts is None or chosen is plain:
        return
    yield from changes(plain.facts, chosen.facts)


def changes(before: Facts, after: Facts) -> list[str]:
    """Return the quantities that differ between two candidates, with what each does to the time."""
    said = []
    if after.kv_start_cells != before.kv_start_cells:
        said.append(
            f"{after.kv_start_cells:,} cells of K/V are mapped at the start instead of {before.kv_start_cells:,}."
        )
    if after.slots != before.slots or abs(after.hit_rate - before.hit_rate) > 0.002:
        said.append(
            f"{after.slots:,} expert slots instead of {before.slots:,}: {after.hit_rate:.1%} of look-ups hit while"
            f" decoding instead of {before.hit_rate:.1%}; decoding takes {_s(after.decode_ms)} instead of"
            f" {_s(before.decode_ms)}."
        )
    if after.chunk_tokens != before.chunk_tokens:
        said.append(
            f"Prompt chunks of {after.chunk_tokens:,} tokens instead of {before.chunk_tokens:,}: the experts are"
            f" streamed {'less' if after.chunk_tokens > before.chunk_tokens else 'more'} often; reading waits"
            f" {_s(after.copy_wait_ms)} for copies instead of {_s(before.copy_wait_ms)}."
        )
    if not DOWN < after.prompt_ms / max(1e-9, before.prompt_ms) < UP:
        said.append(
            f"Prompts take {_s(after.prompt_ms)} instead of {_s(before.prompt_ms)}, of it {_s(after.refill_ms)} refill"
            f" ({_s(before.refill_ms)}), {_s(after.head_ms)} for the head ({_s(before.head_ms)}) and"
            f" {_s(after.growth_ms)} growth ({_s(before.growth_ms)})."
        )
    if after.reused_tokens != before.reused_tokens:
        said.append(
            f"{after.reused_tokens:,} prompt tokens are reused instead of {before.reused_tokens:,}; parking and"
            f" restoring takes {_s(after.switch_ms)} ({_s(before.switch_ms)})."
        )
    if abs(after.free_mib - before.free_mib) >= 16:
        said.append(f"At least {after.free_mib:,.0f} MiB stay free instead of {before.free_mib:,.0f} MiB.")
    return said


def _each_policy(config: RunConfig, search: Search, chosen: Candidate) -> Iterator[str]:
    """What every free policy does in the choice, or would do to it."""
    assert chosen.facts is not None
    for settings in flipped(config, chosen.settings):
        other = search.find(settings)
        name = next(key for key in settings if settings[key] != chosen.settings.get(key))
        if other is None:
            continue
        word = "borrowing" if name == BORROW else SWITCHES[name]
        verb = "Without" if chosen.settings[name] else "With"
        if other.facts is None:
            yield f"{verb} {word}: cannot run: {_short(other.error)}"
        elif other.facts == chosen.facts:
            off = f" ({'; '.join(other.notes)})" if other.notes else ""
            yield f"{verb} {word}: nothing changes{off}."
        else:
            first = next(iter(changes(chosen.facts, other.facts)), "No single quantity moves much.")
            broken = "" if other.facts.keeps_reserve else ", but the reserve is not kept"
            if settings.get(INSIDE):
                word = f"{word} inside the head's bytes"
            yield f"{verb} {word}: {_percent(chosen.facts.total_ms, other.facts.total_ms)}{broken}. {first}"


def _each_parameter(search: Search, chosen: Candidate) -> Iterator[str]:
    assert chosen.facts is not None
    for setting, values in search.tried.items():
        value = chosen.settings.get(setting)
        words = ", ".join(show(v) for v in values)
        if value is None:
            yield f"{setting} stays as it is: {words} gain less than {LEAST_GAIN:.1%}, or lose."
            continue
        without = search.find({key: v for key, v in chosen.settings.items() if key != setting})
        gain = "tried"
        if without is not None and without.facts is not None:
            gain = f"{_percent(without.facts.total_ms, chosen.facts.total_ms)} against its default; tried"
        yield f"{setting}={show(value)}: {gain} {words}."


def _reserve(search: Search, chosen: Candidate) -> Iterator[str]:
    """Say what the reserve costs, or that it is not kept."""
    assert chosen.facts is not None
    if not chosen.facts.keeps_reserve:
        yield (
            f"Nothing that fits keeps the reserve: {chosen.facts.free_mib:,.0f} MiB stay free,"
            f" {chosen.facts.reserve_mib:,.0f} MiB should. A smaller model.max_context or kv.type would."
        )
        return
    faster = [
        c
        for c in search.candidates
        if c.facts is not None and not c.facts.keeps_reserve
        and c.facts.total_ms < chosen.facts.total_ms * (1 - TIE_SHARE)
    ]  # fmt: skip
    if faster:
        best = min(faster, key=lambda c: c.facts.total_ms if c.facts else 0.0)
        assert best.facts is not None
        yield (
            f"{best.label} would take {_percent(chosen.facts.total_ms, best.facts.total_ms)}, but leaves"
            f" {best.facts.free_mib:,.0f} MiB free where the reserve asks for {best.facts.reserve_mib:,.0f} MiB."
            f" {' '.join(typed(_difference(chosen, best)))} accepts that."
        )


def _limits(search: Search, chosen: Candidate) -> Iterator[str]:
    assert chosen.facts is not None
    if chosen.facts.chunk_tokens > FITTED_CHUNK_TOKENS:
        yield (
            f"Chunks above {FITTED_CHUNK_TOKENS:,} tokens are beyond the published runs that the profiles were fitted"
            " on: measure before you rely on it."
        )


def _difference(chosen: Candidate, other: Candidate) -> dict[str, Any]:
    """Settings of the other that must be typed beside policy=auto to get there."""
    return {k: v for k, v in other.settings.items() if chosen.settings.get(k) != v} | (
        {INSIDE: False} if INSIDE in chosen.settings and INSIDE not in other.settings else {}
    )


def _row(search: Search, candidate: Candidate) -> tuple[Any, ...]:
    facts = candidate.facts
    if facts is None:
        return (candidate.label, None, None, None, None, None, None, None, _short(candidate.error))
    remarks = ["chosen"] if candidate is search.chosen else []
    remarks += [f"as {candidate.same_as}"] if candidate.same_as else []
    remarks += [] if facts.keeps_reserve else ["breaks the reserve"]
    return (
        candidate.label, facts.total_ms / 1000, facts.prompt_tok_s, facts.decode_tok_s, facts.slots, facts.chunk_tokens,
        round(facts.free_mib), len(facts.warnings), "; ".join((*remarks, *candidate.notes)),
    )  # fmt: skip


def _json_of(candidate: Candidate) -> dict[str, Any]:
    data: dict[str, Any] = {"label": candidate.label, "settings": typed(candidate.settings)}
    if candidate.facts is not None:
        facts = candidate.facts
        data |= {item.name: getattr(facts, item.name) for item in fields(facts)}
        rates = ("prompt_tok_s", "decode_tok_s", "keeps_reserve")
        data |= {name: getattr(facts, name) for name in rates}
    return data | {
        "fits": candidate.facts is not None,
        "reason": None if candidate.error is None else str(candidate.error),
        "same_as": candidate.same_as or None,
        "notes": candidate.notes,
    }


def _short(error: Exception | None) -> str:
    """The first sentence of an error, and the shortfall where it has one."""
    text = " ".join(str(error).split())
    short_bytes = getattr(error, "shortfall_bytes", 0)
    first = text.partition(". ")[0]
    return f"{short_bytes / 2**20:,.0f} MiB short: {first}" if short_bytes else first


def _percent(before: float, after: float) -> str:
    share = after / before - 1
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'} time"


def _s(ms: float) -> str:
    return f"{ms / 1000:,.2f} s" if ms < 100_000 else f"{ms / 1000:,.0f} s"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = (
        f"{value:,.2f}"
        if isinstance(value, float) and value < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else (f"{value:,}" if isinstance(value, int) else str(value))
    )
    return text.replace("|", "\\|")
