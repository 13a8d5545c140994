"""Do the three published policies gain on a real GPU what they gain in the sources? On emulated cards, side by side.

Held fixed: `synthetic_full` (random weights of the published shape and types), int8 K/V, the card's memory cap, the
prompt. Varied: the policy; every pair runs baseline and policy one after the other in one process, on the same weights
and the same bank; several effects one after the other, each planned for its own card (the process may take what the
largest has). What is timed is `Runtime.read` and decode rounds as in a run, moves included, programs compiled before.
Published figures stand beside ours; they are of another model file, engine and card.

Slots are given where the sides would else choose other ones: own buffers against borrowed ones, the head lent or not,
with the same cache. `auto` lends instead: prompt buffers of this engine are much smaller than the published ones.

    python bench/h200_effects.py own          # own prompt buffers against borrowed slots: 32 GB, 17,944 tokens
    python bench/h200_effects.py own_grid     # three cells of experiment=own_ab_grid
    python bench/h200_effects.py head_alias   # the head lent to the prompt: 8 GB, 29,854 tokens, and short reads
    python bench/h200_effects.py kv_grow      # elastic against fixed K/V: 16 GB, 262,144 cells
    python bench/h200_effects.py replacement  # experts replaced inside rounds, topics in turn: 16 GB
    python bench/h200_effects.py forced       # a forced continuation of 3,072 tokens, one row a token: 8 GB
    python bench/h200_effects.py own head_alias kv_grow --set spec.window=1

Rows go to FOLDER/h200_effects.jsonl ($OUT, or the working directory) as they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from hydra import compose, initialize_config_dir

from pipelines.assemble import Prompt, make_plan, open_model
from pipelines.policies import device_settings
from strata_jax.config.load import register, to_config
from strata_jax.config.schema import RunConfig
from strata_jax.memory.ledger import Memory, Phase
from strata_jax.memory.plan import MemoryPlan
from strata_jax.report.record import RunRecord
from strata_jax.runtime import start_jax
from strata_jax.synthetic.full import NOTE, SyntheticModel
from strata_jax.workloads import Request

SHORT_READS = (1, 16, 64)  # fresh tokens
FIRST_ROUNDS = 8  # of the reading that is not timed
BORROW = "prefill.borrow=true"


@dataclass(frozen=True)
class Variant:
    """One side of a comparison: settings as typed."""

    name: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Effect:
    """A comparison on one card.

    Attributes:
        vram_mib: of the card. prompts: lengths in tokens. context: cells; None: what the prompt needs.
        variants: the first is the baseline. published: what the sources say, in words of their tables.
        short_reads: also read a few tokens more. forced: tokens of a forced continuation, one row each.
    """

    vram_mib: int
    prompts: tuple[int, ...]
    variants: tuple[Variant, ...]
    published: str
    context: int | None = None
    short_reads: bool = False
    forced: int = 0


BORROWED = Variant("borrow", ("policy=baseline", BORROW))
OWN = Variant("own", ("policy=own_prefill", BORROW))
ALIAS = Variant("alias", ("policy=head_alias", BORROW))


def beside(variant: Variant, slots: int, name: str = "", *more: str) -> Variant:
    """The side with that many slots, which leave their bytes to it."""
    return Variant(name or variant.name, (*variant.settings, f"cache.slots={slots}", *more))


# beside so many slots an 8 GB card has room for chunks of 512 tokens, and with the head's bytes for longer ones
ALIAS_SLOTS, NOTHING_LENT = 2_020, "prefill.borrow=false"
OWN_SLOTS = 17_000  # leave a 32 GB card the buffers of chunks of 8,192 tokens
EFFECTS = {
    "own": Effect(
        32_607, (17_944,), (beside(BORROWED, OWN_SLOTS), beside(OWN, OWN_SLOTS)), "prompt +25.5 % with own buffers"
    ),
    "own_grid": Effect(
        32_607, (1_024, 17_944),
        tuple(
            beside(side, slots, f"{side.name} {slots} slots")
            for slots in (1_800, 3_600, 6_400) for side in (BORROWED, OWN)
        ),
        "no figures: the sources ask for them",
    ),
    "head_alias": Effect(
        8_151, (29_854,),
        (
            beside(BORROWED, ALIAS_SLOTS, "baseline", NOTHING_LENT), beside(ALIAS, ALIAS_SLOTS, "", NOTHING_LENT),
            beside(ALIAS, ALIAS_SLOTS, "alias always", NOTHING_LENT, "policy.head_alias.min_fresh_tokens=0"),
        ),
        "chunk 512 -> 2,048 tokens, prompt +118 %; reads of 1 to 64 tokens +640 ms", short_reads=True,
    ),
    "kv_grow": Effect(
        16_376, (32_768,), (BORROWED, Variant("grow", ("policy=kv_grow", BORROW))),
        "slots 3,396 -> 5,719, 100 -> 115 tok/s, a prompt of 32K 7.44 -> 6.36 s", context=262_144,
    ),
    "replacement": Effect(
        16_376, (2_048,),
        tuple(
            Variant(how, ("policy=baseline", "model.routing.drift=0.5", f"cache.replacement={how}"))
            for how in ("static", "adaptive", "lru", "lfu_decay")
        ),
        "peers: 20 to 37 % over static residency",
    ),
    "forced": Effect(
        8_151, (29_854,),
        (
            beside(BORROWED, 1, "one slot"), beside(ALIAS, 1, "one slot, alias"), ALIAS,
        ),
        "prompt / decode tok/s: 441.0 / 22.26, 666.3 / 24.50, 667.7 / 26.21", forced=3_072,
    ),
}  # fmt: skip


@dataclass
class Side:
    """A variant that has been planned."""

    variant: Variant
    config: RunConfig
    plan: MemoryPlan
    programs: Any = None  # compiled once for all pairs

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What its programs depend on."""
        p = self.plan
        decay = p.request.moving.replacement_decay
        return p.arena, p.context_cells, p.prefill_buckets, p.staged_buckets, p.stage_bytes, p.loans(), decay


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    print(NOTE, flush=True)
    with ExitStack() as stack:
        register()
        stack.enter_context(initialize_config_dir(version_base="1.3", config_dir=str(REPOSITORY / "conf")))
        comparisons = [Comparison(options, name, stack) for name in options.effects]
        if options.plan:
            return
        loaded = load(comparisons)
        for comparison in comparisons:
            comparison.run(loaded)


