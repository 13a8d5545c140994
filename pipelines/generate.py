"""The main job: read each prompt in chunks, decode with the draft block, stream the text, keep the numbers."""

from __future__ import annotations

import logging
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.assemble import Prompt, check_peak, load_engine, make_plan, open_model, read_prompts
from pipelines.policies import device_settings, moves_memory
from pipelines.rankings import check_learned_target, save_learned
from strata_jax.config.schema import RunConfig
from strata_jax.engine.text_stream import TextStream
from strata_jax.gguf.tokenizer import Tokenizer
from strata_jax.memory.ledger import MIB
from strata_jax.memory.plan import MemoryPlan
from strata_jax.report.progress import SlowProgress
from strata_jax.report.record import RunRecord
from strata_jax.report.tables import console, result_table
from strata_jax.workloads import Request

if TYPE_CHECKING:
    import numpy as np

    from strata_jax.engine.engine import Engine
    from strata_jax.engine.runtime import Runtime
    from strata_jax.engine.session import ChunkRecord, RoundRecord, Session

log = logging.getLogger(__name__)

TAIL_TOKENS = 5  # of a conversation's prompt, from where the answer's turn begins


def run(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """Run the workload's requests in order, as often as asked, and return the summary."""
    file, geometry = open_model(config)
    check_learned_target(config, geometry)
    prompts, tokenizer = read_prompts(config, file, geometry)
    plan, hardware = make_plan(config, geometry, prompts, record)
    engine = load_engine(config, hardware, file, geometry, plan, record)
    journal = Journal(record)
    runtime = _runtime(config, engine, plan, prompts, journal)
    finished: list[list[dict[str, Any]]] = []
    run_s: list[float] = []
    try:
        for run_idx in range(config.workload.requests):
            started_s = engine.programs.clock_s()
            finished.append([])
            for prompt in prompts:
                finished[-1].append(_serve(prompt, engine, runtime, tokenizer, config, record, run_idx, journal))
            run_s.append(engine.programs.clock_s() - started_s)
    finally:  # also what an interrupted run has done
        record.update(**_summary(finished, run_s, engine))
        save_learned(config, runtime, record)
    check_peak(config, engine)
    console().print(result_table(record.summary))
    return {}


def _runtime(
    config: RunConfig, engine: Engine, plan: MemoryPlan, prompts: Sequence[Prompt], journal: Journal
) -> Runtime | None:
    """The policies at work; None where nothing moves and requests stand alone."""
    if not moves_memory(config, plan, conversations=any(prompt.request.conversation for prompt in prompts)):
        return None
    from strata_jax.engine.runtime import Runtime
    from strata_jax.policies.prompt_segments import CheckpointRule

    cache = config.conversation.prompt_cache
    runtime = Runtime.start(
        engine, device_settings(config, plan), rule=CheckpointRule(cache.every, cache.root), sink=journal,
        check=config.engine.check, min_p=config.spec.min_p, count_uses=config.cache.profile_save is not None,
    )  # fmt: skip
    print(f"Policies: {', '.join(runtime.stack.names)}")
    wanted_mib = config.policy.vram_elastic.wanted_mib
    if wanted_mib is not None:
        runtime.vram_change(wanted_mib * MIB)
    journal.show()
    return runtime


def _serve(
    prompt: Prompt, engine: Engine, runtime: Runtime | None, tokenizer: Tokenizer, config: RunConfig,
    record: RunRecord, run_idx: int, journal: Journal,
) -> dict[str, Any]:  # fmt: skip
    """Answer one request, on a fresh sequence or under the policies, and return its numbers."""
    name = f"{prompt.request.name}.{run_idx}"
    out = console()
    ids = journal.whole_prompt(prompt)
    out.rule(f"{name}: {len(ids):,} prompt tokens", align="left")
    chunks: list[ChunkRecord] = []

    def on_chunk(chunk: ChunkRecord) -> None:
        chunks.append(chunk)
        record.metric("chunk", request=name, **asdict(chunk))
        progress.at(f"{name}: {chunk.start + chunk.num_tokens:,} of {len(ids):,} prompt tokens read")

    progress = SlowProgress()
    stream = TextStream(tokenizer.token_bytes, prompt.request.stop)
    stop_ids = frozenset() if prompt.request.ignore_eos else tokenizer.eos_ids
    start_ms = 1000 * record.elapsed_s()
    clock_s, started_s = engine.programs.clock_s, engine.programs.clock_s()
    begin = _under_policies if runtime is not None else _alone
    begun = begin(prompt, ids, runtime or engine, name, on_chunk, journal)
    prefill_s, first_s, num_output, finish_reason = clock_s() - started_s, 0.0, 0, "length"
    journal.show()
    rounds: list[RoundRecord] = []
    for tokens, step in _steps(begun, prompt.request, stop_ids, config):
        fields = asdict(step)
        fields.pop("uses")
        record.metric("round", request=name, **fields)
        rounds.append(step)
        first_s = first_s or clock_s() - started_s
        for token in tokens:
            num_output += 1
            if token in stop_ids:
                finish_reason = "stop"
                break
            _show(stream.push(token), name, record)
            if stream.stopped:
                finish_reason = "stop"
                break
        if finish_reason == "stop":
            break
    _show(stream.finish(), name, record)
    if stream.stopped:  # a stop text that the last token completed
        finish_reason = "stop"
    out.print()
    decode_s = clock_s() - started_s - first_s
    begun.finish()
    journal.show()
    journal.remember(prompt, begun.session.tokens, rounds[-1].emitted[-1:] if rounds else ())
    if config.engine.check:
        record.event("check", **(engine.check_memory(begun.session.state) if runtime is None else runtime.verify()))
    numbers = {
        "request": name,
        "prompt_tokens": len(ids),
        "fresh_tokens": len(ids) - begun.reused_tokens,
        "reused_tokens": begun.reused_tokens,
        "output_tokens": num_output,
        "finish_reason": finish_reason,
        "ttft_ms": 1000 * first_s,
        "prompt_ms": 1000 * prefill_s,
        "decode_ms": 1000 * decode_s,
        "rounds": len(rounds),
        "draft_tokens": sum(r.num_drafted for r in rounds),
        "draft_accepted_tokens": sum(r.num_accepted for r in rounds),
        "lookups": sum(r.lookups for r in rounds),
        "hits": sum(r.hits for r in rounds),
        "prompt_lookups": sum(c.lookups for c in chunks),
        "prompt_hits": sum(c.hits for c in chunks),
    }
    more = {} if runtime is None else {"start_ms": start_ms, **journal.moved()}
    record.metric("request", **numbers, **more)
    return numbers


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose prompt has been read, and how it goes on."""

    session: Session
    reused_tokens: int
    decode: Callable[..., Iterator[RoundRecord]]
    force: Callable[..., Iterator[tuple[RoundRecord, np.ndarray]]]
    finish: Callable[[], None]


def _alone(prompt: Prompt, ids: Sequence[int], engine: Any, name: str, on_chunk: Any, journal: Journal) -> Begun:
    from strata_jax.engine.session import Session

    session = Session(engine, on_chunk=on_chunk)
    logits = session.prefill(ids)
    return Begun(session, 0, partial(session.decode, logits), session.force, lambda: None)


def _under_policies(
    prompt: Prompt, ids: Sequence[int], runtime: Any, name: str, on_chunk: Any, journal: Journal
) -> Begun:
    reading = runtime.read(
        ids, name=name, conversation=prompt.request.conversation or name, turns=journal.turns(prompt, len(ids)),
        output_tokens=prompt.request.max_output_tokens, on_chunk=on_chunk,
    )  # fmt: skip
    return Begun(
        reading.session, reading.facts.reused_tokens, partial(runtime.decode, reading),
        partial(runtime.force, reading), partial(runtime.finish, reading),
    )  # fmt: skip


@dataclass
class Journal:
    """What policies did, for the record and the reader, and what conversations have said so far."""

    record: RunRecord
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    said: dict[str, list[int]] = field(default_factory=dict)
    begins: dict[str, list[int]] = field(default_factory=dict)

    def event(self, kind: str, **values: Any) -> None:
        """Write an event down."""
        self.record.event(kind, **values)
        if kind == "note":
            self.notes.append(values["text"])
        elif "cause" in values:
            self.counts[kind] += 1
            self.counts[f"{kind}_bytes"] += values["bytes"]

    def show(self) -> None:
        """Print the lines that came since the last time."""
        for note in self.notes:
            print(f"- {note}")
        self.notes.clear()

    def moved(self) -> dict[str, Any]:
        """The moves since the last time, by kind, with their bytes."""
        done, self.counts = dict(self.counts), Counter()
        return {"moves": done}

    def whole_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt with what its conversation has so far in front."""
        if not prompt.request.continues:
            return prompt.token_ids
        return (*self.said.get(str(prompt.request.conversation), ()), *prompt.token_ids)

    def turns(self, prompt: Prompt, num_tokens: int) -> tuple[int, ...]:
        """Where the answers' turns begin in a whole prompt of so many tokens, the last one included."""
        if prompt.request.conversation is None or num_tokens <= TAIL_TOKENS:
            return ()
        begins = self.begins.setdefault(prompt.request.conversation, [])
        begins.append(num_tokens - TAIL_TOKENS)
        return tuple(begins)

    def remember(self, prompt: Prompt, tokens: Sequence[int], last: Sequence[int]) -> None:
        """Keep what a conversation has after a request: its tokens and the last one of the answer."""
        if prompt.request.conversation is not None:
            self.said[prompt.request.conversation] = [*tokens, *last]


def _steps(
    begun: Begun, request: Request, stop_ids: frozenset[int], config: RunConfig
) -> Iterator[tuple[tuple[int, ...], RoundRecord]]:
    """Yield the tokens of the output, with the step that gave them: chosen by the model, or forced one by one."""
    if request.forced_token_ids is not None:
        for token, (step, _) in zip(request.forced_token_ids, begun.force(request.forced_token_ids), strict=True):
            yield (token,), step
        return
    steps = begun.decode(
        max_tokens=request.max_output_tokens,
        sampling=request.sampling,
        stop_ids=stop_ids,
        min_p=config.spec.min_p,
    )
    for step in steps:
        yield step.emitted, step


def _show(piece: str, name: str, record: RunRecord) -> None:
    if piece:
        sys.stdout.write(piece)
        sys.stdout.flush()
        record.append_text(name, piece)


def _summary(finished: list[list[dict[str, Any]]], run_s: list[float], engine: Engine) -> dict[str, Any]:
    """Fields of summary.json from the requests that are done. Rates leave the first run out where there are more."""
    every = [request for run in finished for request in run]
    timed = [request for run in finished[1:] for request in run] or every

    def total(key: str) -> int:
        return sum(request[key] for request in every)

    def rate(tokens: str, ms: str, less: int = 0) -> float | None:
        rates = [1000 * (r[tokens] - less) / r[ms] for r in timed if r[tokens] > less and r[ms] > 0]
        return statistics.median(rates) if rates else None

    def share(hits: str, lookups: str) -> float | None:
        return total(hits) / total(lookups) if total(lookups) else None

    counted = (
        "prompt_tokens", "fresh_tokens", "reused_tokens", "output_tokens", "draft_tokens", "draft_accepted_tokens",
    )  # fmt: skip
    return {
        "num_requests": len(every),
        **{key: total(key) for key in counted},
        "ttft_ms": statistics.median(r["ttft_ms"] for r in timed) if timed else None,
        "prompt_tok_s": rate("fresh_tokens", "prompt_ms"),
        "decode_tok_s": rate("output_tokens", "decode_ms", less=1),
        "hit_rate": share("hits", "lookups"),
        "prompt_hit_rate": share("prompt_hits", "prompt_lookups"),
        "num_runs": len(run_s),
        "first_run_s": run_s[0] if run_s else None,
        "median_run_s": statistics.median(run_s[1:]) if len(run_s) > 1 else None,
        "compile_s": engine.programs.compile_s,
        "num_compilations": len(engine.programs.compiled),
        "peak_device_bytes": engine.peak_device_bytes(),
    }
