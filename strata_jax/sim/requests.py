"""Requests of a simulation: token counts instead of tokens, and what they share with earlier requests. Pure data."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from strata_jax.errors import ConfigError

TAIL_TOKENS = 5  # from the last turn token to the end of a prompt: 29,842 - 29,837 in the published port check
CHAT_PROMPT_TOKENS = 44  # the published short chats have 24 and 44 tokens
CHAT_OUTPUT_TOKENS = 256
DOCUMENT_OUTPUT_TOKENS = 50  # of grow_served: 31,700 + 50 - 1 tokens are the 31,749 that were reused
FOLLOW_UP_TOKENS = 512  # fresh tokens of a follow-up whose length is not published
TURN_TOKENS = 10  # around the text of a turn: 2 that close the turn before, 3 that open one, 5 that open the answer
SIZE_MEDIAN_TOKENS, SIZE_SIGMA = 284.0, 2.3  # law of the text of an agent's turn, see `agent_loop`
AGENTS = ("worker", "reviewer", "retrospective")


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request.

    Attributes:
        conversation: the conversation that it continues or begins.
        common_tokens: leading tokens of the prompt that are the same as the conversation's tokens before.
        turns: positions of turn tokens in the prompt, ascending; the last is where the answer's turn begins.
        drafts: False: one verify row a token, as when a continuation is forced.
        label: a name that results are grouped by.
    """

    name: str
    conversation: str
    prompt_tokens: int
    output_tokens: int
    common_tokens: int = 0
    turns: tuple[int, ...] = ()
    drafts: bool = True
    label: str = ""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ConfigError(
                f"request {self.name}: {self.prompt_tokens} prompt and {self.output_tokens} output tokens; a request "
                "has at least 1 prompt token and 0 output tokens."
            )
        if not 0 <= self.common_tokens <= self.prompt_tokens:
            raise ConfigError(
                f"request {self.name}: {self.common_tokens} common tokens of {self.prompt_tokens} prompt tokens."
            )


def single(
    prompt_tokens: int,
    output_tokens: int = CHAT_OUTPUT_TOKENS,
    *,
    name: str = "prompt",
    drafts: bool = True,
    tail_tokens: int = TAIL_TOKENS,
) -> SimRequest:
    """Return a request with a fresh prompt of one turn, whose last turn begins `tail_tokens` before its end."""
    turns = (0, prompt_tokens - tail_tokens) if prompt_tokens > tail_tokens > 0 else (0,)
    return SimRequest(name, name, prompt_tokens, output_tokens, turns=turns, drafts=drafts)


def forced(prompt_tokens: int, forced_tokens: int, *, name: str = "forced") -> SimRequest:
    """Return a fresh prompt whose continuation is forced: one verify row a token, no drafts."""
    return single(prompt_tokens, forced_tokens, name=name, drafts=False)


def follow_up(
    before: SimRequest,
    fresh_tokens: int,
    output_tokens: int = CHAT_OUTPUT_TOKENS,
    *,
    name: str,
    common: int | None = None,
) -> SimRequest:
    """Return the next request of a conversation: the same tokens, then `fresh_tokens` more.

    common: leading tokens that are the same; None: everything up to the last token of the answer before.
    """
    same = before.prompt_tokens + max(0, before.output_tokens - 1) if common is None else common
    prompt = same + fresh_tokens
    return SimRequest(
        name, before.conversation, prompt, output_tokens, common_tokens=same, turns=_turns_after(before, same, prompt)
    )


def document_follow_up(
    prompt_tokens: int, fresh_tokens: int = FOLLOW_UP_TOKENS, output_tokens: int = CHAT_OUTPUT_TOKENS
) -> list[SimRequest]:
    """Return a document and a question about it in the next turn."""
    first = single(prompt_tokens, output_tokens, name="document")
    return [first, follow_up(first, fresh_tokens, output_tokens, name="follow_up")]


def taking_turns(
    prompt_tokens: Sequence[int],
    agents: Sequence[str],
    fresh_tokens: int = FOLLOW_UP_TOKENS,
    output_tokens: int = CHAT_OUTPUT_TOKENS,
) -> list[SimRequest]:
    """Return agents that take turns, as A-B-A: an agent's later requests continue its conversation."""
    last: dict[str, SimRequest] = {}
    requests = []
    for index, (tokens, agent) in enumerate(zip(prompt_tokens, agents, strict=True)):
        name = f"{agent}.{index}"
        request = (
            follow_up(last[agent], fresh_tokens, output_tokens, name=name)
            if agent in last
            else replace(single(tokens, output_tokens, name=name), conversation=agent)
        )
        last[agent] = request
        requests.append(request)
    return requests


def from_order(order: Sequence[Any], output_tokens: int = CHAT_OUTPUT_TOKENS) -> list[SimRequest]:
    """Return the requests of an `order` of the workload data.

    An entry is a prompt length, `chat`, or a mapping with `prompt`, `output`, `agent` (its conversation),
    `fresh` and `reused` (a follow-up of the latest request, or of the agent's) or `follow_up_of` (a prompt length) and
    `reused`. Raises ConfigError for anything else.
    """
    requests: list[SimRequest] = []
    for index, item in enumerate(order):
        entry = _entry(item)
        name = f"{entry.get('agent', 'chat' if item == 'chat' else 'prompt')}.{index}"
        output = int(entry.get("output", output_tokens))
        before = _continued(entry, requests)
        if before is None:
            request = single(int(entry["prompt"]), output, name=name)
            requests.append(replace(request, conversation=entry.get("agent", name)))
        else:
            common = int(entry["reused"]) if "reused" in entry else None
            fresh = int(entry.get("fresh", FOLLOW_UP_TOKENS))
            requests.append(follow_up(before, fresh, output, name=name, common=common))
    return requests