@dataclass
class Loaded:
    """What all sides share: one bank, and weights of which the head may be another array after a loan."""

    weights: Any
    banks: Any
    device: dict[str, Any]


def load(comparisons: list[Comparison]) -> Loaded:
    """Start JAX for the largest card and read the model once."""
    sides = [side for comparison in comparisons for side in comparison.sides]
    largest = max(comparisons, key=lambda comparison: comparison.effect.vram_mib)
    host = max(side.plan.ledger.total_bytes(Phase.START, Memory.HOST) for side in sides)
    start_jax(largest.sides[0].config, largest.hardware, host_pool_bytes=host)
    import jax

    from strata_jax.engine.engine import bank_sharding
    from strata_jax.engine.load import load_model

    first, before = sides[0].plan, time.perf_counter()
    if len({(s.plan.page_bytes, s.plan.num_blocks, s.plan.request.expert_kernels) for s in sides}) > 1:
        raise SystemExit("the sides differ in pages or blocks; give engine.page_kib or spec.window with --set")
    model = load_model(
        largest.source, largest.geometry, first.num_blocks, first.page_bytes, bank_sharding(),
        with_draft=first.with_draft, kernels=first.request.expert_kernels,
    )  # fmt: skip
    jax.block_until_ready(model)
    print(f"loaded in {time.perf_counter() - before:.0f} s", flush=True)
    return Loaded(*model, {"device": jax.devices()[0].device_kind, "jax": jax.__version__})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("effects", choices=EFFECTS, nargs="+")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=64, help="decode rounds after a prompt")
    parser.add_argument("--model", default="synthetic_full")
    parser.add_argument("--vram-mib", type=int, help="another card")
    parser.add_argument("--context", type=int, help="another context, in cells")
    parser.add_argument("--prompts", type=int, nargs="+", help="instead of the published lengths")
    parser.add_argument("--forced", type=int, help="instead of the published number of forced tokens")
    parser.add_argument("--plan", action="store_true", help="print the plans and end")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing new after so long")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--set", nargs="+", default=[], help="more settings of every side, as for run.py")
    return parser.parse_args()


