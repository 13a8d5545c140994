"""What one process of the policy matrix does: serve requests under policies, or replay them where nothing moves.

A run writes down what it computed as a list of operations (tokens read in chunks or through windows, tokens decoded)
and the chunks and windows that really ran. A replay does the same operations on an engine that holds every expert and
moves nothing; equal chunks and windows must then give equal bits.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.policy_matrix_cases import (
    POLICIES,
    WINDOWS,
    Ask,
    Case,
    as_json,
    missing_moves,
    open_model,
    planned,
    prompts_of,
    resident_request,
    settings_of,
)
from strata_jax.engine.engine import Engine
from strata_jax.engine.matrix import NATIVE_DTYPES, Matrix
from strata_jax.engine.program_store import open_store
from strata_jax.engine.runtime import Reading, Runtime
from strata_jax.engine.session import ChunkRecord, RoundRecord, Session
from strata_jax.engine.snapshots import state_hash
from strata_jax.geometry import Geometry
from strata_jax.gguf.source import WeightSource
from strata_jax.kernels.backend import interprets
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.kernels.gdn_chunks import chunk_problem
from strata_jax.kernels.gdn_window import head_problem
from strata_jax.kernels.stream_mixer import mixer_problem
from strata_jax.memory import staging
from strata_jax.memory.attention_kernels import attention_problem
from strata_jax.memory.plan import MemoryPlan, plan
from strata_jax.policies.prompt_segments import CheckpointRule, segments

Op = tuple[str, tuple[int, ...]]  # ("chunks" | "windows", tokens) or ("decode", (how many,))
Step = tuple[str, int, int, int]  # a chunk: start, tokens, padded; a window: position, tokens, tokens kept


@dataclass
class Counts:
    """Events, counted."""

    moves: Counter[str] = field(default_factory=Counter)

    def event(self, kind: str, **values: Any) -> None:
        """Count a move."""
        if "cause" in values:
            self.moves[kind] += 1


@dataclass(eq=False)
class Run:
    """Requests under policies; what was computed comes out as rows."""

    case: Case
    policies: tuple[str, ...]
    runtime: Runtime
    counts: Counts
    prompts: dict[str, tuple[int, ...]]
    free_bytes: int  # device memory that others find free at the start
    histories: dict[str, tuple[int, ...]] = field(default_factory=dict)
    done: dict[str, list[tuple[Op, list[Step], int]]] = field(default_factory=dict)  # with the length it led to

    def serve(self, ask: Ask) -> dict[str, Any]:
        """Serve a request; returns what it gave, with the operations that led there."""
        runtime, who = self.runtime, ask.conversation
        for wanted in (POLICIES[name].wanted_segments for name in self.policies):
            if wanted:
                segments_wanted = wanted[self.case.asks.index(ask) % len(wanted)]
                runtime.vram_change(self.free_bytes + segments_wanted * self.case.segment_bytes)
        history = self.histories.get(who, ())
        fresh = self.prompts[ask.name]
        prompt, turns = (*history, *fresh), (len(history),) if history else ()
        chunks: list[ChunkRecord] = []
        reading = runtime.read(
            prompt, name=f"{who}-{len(prompt)}", conversation=who, turns=turns, output_tokens=self.case.output_tokens,
            on_chunk=chunks.append,
        )  # fmt: skip
        reused = reading.facts.reused_tokens
        before = [entry for entry in self.done.get(who, ()) if entry[2] <= reused]
        if reused != (before[-1][2] if before else 0):
            raise RuntimeError(f"{reused} tokens of {who} were reused; none of its operations led there")
        now = self._operations(reading, prompt, turns, chunks)
        decoded = list(runtime.decode(reading, max_tokens=self.case.output_tokens))
        runtime.finish(reading)
        tokens = [token for record in decoded for token in record.emitted]
        answer = (("decode", (self.case.output_tokens,)), _steps(decoded), len(reading.session.tokens))
        self.done[who] = [*before, *now, answer]
        self.histories[who] = (*reading.session.tokens, tokens[-1])
        return {
            "name": ask.name, "is_prompt": not ask.returns, "prompt_tokens": len(prompt),
            "reused_tokens": reused, "source": reading.source, "prompt": prompt,
            "accepted": sum(record.num_accepted for record in decoded), "ops": [op for op, _, _ in self.done[who]],
            "steps": [step for _, some, _ in self.done[who] for step in some],
            **outcome(reading.first_logits, tokens, reading.session),
        }  # fmt: skip

    def _operations(
        self, reading: Reading, prompt: tuple[int, ...], turns: tuple[int, ...], chunks: list[ChunkRecord]
    ) -> Iterator[tuple[Op, list[Step], int]]:
        reused = reading.facts.reused_tokens
        for part in segments(len(prompt), turns, reused, self.runtime.rule):
            by_windows = self.runtime.stack.reads_by_windows(reading.facts, part.tokens)
            self.counts.moves.update([WINDOWS] * by_windows)
            for first, last in part.parts():
                inside = [] if by_windows else _steps(c for c in chunks if first <= c.start < last)
                yield ("windows" if by_windows else "chunks", prompt[first:last]), inside, last


def load(case: Case, file: WeightSource, geometry: Geometry, made: MemoryPlan, folder: Path) -> Engine:
    """Load a case's model. A GPU's programs are compiled beforehand, beside each other, a CPU's at their first call.

    Raises:
        RuntimeError: kernels are to compute it, and something would be computed or copied without them.
    """
    loans = None if interprets() else made.loans()
    engine = Engine.load(file, geometry, made, loans=loans, program_store=open_store(folder / "programs"))
    if case.quant is not None:
        staging.IN_PLACE_BYTES = 0  # blocks of this size would all be read where they lie
        if parts := without_kernels(engine):
            raise RuntimeError(f"the case {case.name!r} is one of kernels, which do not have: {'; '.join(parts)}")
    return engine


def without_kernels(engine: Engine) -> list[str]:
    """What of a model's chunks and windows is computed by the reference, and why.

    Products with float weights (routers, indexers) have no kernel, and rows of the embedding are looked up.
    """
    g, made, weights = engine.geometry, engine.plan, engine.weights
    found = {
        f"attention of block {i}": attention_problem(g, g.compress_ratio[i], made.kv_type) for i in g.attention_layers
    } | {
        "recurrence of a chunk": chunk_problem(g.gdn_head_dim), "recurrence of a window": head_problem(g.gdn_head_dim),
        "mixers": mixer_problem(g.num_streams, g.embed_width),
        "staged experts": None if made.chunk_tokens in made.staged_buckets else "chunks take none",
    } | {
        f"experts of block {i}": None if isinstance(bank.layout, ExpertLayout) else "they are as stored"
        for i, bank in enumerate(engine.banks)
    }  # fmt: skip
    for path, leaf in jax.tree.leaves_with_path(weights, is_leaf=lambda x: isinstance(x, Matrix)):
        if isinstance(leaf, Matrix) and leaf is not weights.embed and leaf.type_name not in NATIVE_DTYPES:
            found[jax.tree_util.keystr(path)] = None if leaf.planes is not None else f"{leaf.type_name} as stored"
    return [f"{what}: {problem}" for what, problem in found.items() if problem]


def begin(case: Case, folder: Path, policies: Sequence[str]) -> Run:
    """Load a case's model and put policies to work; tables and bytes are verified after every move."""
    (file, geometry), counts = open_model(case, folder), Counts()
    runtime = Runtime.start(
        load(case, file, geometry, planned(case, geometry, policies), folder), settings_of(case, policies),
        rule=CheckpointRule(case.every, case.root), sink=counts, check=True, min_p=None if interprets() else 0.0,
    )  # fmt: skip
    return Run(case, tuple(policies), runtime, counts, prompts_of(case), runtime.free_bytes())


