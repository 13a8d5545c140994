"""From a workload's settings and data to simulated requests. Text becomes token counts without any tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata_jax.config.schema import WorkloadConfig
from strata_jax.errors import ConfigError
from strata_jax.sim.requests import (
    CHAT_OUTPUT_TOKENS,
    FOLLOW_UP_TOKENS,
    SimRequest,
    agent_loop,
    forced,
    from_order,
    single,
    taking_turns,
)
from strata_jax.workloads import DATA_FILE, DEFAULT_OUTPUT_TOKENS, load_workload, read_token_ids

CHARACTERS_PER_TOKEN = 4  # of English text, near enough for a simulation
TEMPLATE_TOKENS = 10  # what a chat template puts around one message


def sim_requests(config: WorkloadConfig, data_file: Path = DATA_FILE) -> list[SimRequest]:
    """Return the requests of one run of the workload, in order; `config.requests` (how often) is not applied.

    Raises ConfigError for an unknown workload and FormatError for an input file that cannot be read.
    """
    given = config.max_output_tokens if isinstance(config.max_output_tokens, int) else None
    prompt_tokens = _input_tokens(config)
    if prompt_tokens is not None:
        if config.forced_token_ids is not None:
            return [forced(prompt_tokens, len(config.forced_token_ids))]
        return [single(prompt_tokens, given or DEFAULT_OUTPUT_TOKENS)]
    entry = load_workload(config.name, data_file)
    output = given or int(entry.get("max_output_tokens", CHAT_OUTPUT_TOKENS))
    if "agents" in entry:
        fresh = int(entry.get("fresh_tokens", FOLLOW_UP_TOKENS))
        return taking_turns(entry["order"], entry["agents"], fresh, output)
    if "record" in entry:
        return _documents(entry, config.records or int(entry["records"]), output)
    if "forced_tokens" in entry:
        return [forced(int(entry["prompt_tokens"]), given or int(entry["forced_tokens"]))]
    if "fresh_token_buckets" in entry:
        return _agent_loop(entry, config.seed, given)
    return from_order(entry["order"], output)


def _input_tokens(config: WorkloadConfig) -> int | None:
    """Tokens of the input that the settings give; None if they name a workload only."""
    if config.prompt_tokens is not None:
        return config.prompt_tokens
    if config.prompt_tokens is not None:
        return config.prompt_tokens
    if config.token_ids is not None:
        return len(config.token_ids)
    if config.token_ids_file is not None:
        return len(read_token_ids(Path(config.token_ids_file)))
    text = config.prompt
    for name in (config.prompt_file, config.messages_file):
        if name is not None:
            try:
                text = Path(name).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{name}: cannot be read: {error.strerror}.") from error
    return None if text is None else TEMPLATE_TOKENS + -(-len(text) // CHARACTERS_PER_TOKEN)


def _documents(entry: dict[str, Any], records: int, output_tokens: int) -> list[SimRequest]:
    tokens = entry["tokens"]
    document = int(tokens["prefix"]) + records * int(tokens["record"])
    lengths = dict.fromkeys(entry["prefixes"], document) | {"warm_question": int(tokens["question"])}
    return [single(lengths[name], output_tokens, name=name) for name in entry["order"]]


def _agent_loop(entry: dict[str, Any], seed: int, output_tokens: int | None) -> list[SimRequest]:
    arms = list(entry["requests"])
    arm = arms.index(entry["arm"])
    low, high = (output_tokens, output_tokens) if output_tokens is not None else entry["output_tokens"]
    return agent_loop(
        {name: counts[arm] for name, counts in entry["fresh_token_buckets"].items()},
        num_requests=int(entry["requests"][entry["arm"]]),
        max_prompt_tokens=int(entry["max_prompt_tokens"]),
        output_tokens=(low, high),
        seed=seed,
    )