def agent_loop(
    buckets: Mapping[str, int],
    *,
    num_requests: int | None = None,
    max_prompt_tokens: int = 150_000,
    output_tokens: tuple[int, int] = (32, 1024),
    seed: int = 0,
) -> list[SimRequest]:
    """Return an agent loop with the published mix of fresh tokens.

    The size law: fresh tokens are `TURN_TOKENS` and a log-normal text with the median and sigma above, fitted on the
    published counts of both arms (shares of the five ranges within 0.1, 1.0, 2.5, 2.2 and 0.6 points; without the
    tokens around a turn the counts fit as well, but a turn cannot be shorter); how many requests fall into a bucket
    is as published. Output tokens are log-uniform within `output_tokens` (ours, not published). Requests above
    the largest bucket are the rest of `num_requests`; each begins an agent's conversation anew (worker, reviewer,
    retrospective in turn), and the others continue the present one, whose whole state they reuse.

    buckets: number of requests by range of fresh tokens, as "65-512". max_prompt_tokens: longest prompt.
    Deterministic in `seed`. Raises ConfigError if the conversations cannot stay within `max_prompt_tokens`.
    """
    rng = random.Random(seed)
    ranges = {name: _range(name) for name in buckets}
    top = max(high for _, high in ranges.values())
    small = [(name, _fresh_tokens(rng, *ranges[name])) for name, count in buckets.items() for _ in range(count)]
    starts = max(1, (num_requests or len(small)) - len(small))
    rng.shuffle(small)
    requests: list[SimRequest] = []
    for index in range(starts):
        part = small[index * len(small) // starts : (index + 1) * len(small) // starts]
        outputs = [_log_uniform(rng, *output_tokens) for _ in range(len(part) + 1)]
        growth = sum(fresh for _, fresh in part) + sum(outputs)
        if max_prompt_tokens - growth <= top:
            raise ConfigError(
                f"agent loop: a conversation of {len(part) + 1} requests adds {growth:,} tokens to its first prompt; "
                f"that does not stay within {max_prompt_tokens:,} tokens. Raise the limit or ask for more requests."
            )
        first = _fresh_tokens(rng, top + 1, max_prompt_tokens - growth)
        conversation = f"{AGENTS[index % len(AGENTS)]}.{index}"
        request = replace(single(first, outputs[0], name=f"{conversation}.0"), conversation=conversation)
        requests.append(replace(request, label=f"{top + 1}+"))
        for step, ((bucket, fresh), output) in enumerate(zip(part, outputs[1:], strict=True), start=1):
            request = follow_up(request, fresh, output, name=f"{conversation}.{step}")
            requests.append(replace(request, label=bucket))
    return requests


def _range(name: str) -> tuple[int, int]:
    low, _, high = name.partition("-")
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"agent loop: {name!r} is no range of fresh tokens such as 65-512.")
    return int(low), int(high)


def _fresh_tokens(rng: random.Random, low: int, high: int) -> int:
    """A draw of the size law, given that it lies in [low, high]."""
    law = NormalDist(math.log(SIZE_MEDIAN_TOKENS), SIZE_SIGMA)
    ends = [law.cdf(math.log(max(0.5, end - TURN_TOKENS))) for end in (low - 0.5, high + 0.5)]
    return min(high, max(low, TURN_TOKENS + round(math.exp(law.inv_cdf(rng.uniform(*ends))))))


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))))))


def _turns_after(before: SimRequest, common: int, prompt_tokens: int) -> tuple[int, ...]:
    kept = tuple(turn for turn in before.turns if turn < common)
    last = prompt_tokens - TAIL_TOKENS
    return (*kept, last) if last > common else kept


def _entry(item: Any) -> Mapping[str, Any]:
    if item == "chat":
        return {"prompt": CHAT_PROMPT_TOKENS}
    if isinstance(item, int):
        return {"prompt": item}
    known = {"prompt", "output", "agent", "fresh", "reused", "follow_up_of"}
    if isinstance(item, Mapping) and set(item) <= known and {"prompt", "fresh", "follow_up_of"} & set(item):
        return item
    raise ConfigError(
        f"workload order: {item!r} is no entry of an order. Give a prompt length, chat, or a mapping with some of "
        f"{', '.join(sorted(known))}."
    )


def _continued(entry: Mapping[str, Any], requests: Sequence[SimRequest]) -> SimRequest | None:
    """The request that an entry continues; None if it begins a conversation."""
    if "follow_up_of" in entry:
        found = [r for r in requests if r.prompt_tokens == entry["follow_up_of"]]
    elif "agent" in entry:
        found = [r for r in requests if r.conversation == entry["agent"]]
    elif "prompt" in entry:
        return None
    else:
        found = list(requests)
    if not found and "prompt" not in entry:
        raise ConfigError(f"workload order: {dict(entry)!r} continues a request that is not before it.")
    return found[-1] if found else None