def run_policies(
    case: Case, folder: Path, policies: Sequence[str], arm: Callable[[Runtime], None] = lambda runtime: None
) -> dict[str, Any]:
    """Serve a case's requests under policies.

    arm: may seed a fault before the first request.
    """
    started, run = time.perf_counter(), begin(case, folder, policies)
    arm(run.runtime)
    requests = [run.serve(ask) for ask in case.asks]
    run.runtime.verify()
    made = run.runtime.engine.plan
    return {
        "device": run.runtime.engine.device_name,
        "policies": list(policies), "chunk_tokens": made.chunk_tokens, "slots": made.expert_slots,
        "lent_slots": made.lent_slots, "layout": made.prompt_layout, "mapped_cells": made.mapped_cells,
        "drafts_accepted": sum(r["accepted"] for r in requests), "moves": dict(sorted(run.counts.moves.items())),
        "missing_moves": missing_moves(policies, run.counts.moves), "requests": requests,
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


@dataclass(eq=False)
class Resident:
    """An engine that holds every expert, where nothing moves."""

    case: Case
    engine: Engine

    @classmethod
    def load(cls, case: Case, folder: Path) -> Resident:
        """Load a case's model."""
        file, geometry = open_model(case, folder)
        return cls(case, load(case, file, geometry, plan(geometry, resident_request(case, geometry)), folder))

    def replay(self, ops: Sequence[Op]) -> dict[str, Any]:
        """What a sequence of operations gives: the logits before its last one, a decode, and all after it."""
        chunks: list[ChunkRecord] = []
        session, steps, logits, tokens = Session(self.engine, on_chunk=chunks.append), [], np.zeros(0), []
        for kind, ids in ops:
            if kind == "decode":
                logits = session.last_logits()
                decoded = list(session.decode(logits, max_tokens=ids[0]))
                tokens = [token for record in decoded for token in record.emitted]
                steps += _steps(decoded)
            elif kind == "windows":
                session.read_windows(ids)
            else:
                chunks.clear()
                list(session.chunks(ids))
                steps += _steps(chunks)
        return {"steps": steps, **outcome(logits, tokens, session)}

    def with_margins(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What a prompt gives in whole chunks, and by how much each of its tokens won (top 1 - top 2)."""
        found = self.replay([("chunks", tuple(prompt)), ("decode", (self.case.output_tokens,))])
        session = Session(self.engine)
        scores = [session.prefill(prompt)[-1]]
        scores += [row for _, row in session.force(found["tokens"][:-1])]
        top = np.sort(np.array(scores), axis=-1)
        return {**found, "margins": (top[:, -1] - top[:, -2]).tolist()}


def outcome(logits: np.ndarray, tokens: Sequence[int], session: Session) -> dict[str, Any]:
    """What a request gave, in plain data: nothing of it may differ."""
    sections = as_json(state_hash(session))
    return {
        "first_logits": np.asarray(logits, np.float32)[-1].tolist(),
        "first_logits_sha256": hashlib.sha256(np.ascontiguousarray(logits)).hexdigest(),
        "tokens": list(tokens),
        "state_sha256": hashlib.sha256(sections.encode()).hexdigest(),
    }


def _steps(records: Any) -> list[Step]:
    return [
        ("chunk", r.start, r.num_tokens, r.padded_tokens) if isinstance(r, ChunkRecord)
        else ("window", r.position, r.window_tokens, len(r.emitted))
        for r in records if isinstance(r, ChunkRecord | RoundRecord)
    ]  # fmt: skip