class Comparison:
    """The sides of one effect."""

    def __init__(self, options: argparse.Namespace, name: str, stack: ExitStack) -> None:
        self.o, self.name, self.started, effect = options, name, time.time(), EFFECTS[name]
        self.effect = replace(
            effect,
            prompts=tuple(options.prompts or effect.prompts),
            forced=options.forced or effect.forced,
            vram_mib=options.vram_mib or effect.vram_mib,
            context=options.context or effect.context,
        )
        self.path = options.out / "h200_effects.jsonl"
        self.source: Any = None
        self.sides = [self.planned(variant, stack) for variant in self.effect.variants]
        self.about: dict[str, Any] = {
            "effect": name,
            "vram_mib": self.effect.vram_mib,
            "published": effect.published,
            "weights": "synthetic",
        }

    def planned(self, variant: Variant, stack: ExitStack) -> Side:
        effect, need = self.effect, max(self.effect.prompts) + 2 * max(SHORT_READS) + self.o.rounds * 4
        settings = [
            f"model={self.o.model}", f"hardware.vram_mib={effect.vram_mib}", "engine.kernels=auto", "kv.type=int8",
            f"model.max_context={effect.context or need + effect.forced}", *variant.settings, *self.o.set,
        ]  # fmt: skip
        if effect.forced:
            settings.append("spec.window=1")
        config = to_config(compose("config", overrides=settings))
        folder = self.o.out / f"{self.name}_{variant.name.replace(' ', '_')}"
        record = stack.enter_context(RunRecord.open(folder, config))
        if self.source is None:
            self.source, self.geometry = open_model(config)
        request = Request("prompt", self.o.rounds, token_ids=(1,), ignore_eos=True)
        prompts = [Prompt(request, tuple([1] * length)) for length in effect.prompts]
        plan, self.hardware = make_plan(config, self.geometry, prompts, record)
        return Side(variant, config, plan)

    def run(self, loaded: Loaded) -> None:
        """Alternate the sides, pair by pair."""
        self.about |= loaded.device
        for pair in range(self.o.pairs):
            for side in self.sides:
                if time.time() - self.started > self.o.seconds:
                    print("no time left", flush=True)
                    return
                self.measure(side, pair, loaded)
                gc.collect()  # an engine and its sessions hold each other: the arena goes before the next one comes
        self.compare()

    def measure(self, side: Side, pair: int, loaded: Loaded) -> None:
        from strata_jax.engine.engine import Engine
        from strata_jax.engine.runtime import Runtime

        made = side.plan
        before = time.perf_counter()
        weights, loaded.weights = loaded.weights, None  # a lent head must have one owner
        same = [s.programs for s in self.sides if s.programs and (s is side or s.shapes == side.shapes)]
        engine = Engine.lay_out(
            self.source, self.geometry, made, weights, loaded.banks, loans=None if same else made.loans(),
            min_p=side.config.spec.min_p,
        )  # fmt: skip
        del weights
        engine.programs = side.programs = same[0] if same else engine.programs
        events = Events()
        runtime = Runtime.start(engine, device_settings(side.config, made), sink=events, min_p=side.config.spec.min_p)
        settings = {
            "variant": side.variant.name, "pair": pair, "slots": made.expert_slots, "chunk": made.chunk_tokens,
            "layout_s": time.perf_counter() - before, "compile_s": engine.programs.compile_s,
        }  # fmt: skip
        for length in self.effect.prompts:
            # the first has programs that only moves need still to compile, and shows what prompts use: short, not timed
            for reading in ("first", "again") if pair == 0 else ("again",):
                seed = 10 * pair + (reading == "again")  # another topic each time
                num = length if reading == "again" else min(length, 2 * made.chunk_tokens)
                tokens = topic_of(self.source, num, seed=seed)
                self.request(runtime, engine, tokens, events, settings | {"reading": reading, "tokens": num})
        loaded.weights = engine.weights

    def request(self, runtime: Any, engine: Any, tokens: list[int], events: Events, settings: dict[str, Any]) -> None:
        compiled, name = engine.programs.compile_s, f"request {settings['pair']} {settings['reading']}"
        events.clear()
        began = time.perf_counter()
        reading = runtime.read(tokens, name=name, conversation=name, output_tokens=self.o.rounds)
        read_s = time.perf_counter() - began
        limit = FIRST_ROUNDS if settings["reading"] == "first" else None
        forced, num_rounds = (min(num, limit or num) for num in (self.effect.forced, self.o.rounds))
        if forced:
            text, following = [], self.source.next_tokens()
            for _ in range(forced):
                text.append(int(following[(text or tokens)[-1]]))
            rounds = [record for record, _ in runtime.force(reading, text)]
        else:
            rounds = list(runtime.decode(reading, max_tokens=num_rounds, stop_ids=frozenset(), min_p=0.0))
        runtime.finish(reading)
        took = sum(r.seconds for r in rounds)
        row = {
            "read_ms": 1000 * read_s, "prompt_tok_s": len(tokens) / read_s, "moves": dict(events.counts),
            "moves_ms": events.ms, "decode_tok_s": sum(len(r.emitted) for r in rounds) / took if took else None,
            "round_ms": 1000 * statistics.median(r.seconds for r in rounds),
            "hit_rate": sum(r.hits for r in rounds) / max(1, sum(r.lookups for r in rounds)),
            "compiled_s": engine.programs.compile_s - compiled, "kv_cells": runtime.state.kv_mapped_cells,
        }  # fmt: skip
        self.write("request", settings | row)
        if self.effect.short_reads:
            history = reading.session.tokens
            for fresh in SHORT_READS:
                more = [*history, *topic_of(self.source, fresh, seed=99)]
                before, compiled = time.perf_counter(), engine.programs.compile_s
                short = runtime.read(more, name=name, conversation=name, output_tokens=1)
                row = {
                    "fresh": len(more) - short.facts.reused_tokens, "read_ms": 1000 * (time.perf_counter() - before),
                    "compiled_s": engine.programs.compile_s - compiled,
                }  # fmt: skip
                self.write("short read", settings | row)
                runtime.finish(short)
                history = short.session.tokens

    def compare(self) -> None:
        """Medians of the timed readings of every side, the baseline first."""
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        rows = [r for r in rows if r["effect"] == self.name and r["what"] == "request" and r["reading"] == "again"]
        for length in self.effect.prompts:
            for side in self.sides:
                mine = [r for r in rows if r["variant"] == side.variant.name and r["tokens"] == length]
                texts = [f"{side.plan.expert_slots:,} slots", f"chunk {side.plan.chunk_tokens:,}", f"{len(mine)} runs"]
                for key in ("read_ms", "prompt_tok_s", "decode_tok_s"):
                    values = sorted(r[key] for r in mine)
                    if values:
                        middle = statistics.median(values)
                        texts.append(f"{key} {middle:,.1f} ({values[0]:,.1f} to {values[-1]:,.1f})")
                print(f"{length:,} tokens, {side.variant.name}: {', '.join(texts)}")
        print(f"published: {self.effect.published}", flush=True)

    def write(self, what: str, row: dict[str, Any]) -> None:
        row = {"what": what, **self.about, **row, "at_s": round(time.time() - self.started, 1)}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = ("variant", "pair", "reading", "tokens", "fresh", "read_ms", "prompt_tok_s", "round_ms", "decode_tok_s",
                 "hit_rate", "moves_ms", "kv_cells")  # fmt: skip
        print(what, " ".join(f"{k}={row[k]:.4g}" if isinstance(row[k], float) else f"{k}={row[k]}"
                             for k in shown if row.get(k) is not None), flush=True)  # fmt: skip


class Events:
    """Counts the moves of a request and their time."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.counts: dict[str, int] = {}
        self.ms = 0.0

    def event(self, kind: str, **values: Any) -> None:
        if "cause" in values:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.ms += values["ms"]


def topic_of(model: SyntheticModel, count: int, seed: int) -> Sequence[int]:
    """Tokens of one of the model's topics."""
    return model.topic_tokens(seed % model.skew.num_topics, count, seed=seed)


if __name__ == "__main__":
    main()
