"""What every pipeline begins with: open the model, read the requests, plan the memory, start JAX, load the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.policies import moving_memory
from pipelines.rankings import given_ranking
from strata_jax.config.checks import auto_limit
from strata_jax.config.contradictions import given_sources
from strata_jax.config.executors import is_synthetic, preset_notes
from strata_jax.config.schema import AUTO, RunConfig
from strata_jax.errors import DoesNotFit
from strata_jax.geometry import Geometry
from strata_jax.gguf.chat import ChatTemplate
from strata_jax.gguf.reader import open_gguf
from strata_jax.gguf.source import WeightSource
from strata_jax.gguf.tokenizer import Tokenizer
from strata_jax.hardware import Hardware
from strata_jax.memory.attention_kernels import attention_notes
from strata_jax.memory.expert_kernels import choose_kernels
from strata_jax.memory.layout import KIB
from strata_jax.memory.ledger import MIB, Memory, Phase
from strata_jax.memory.plan import MemoryPlan, try_plan
from strata_jax.memory.request import AUTO_CHUNK_MAX_TOKENS, GPU_AUTO_CHUNK_MAX_TOKENS, PlanRequest
from strata_jax.memory.table import plan_text
from strata_jax.memory.unfit import Unfit
from strata_jax.preset_settings import geometry_of_preset, synthetic_counts
from strata_jax.presets import model_shape
from strata_jax.report.progress import slow_step
from strata_jax.report.record import RunRecord
from strata_jax.runtime import describe_target, device_budget_bytes, start_jax
from strata_jax.sampling import Sampling
from strata_jax.synthetic import builtin_model_path
from strata_jax.synthetic.full import NOTE, SyntheticModel
from strata_jax.synthetic.routing import RoutingSkew
from strata_jax.workloads import Request, load_workload, requests_of

if TYPE_CHECKING:
    from strata_jax.engine.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request and its prompt in tokens.

    Attributes:
        tokens_before: how many tokens its conversation has at most before `token_ids`.
    """

    request: Request
    token_ids: tuple[int, ...]
    tokens_before: int = 0


def model_path(config: RunConfig) -> Path:
    """The given file, or the built-in model (made on first use)."""
    if config.model.path:
        return Path(config.model.path).expanduser()
    with slow_step("making the built-in model"):
        return builtin_model_path(seed=config.model.seed)


def open_model(config: RunConfig) -> tuple[WeightSource, Geometry]:
    """Open the model's header, or describe the synthetic model."""
    if is_synthetic(config):
        return _synthetic_model(config)
    path = model_path(config)
    file = open_gguf(path)
    geometry = Geometry.from_gguf(file)
    for warning in geometry.warnings:
        log.warning("%s: %s", path.name, warning)
    return file, geometry


def _synthetic_model(config: RunConfig) -> tuple[WeightSource, Geometry]:
    model, zipf = config.model, config.model.routing.zipf
    skew = RoutingSkew(None if zipf == AUTO else float(zipf), model.routing.drift)
    geometry = geometry_of_preset(config)
    source = SyntheticModel(model_shape(model.name, **synthetic_counts(config)), geometry, skew, model.seed)
    print(f"{geometry.name}: {NOTE}; routing: {skew.text()}")
    return source, geometry


def read_prompts(config: RunConfig, file: WeightSource, geometry: Geometry) -> tuple[list[Prompt], Tokenizer]:
    """Turn the workload's requests into tokens with the file's own tokenizer and chat template."""
    tokenizer = Tokenizer.from_gguf(file.metadata)
    template: ChatTemplate | None = None
    prompts: list[Prompt] = []
    lengths: dict[str | None, int] = {}
    for request in requests_of(config):
        if request.token_ids is not None:
            ids = list(request.token_ids)
        elif request.prompt is not None:
            ids = tokenizer.encode_prompt(request.prompt)
        else:
            template = template or ChatTemplate.from_gguf(file.metadata, tokenizer)
            ids = template.encode_messages(list(request.messages or ()), **request.chat_options)
        ids = ids[: request.prompt_tokens]
        for tokens in (ids, request.forced_token_ids):
            if tokens is not None:
                geometry.check_token_ids(tokens)
        before = lengths.get(request.conversation, 0) if request.continues else 0
        lengths[request.conversation] = before + len(ids) + request.max_output_tokens
        prompts.append(Prompt(request, tuple(ids), before))
    return prompts, tokenizer


