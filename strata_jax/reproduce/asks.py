"""From a row's workload to requests: which prompts are read, how much is generated, which request the row is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata_jax.reproduce.rows import Row
from strata_jax.reproduce.stated import Stated

# The one published pair of a round size and its exact count (table "fix on 0.1.37"): "32K" was 32,036 tokens. A round
# binary size names the window that prompt and answer fit into; a decimal one is taken as it is.
NOMINAL_SHARE = 32_036 / 32_768
CHAT_TOKENS = 44  # the longer of the two chat prompts of table "parity and decode on 0.1.38"
OUTPUT_TOKENS = 256  # what most sources generate; where a row does not say
MIN_CONTEXT = 4_096  # the engine's default window, planning notes 3.1
CONTEXT_SLACK = 8  # prompt + output + 8 <= context, planning notes 3.2

# Words of a source -> workload of data/workloads.yaml
NAMED = {
    "agent loop": "agent_loop",
    "coding agents": "agent_loop",
    "taking turns": "grow_agents",
    "two short chats": "grow_served",
    "follow-up of the document": "grow_served",
}
SERVED_STEPS: Mapping[int, tuple[int, ...]] = {1: (0,), 2: (1,), 3: (2,), 4: (3, 4), 5: (5,)}


@dataclass(frozen=True, slots=True)
class Ask:
    """The requests of a scenario.

    Attributes:
        name: a workload of data/workloads.yaml; `prompt` for one prompt as below; empty for a plan alone.
        reused_tokens: prefix whose state is there when the prompt arrives.
        parked: another conversation comes between the stored prefix and the prompt. warm: a request came before.
        forced: the output is forced, one token a round, without drafts.
        sampled: drawn from the distribution instead of the likeliest token.
    """

    name: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    parked: bool = False
    warm: bool = False
    forced: bool = False
    sampled: bool = False

    @property
    def context_cells(self) -> int:
        """The window that setup would write: the smallest power of two that holds prompt and answer."""
        need = max(self.prompt_tokens + self.output_tokens + CONTEXT_SLACK, MIN_CONTEXT)
        return 1 << (need - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Focus:
    """Which requests of a scenario a row is about; everything None: all of them.

    Attributes:
        requests: indices. fresh: bounds of the fresh tokens, both included.
        conversation_tokens: the conversation that is continued. decoding: about the answer rather than the prompt.
        stated: the source says what was asked, rather than leaving a short chat to be assumed.
    """

    requests: tuple[int, ...] | None = None
    fresh: tuple[int, int] | None = None
    conversation_tokens: int | None = None
    decoding: bool = False
    stated: bool = True


def ask_of(row: Row, facts: Stated, siblings: Sequence[Row] = ()) -> Iterator[tuple[Ask, Focus]]:
    """Yield the requests behind a row, one pair per end of a prompt length given as a range."""
    workload = facts.workload
    named = next((name for words, name in NAMED.items() if words in str(workload.get("prompt", ""))), None)
    if named is None and isinstance(workload.get("step"), int):
        named = "grow_served"
    fresh = _bounds(workload.get("fresh_tokens"))
    if named is None and fresh is not None and fresh[0] < fresh[1]:
        named = "agent_loop"
    if named is not None:
        yield Ask(named), _named_focus(row, workload, fresh)
        return
    for prompt, reused in _prompts(workload, siblings):
        if prompt is None and facts.settings.get("vram_reserve_runtime_mib") is not None:
            yield Ask("prompt", CHAT_TOKENS, output_tokens=1), Focus()
        elif prompt is not None:
            ask = Ask(
                "prompt", prompt, reused, _output_tokens(row, workload), parked=_measures(row, "restore"),
                forced="forced" in workload, sampled=workload.get("decoding") == "sampled",
            )  # fmt: skip
            yield ask, Focus(requests=(-1,))
        elif row.kind in ("throughput", "latency"):
            ask = Ask("prompt", CHAT_TOKENS, output_tokens=_output_tokens(row, workload), warm=True)
            yield ask, Focus(requests=(-1,), stated=False)
        else:
            yield Ask(), Focus()


def _named_focus(row: Row, workload: Mapping[str, Any], fresh: tuple[int, int] | None) -> Focus:
    step = workload.get("step")
    if isinstance(step, int):
        return Focus(requests=SERVED_STEPS[step], decoding="while decoding" in row.notes)
    if isinstance(step, str) and "back at the main agent" in step:
        return Focus(requests=(2, 5), stated=False)  # what the agent asks then is not stated
    tokens = workload.get("conversation_nominal_tokens")
    return Focus(fresh=fresh, conversation_tokens=None if tokens is None else int(tokens))


def _prompts(workload: Mapping[str, Any], siblings: Sequence[Row]) -> Iterator[tuple[int | None, int]]:
    """Yield (prompt tokens, reused tokens); None where no prompt is stated.

    The last of several segments is a read that goes on from the ones before it.
    """
    segments = workload.get("segments")
    if segments and "part" in workload:
        yield sum(segments), sum(segments[:-1])
        return
    reused = int(workload.get("reused_tokens", 0))
    prompt = workload.get("prompt_tokens")
    nominal = workload.get("prompt_nominal_tokens", workload.get("context_nominal_tokens"))
    if isinstance(prompt, Mapping):
        for end in ("min", "max"):
            yield int(prompt[end]), reused
    elif prompt is not None:
        yield int(prompt), reused
    elif isinstance(workload.get("fresh_tokens"), int):
        yield reused + int(workload["fresh_tokens"]), reused
    elif isinstance(nominal, int):
        yield nominal_tokens(nominal), reused
    elif reused:  # a restore: the prompt is the stored state and one token
        yield reused + 1, reused
    elif "chat" in str(workload.get("prompt", "")):
        yield CHAT_TOKENS, 0
    elif "output_tokens" in workload and any(row.workload.get("prompt_tokens") for row in siblings):
        found = [int(row.workload["prompt_tokens"]) for row in siblings if row.workload.get("prompt_tokens")]
        for tokens in sorted({min(found), max(found)}):
            yield tokens, 0
    else:
        yield None, 0


def nominal_tokens(size: int) -> int:
    """Return the prompt tokens that a round size stands for."""
    return round(size * NOMINAL_SHARE) if size % 1024 == 0 else size


def _output_tokens(row: Row, workload: Mapping[str, Any]) -> int:
    given = workload.get("output_tokens", workload.get("output_tokens_max"))
    if given is not None:
        return int(given)
    return OUTPUT_TOKENS if _measures(row, "decode", "round", "total", "hit_rate", "cpu_experts", "pcie") else 1


def _measures(row: Row, *beginnings: str) -> bool:
    return any(cell.metric.startswith(beginnings) for cell in row.cells)


def _bounds(value: Any) -> tuple[int, int] | None:
    if isinstance(value, Mapping):
        return int(value["min"]), int(value["max"])
    return (int(value), int(value)) if isinstance(value, int) else None