def make_plan(
    config: RunConfig,
    geometry: Geometry,
    prompts: list[Prompt],
    record: RunRecord,
    *,
    all_logits: bool = False,
    with_output: bool = True,
) -> tuple[MemoryPlan, Hardware]:
    """Plan the memory for these prompts, print the plan, and write it down. Nothing is allocated before this.

    A plan that does not fit is written down too, before DoesNotFit is raised.

    with_output: whether the requests' output tokens need cells too.
    """
    notes = [*_stand_in(config), *preset_notes(config)]
    hardware = describe_target(config)
    usable_bytes = device_budget_bytes(config, hardware)
    need = max((_needed_cells(p, config, geometry, with_output=with_output) for p in prompts), default=None)
    kernels, kernel_notes = choose_kernels(
        config.engine.kernels.name, geometry, on_gpu=hardware.gpu is not None, spec_window=config.spec.window
    )
    if kernels:
        kernel_notes = (*kernel_notes, *attention_notes(geometry, config.kv.type.name))
    auto_max = AUTO_CHUNK_MAX_TOKENS if hardware.gpu is None else GPU_AUTO_CHUNK_MAX_TOKENS
    request = PlanRequest(
        context_cells=_given(config.model.max_context),
        workload_cells=need,
        chunk_tokens=_given(config.prefill.chunk),
        chunk_auto_max=auto_limit(str(config.prefill.chunk)) or auto_max,
        expert_slots=_given(config.cache.slots),
        page_bytes=None if config.engine.page_kib == AUTO else int(config.engine.page_kib) * KIB,
        kv_type=config.kv.type.name,
        spec_window=config.spec.window,
        all_logits=all_logits,
        device_budget_bytes=None if usable_bytes is None else usable_bytes + hardware.vram_reserve_bytes,
        reserve_bytes=0 if usable_bytes is None else hardware.vram_reserve_bytes,
        host_budget_bytes=hardware.ram_budget_bytes,
        shared_memory=hardware.gpu is None,
        expert_kernels=kernels,
        stage_bytes=None if config.prefill.stage_mib == AUTO else int(config.prefill.stage_mib) * MIB,
        moving=moving_memory(config, geometry, _given(config.model.max_context) or need),
        ranking=given_ranking(config, record),
    )
    made = try_plan(geometry, request)
    text = plan_text(made)
    record.write_plan(made.to_json(), text)
    if isinstance(made, Unfit):
        raise DoesNotFit(made.message(), shortfall_bytes=made.shortfall_bytes)
    print(
        f"Memory plan of {geometry.name}\n{text}",
        *(f"- {n}\n" for n in (*notes, *kernel_notes, *hardware.notes)),
        sep="",
    )
    record.write_json("hardware.json", hardware)
    return made, hardware


def load_engine(
    config: RunConfig, hardware: Hardware, file: WeightSource, geometry: Geometry, made: MemoryPlan, record: RunRecord
) -> Engine:
    """Start JAX as planned, then read the model into bank and arena."""
    env = start_jax(config, hardware, host_pool_bytes=made.ledger.total_bytes(Phase.START, Memory.HOST))
    from strata_jax.engine.engine import Engine  # JAX's environment is in place only now
    from strata_jax.engine.program_store import open_store

    store = open_store(env.compilation_cache_dir)

    @contextmanager
    def watch(program: str) -> Iterator[None]:
        started_s = record.elapsed_s()
        with slow_step(f"compiling {program}"):
            yield
        record.event("compile", program=program, ms=1000 * (record.elapsed_s() - started_s))

    # under policies programs are there before the arena, so that nothing is compiled between moves; those with kernels
    # take long enough to compile that it is worth doing beside each other
    request = made.request
    loans = made.loans() if request.moving.on_device or request.expert_kernels else None
    started = time.perf_counter()
    with slow_step(f"loading {geometry.total_bytes / 2**20:,.0f} MiB"):
        sampling = Sampling(config.workload.temperature)
        engine = Engine.load(file, geometry, made, watch, loans, config.spec.min_p, sampling, store)
    load_s = time.perf_counter() - started - engine.programs.compile_s
    for owner, num_bytes in engine.live_bytes():
        record.event("load", owner=owner, bytes=num_bytes)
    weights = f"synthetic; routing: {file.skew.text()}" if isinstance(file, SyntheticModel) else "file"
    record.update(model=geometry.name, weights=weights, device=engine.device_name, load_s=load_s)
    return engine


def check_peak(config: RunConfig, engine: Engine) -> None:
    """Say at a run's end if it has taken more device memory than is planned; RuntimeError with `engine.check`."""
    if problem := engine.past_limit():
        if config.engine.check:
            raise RuntimeError(problem)
        log.warning(problem)


def _stand_in(config: RunConfig) -> list[str]:
    """Let the CPU stand in for a card where the workload needs one to show something and nothing else was asked for."""
    if given_sources(config) or config.hardware.vram_mib != AUTO or config.model.path is not None:
        return []
    vram_mib = load_workload(config.workload.name).get("stand_in_vram_mib")
    if vram_mib is None or describe_target(config).gpu is not None:
        return []
    config.hardware.vram_mib, config.hardware.vram_reserve_mib = int(vram_mib), 0
    name = config.workload.name
    return [f"hardware.vram_mib={vram_mib}: the card that workload={name} is made for; the CPU stands in for it"]


def _needed_cells(prompt: Prompt, config: RunConfig, geometry: Geometry, *, with_output: bool) -> int:
    """Cells that a request needs; the last token of an output needs none.

    An output length that nobody asked for gives way to a given context and to the model's own: the output ends there.
    """
    num_prompt, request = prompt.tokens_before + len(prompt.token_ids), prompt.request
    if not with_output:
        return num_prompt
    if request.forced_token_ids is not None:
        return num_prompt + len(request.forced_token_ids)
    need = num_prompt + request.max_output_tokens - 1
    if config.workload.max_output_tokens != AUTO:
        return need
    limit = geometry.context_length if config.model.max_context == AUTO else int(config.model.max_context)
    return max(num_prompt, min(need, limit))


def _given(value: int | str) -> int | None:
    """A number that was given; None for `auto` and `auto:N`."""
    return None if str(value).startswith(AUTO) else int(value)
